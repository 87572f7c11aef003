"""What operators do: cached prefixes, aborts, profiles, sleep; and who is an operator."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.http.conftest import Server, Start, servers, until
from unisono.cluster.token_stream import TokenStream
from unisono.frontend.sequence_output import SequenceOutput
from unisono.http.answers.generation import Generation, Style
from unisono.http.observability.metrics import ServerMetrics
from unisono.types import EngineRequest, FinishReason, SamplingParams, TokenDelta

TEXT = "/v1/completions"
LONG = {"prompt": [5, 6, 7], "max_tokens": 400}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        profiles = str(tmp_path_factory.mktemp("profiles"))
        yield start(step_seconds=0.02, profile_dir=profiles, host="0.0.0.0", drain_timeout=1.5)


def running(server: Server) -> int:
    return server.info()["requests"]["running"]


def test_prefixes_are_forgotten(own: Server) -> None:
    before = own.info()["resets"]
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert own.http.post(path).json() == {"freed_pages": 5}
    assert own.info()["resets"] == before + 2


def test_abort_ends_answers_early(own: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(own.http.post, TEXT, json=LONG)
        with own.http.stream("POST", TEXT, json={**LONG, "stream": True, "n": 2}) as response:
            lines = (line for line in response.iter_lines() if line)
            answer_id = json.loads(next(lines)[6:])["id"]
            assert own.http.post("/abort", json={"rid": answer_id}).json() == {"aborted": [answer_id]}
            *rest, done = list(lines)
        assert done == "data: [DONE]"
        ends = [c["finish_reason"] for line in rest for c in json.loads(line[6:])["choices"] if c["finish_reason"]]
        assert ends == ["abort", "abort"]
        assert not whole.done()
        until(lambda: own.http.get("/load").json()["server_load"] == 1)  # a stream is forgotten a moment after its end
        assert len(own.http.post("/abort_request", json={"abort_all": True}).json()["aborted"]) == 1
        assert whole.result(60).json()["choices"][0]["finish_reason"] == "abort"
    assert running(own) == 0
    assert own.http.post("/abort", json={"request_ids": ["cmpl-none"]}).json() == {"aborted": []}
    assert own.http.post("/abort", json={}).status_code == 400


def test_abort_before_the_first_token(start: Start) -> None:
    """Even where the prompt's log-probabilities were to come with it."""
    server = start(prefill_seconds=30)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.http.post, TEXT, json={**LONG, "prompt_logprobs": 1})
        while not server.http.post("/abort", json={"abort_all": True}).json()["aborted"]:
            time.sleep(0.02)
        answer = whole.result(60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("abort", "")
    assert running(server) == 0


def test_abort_before_the_engine_has_the_request() -> None:
    """``/abort`` names it as aborted from when it is known, which is before it is handed on."""

    class Client:
        """An engine's client, as far as a request goes that is aborted."""

        stream: TokenStream | None = None

        async def submit(self, request: EngineRequest, *_: object) -> TokenStream:
            self.stream = TokenStream(request, lambda name: None)
            return self.stream

        def cancel(self, request_id: str) -> None:
            if self.stream is not None:
                self.stream.push(TokenDelta(request_id, [], FinishReason.ABORT))

    async def finish() -> str | None:
        request = EngineRequest("r", [1], SamplingParams(seed=0))
        timer = ServerMetrics("m", list).timer(request)
        generation = Generation(Client(), SequenceOutput(request, None), timer, 0, None, Style(), None)  # type: ignore[arg-type]
        generation.cancel()
        await generation.start()
        async for piece in generation.pieces():
            return piece.finish
        return None

    assert asyncio.run(asyncio.wait_for(finish(), 10)) == "abort"


def test_a_profile_is_written(own: Server, start: Start) -> None:
    assert own.http.post("/stop_profile").status_code == 409
    assert own.http.post("/start_profile").json() == {"recording": True}
    assert own.http.post("/start_profile").status_code == 409
    own.http.post(TEXT, json={**LONG, "max_tokens": 3})
    path = Path(own.http.post("/stop_profile").json()["path"])
    assert "traceEvents" in json.loads(gzip.decompress(path.read_bytes()))
    without = start()
    refused = without.http.post("/start_profile")
    assert (refused.status_code, "--profile-dir" in refused.text) == (400, True)


def test_sleep_finishes_refuses_and_wakes(own: Server) -> None:
    resets = own.info()["resets"]
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(own.http.post, TEXT, json={**LONG, "max_tokens": 20})
        endless = pool.submit(own.http.post, TEXT, json=LONG)
        while running(own) < 2:
            time.sleep(0.02)
        asleep = own.http.post("/sleep", params={"level": 1}).json()
        assert short.result(60).json()["choices"][0]["finish_reason"] == "length"
        assert endless.result(60).json()["choices"][0]["finish_reason"] == "abort", "longer than --drain-timeout"
    assert (asleep["is_sleeping"], asleep["freed_pages"]) == (True, 5)
    assert "weights" in asleep["kept"]
    assert own.info()["resets"] == resets + 1
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = own.http.post(TEXT, json=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert own.http.get("/health").status_code == 200
    assert own.http.post("/wake_up").json() == {"is_sleeping": False}
    assert own.http.post(TEXT, json={**LONG, "max_tokens": 3}).status_code == 200
    assert own.http.post("/sleep?level=2").status_code == 400
    assert own.http.post("/sleep?level=deep").json()["error"]["param"] == "level"
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": False}


ADMIN = ["/reset_prefix_cache", "/flush_cache", "/abort", "/start_profile", "/stop_profile", "/sleep", "/wake_up"]


@pytest.mark.parametrize("path", ADMIN)
def test_only_operators(own: Server, path: str) -> None:
    """Not web pages, not other machines through a proxy, not other machines."""
    origins = (
        "https://evil.example",
        "http://localhost.evil.example",
        "http://localhost@evil.example",
        "http://localhost:3000.evil.example",
        "null",
        "http://[",
    )
    proxied = ({"x-forwarded-for": "203.0.113.7"}, {"forwarded": "for=x"})
    for headers in (*({"origin": origin} for origin in origins), *proxied):
        refused = own.http.post(path, json={"abort_all": True}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
    other = _own_address()
    if other is not None:
        port = own.url.rsplit(":", 1)[1]
        assert httpx.post(f"http://{other}:{port}{path}", json={"abort_all": True}).status_code == 403


def test_a_page_of_this_machine_is_an_operators(own: Server) -> None:
    assert own.http.post("/flush_cache", headers={"origin": "http://localhost:3000"}).status_code == 200


def test_with_keys_operators_need_one(start: Start) -> None:
    server = start(api_key="secret")
    for path in ADMIN:
        assert server.http.post(path, json={}).status_code == 401
    assert server.http.post("/reset_prefix_cache", headers={"authorization": "Bearer secret"}).status_code == 200


def _own_address() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if address.startswith("127.") else address
