"""A bounded queue, limits per client, and a fair share of the server for each."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.http.conftest import PLAIN, Server, Start, serving, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def key_file(directory: Path, **limits: str) -> Path:
    """A file of keys: each name is its own key."""
    path = directory / "keys"
    lines = [f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()} {more}" for name, more in limits.items()]
    path.write_text("\n".join(lines))
    return path


def ask(server: Server, key: str = "", path: str = TEXT, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.http.post(path, json={"prompt": [5, 6], "max_tokens": 2, **body}, headers=headers)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def running(server: Server) -> int:
    return server.http.get("/load").json()["server_load"]


def refused(server: Server, reason: str, key: str = "") -> float:
    start = f'unisono:requests_refused_total{{engine="0",key="{key}",model_name="fake",reason="{reason}"}}'
    return sum(float(line.split()[-1]) for line in server.http.get("/metrics").text.splitlines() if start in line)


# ---- the queue -------------------------------------------------------------------------------------


def test_a_full_queue_is_503_with_retry_after(start: Start, pool: ThreadPoolExecutor) -> None:
    """Two run, three wait, the sixth is refused, in each API's words; when there is room again it is taken."""
    server = start(step_seconds=0.02, max_num_seqs=2, load={"max_queued_requests": 3})
    long = [pool.submit(ask, server, max_tokens=80) for _ in range(5)]
    until(lambda: running(server) == 5)
    answer = ask(server)
    assert answer.status_code == 503
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["code"] == "queue_full"
    assert "--max-queued-requests" in answer.json()["error"]["message"]
    message = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{server.url}/v1/messages", json=message)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["retry-after"]
    assert refused(server, "queue_full") == 2
    assert server.http.get("/health").status_code == 200
    assert all(future.result().status_code == 200 for future in long)
    assert ask(server).status_code == 200
    assert "503 queue_full" in server.log.read_text()


def unfinished(server: Server, key: str, size: int) -> socket.socket:
    """A connection whose request has sent all of its body but the last byte."""
    connection = socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port), timeout=20)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {size + 1}\r\n\r\n".encode() + b" " * size)
    return connection


def test_bodies_that_wait_are_bounded(start: Start, tmp_path: Path) -> None:
    """Who has more than a share of the bytes is refused, the others are served; all bytes come back."""
    file = key_file(tmp_path, alice="", bob="")
    server = start(api_key_file=str(file), load={"max_waiting_bytes": 100_000})
    server.http.headers["authorization"] = "Bearer bob"
    for _ in range(3):
        with unfinished(server, "alice", 90_000), unfinished(server, "alice", 20_000) as second:
            answer = ""
            while "}" not in answer:
                answer += second.recv(4096).decode()
            assert answer.startswith("HTTP/1.1 503")
            assert "retry-after" in answer.lower()
            assert "too_many_bytes" in answer
            assert ask(server, "bob", user="u" * 20_000).status_code == 200
        until(lambda: ask(server, "alice", user="u" * 99_000).status_code == 200)
    assert refused(server, "too_many_bytes", "alice") >= 3


def test_openai_clients_try_again(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.01, max_num_seqs=1, load={"max_queued_requests": 0})
    first = pool.submit(ask, server, max_tokens=60)
    until(lambda: running(server) == 1)
    assert ask(server).status_code == 503
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5)
    assert client.completions.create(model="fake", prompt=[5], max_tokens=1).choices[0].finish_reason == "length"
    assert first.result().status_code == 200


def test_every_sequence_counts(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.02, max_num_seqs=2, load={"max_queued_requests": 6})
    first = pool.submit(ask, server, max_tokens=100, n=4, prompt=[[5], [6]])
    until(lambda: running(server) == 1)
    until(lambda: ask(server).status_code == 503)
    assert len(first.result().json()["choices"]) == 8
    assert ask(server).status_code == 200


def test_disconnected_and_failed_requests_release_queue_slots(start: Start, pool: ThreadPoolExecutor) -> None:
    """Clients that go, requests that are wrong, and background responses: each place comes back, once."""
    server = start(step_seconds=0.02, max_num_seqs=1, load={"max_queued_requests": 1})
    for _ in range(3):
        for stream in (True, False):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(server.url + TEXT, json={"prompt": [5], "max_tokens": 400, "stream": stream}, timeout=0.2)
        until(lambda: running(server) == 0)
        for body in ({"prompt": []}, {"prompt": [990]}, {"prompt": [991]}, {"wibble": 1}):
            assert httpx.post(server.url + TEXT, json=body).status_code in (400, 500)
        assert httpx.post(server.url + TEXT, content=b"{", headers={"content-type": "text/plain"}).status_code == 415
    both = [pool.submit(ask, server, max_tokens=60) for _ in range(2)]
    until(lambda: running(server) == 2)
    assert ask(server).status_code == 503
    assert [future.result().status_code for future in both] == [200, 200]


def test_background_responses_keep_their_place(start: Start, model_dir: Path) -> None:
    server = start(model_dir, step_seconds=0.05, load={"client": {"concurrent_requests": 1}})
    body = {"model": "fake", "input": "Hello", "max_output_tokens": 12, "background": True}
    response = server.http.post("/v1/responses", json=body).json()
    assert ask(server).status_code == 429
    until(lambda: server.http.get(f"/v1/responses/{response['id']}").json()["status"] not in ("queued", "in_progress"))
    until(lambda: ask(server).status_code == 200)


def test_a_full_queue_is_shared(start: Start, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Who has filled the queue is refused; another gets its share of it all the same."""
    file = key_file(tmp_path, one="", other="")
    options: dict[str, Any] = {"api_key_file": str(file), "max_num_seqs": 2, "load": {"max_queued_requests": 8}}
    server = start(step_seconds=0.02, **options)
    flood = [pool.submit(ask, server, "one", max_tokens=100) for _ in range(10)]
    until(lambda: running(server) == 10)
    assert ask(server, "one").status_code == 503
    second = [pool.submit(ask, server, "other", max_tokens=100) for _ in range(20)]
    statuses = [future.result().status_code for future in second]
    assert statuses.count(200) == 5, "half of ten"
    assert statuses.count(503) == 15
    assert all(future.result().status_code == 200 for future in flood)
    assert refused(server, "queue_full", "other") == 15
    assert refused(server, "queue_full", "one") == 1


# ---- limits per client -----------------------------------------------------------------------------


def test_concurrency_per_key(start: Start, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    file = key_file(tmp_path, one="", other="", wide="concurrent_requests=4")
    load = {"client": {"concurrent_requests": 2}}
    server = start(step_seconds=0.02, api_key_file=str(file), load=load)
    first = [pool.submit(ask, server, "one", max_tokens=100) for _ in range(2)]
    until(lambda: running(server) == 2)
    answer = ask(server, "one")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_concurrent_requests")
    assert "The key one has 2 requests under way" in error["message"]
    assert ask(server, "one", path="/tokenize").status_code == 429
    assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "one"}).status_code == 200
    assert ask(server, "other").status_code == 200
    wide = [pool.submit(ask, server, "wide", max_tokens=100) for _ in range(4)]
    until(lambda: running(server) == 6)
    assert ask(server, "wide").status_code == 429
    assert all(future.result().status_code == 200 for future in (*first, *wide))
    assert ask(server, "one").status_code == 200
    assert refused(server, "too_many_concurrent_requests", "one") == 2


def test_rate_per_key(start: Start, tmp_path: Path) -> None:
    file = key_file(tmp_path, slow="requests_per_minute=6", quick="requests_per_minute=600", free="")
    server = start(api_key_file=str(file))
    assert [ask(server, "slow").status_code for _ in range(6)] == [200] * 6
    answer = ask(server, "slow")
    assert answer.status_code == 429
    assert 8 <= int(answer.headers["retry-after"]) <= 10
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert "The key slow may send 6 requests in a minute" in answer.json()["error"]["message"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="slow", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="fake", prompt=[5])
    assert [ask(server, "free").status_code for _ in range(20)] == [200] * 20
    assert refused(server, "rate_limit_exceeded", "slow") == 2


def test_rates_recover(start: Start) -> None:
    """Without keys the address counts. 120 a minute: after a burst of 120, one each half second."""
    server = start(load={"client": {"requests_per_minute": 120}})
    with httpx.Client(base_url=server.url) as http:
        body = {"prompt": [5], "max_tokens": 1}
        assert [http.post(TEXT, json=body).status_code for _ in range(120)] == [200] * 120
        refused: list[httpx.Response] = []

        def is_refused() -> bool:  # a slow machine earns a few more while it sends
            refused.append(http.post(TEXT, json=body))
            return refused[-1].status_code == 429

        until(is_refused)
        answer = refused[-1]
        assert answer.headers["retry-after"] == "1"
        assert "This client may send 120 requests in a minute" in answer.json()["error"]["message"]
        time.sleep(1.1)
        assert [http.post(TEXT, json=body).status_code for _ in range(3)][:2] == [200, 200]


def test_unauthorized_requests_do_not_consume_rate_limit(start: Start) -> None:
    """A request without a key uses up nobody's rate."""
    server = start(api_key="secret", load={"client": {"requests_per_minute": 3}})
    assert [ask(server, "wrong").status_code for _ in range(10)] == [401] * 10
    assert [ask(server, "secret").status_code for _ in range(4)] == [200, 200, 200, 429]


# ---- fair share ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real engine with two slots, and two keys."""
    directory = tmp_path_factory.mktemp("tiny")
    file = key_file(directory, one="", other="")
    with serving(directory, "tiny", "--api-key-file", str(file), "--max-num-seqs", "2", *PLAIN) as server:
        yield server


@pytest.fixture(scope="module")
def crowd(tiny: Server) -> Iterator[httpx.Client]:
    """A client with as many connections as there are requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with httpx.Client(base_url=tiny.url, limits=limits, timeout=120) as client:
        yield client


@pytest.mark.full
def test_300_requests_of_one_key_delay_another_key_by_one_turn(tiny: Server, crowd: httpx.Client) -> None:
    """One key sends 300 at once. A single request of another key overtakes all but those that run and a turn."""
    ended: list[str] = []
    texts: set[str] = set()

    def send(key: str) -> None:
        body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4, "seed": 1}
        answer = crowd.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        ended.append(key)
        texts.add(answer.json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=send, args=("one",)) for _ in range(300)]
    for thread in threads:
        thread.start()
    until(lambda: running(tiny) > 250 or len(ended) > 20)
    waits = []
    for _ in range(5):
        before = len(ended)
        send("other")
        waits.append(ended.index("other", before) - before)
        time.sleep(0.02)
    assert len(ended) < 250, "the flood went on meanwhile"
    for thread in threads:
        thread.join()
    assert len(ended) == 305
    assert sorted(waits)[2] <= 5, waits
    assert max(waits) <= 12, waits
    assert len(texts) == 1, "who waits and how long changes no byte"


def test_a_burst_of_long_prompts_is_prepared_by_turns(tiny: Server, crowd: httpx.Client) -> None:
    """60 prompts whose tokenization takes long: another key's does not wait for them all, on any route."""
    text = "word " * 15_000
    done: list[str] = []

    def send(key: str, prompt: str) -> None:
        answer = crowd.post("/tokenize", json={"prompt": prompt}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        done.append(key)

    threads = [threading.Thread(target=send, args=("one", text)) for _ in range(60)]
    for thread in threads:
        thread.start()
    until(lambda: running(tiny) > 50 or len(done) > 3)
    before = len(done)
    send("other", "short")
    assert done.index("other") - before <= 8
    assert len(done) < 55
    for thread in threads:
        thread.join()
