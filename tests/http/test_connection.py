"""Connections: pipelined requests, clients that close one direction or leave, HTTP/1.0, unfinished bodies."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.conftest import Server, Start, servers, until
from tests.http.wire import answer, connect, resident
from unisono.http.settings import HttpSettings

BODY = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 400}
MIB = 2**20


def request(body: dict[str, Any] | None = None, version: str = "1.1", extra: str = "", path: str = "") -> bytes:
    """A POST of a completion, or a GET where there is no body."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path or '/v1/completions'} HTTP/{version}\r\nHost: localhost\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}{extra}\r\n".encode() + data


def ask(server: Server, *parts: bytes, half: bool = False) -> bytes:
    """All that comes for these bytes. half: the client shuts down its sending direction after them."""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02 if len(parts) > 1 else 0)
        if half:
            connection.shutdown(socket.SHUT_WR)
        return answer(connection)


def under_way(server: Server) -> int:
    return int(server.http.get("/load").json()["server_load"])


# ---- idle connections -------------------------------------------------------------------------------


def test_an_idle_connection_is_closed_after_its_time(start: Start) -> None:
    server = start(http={"timeout_keep_alive": 1})
    with connect(server) as connection:
        connection.settimeout(30)
        connection.sendall(request(path="/health"))
        assert answer(connection).startswith(b"HTTP/1.1 200"), "the server closes the connection after the answer"


def test_idle_connections_outlive_those_of_clients() -> None:
    """A client that reuses its connection must not meet one that is being closed: httpx drops its own after 5 s."""
    assert HttpSettings().uvicorn()["timeout_keep_alive"] > 60


# ---- half-closed connections ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_input_gets_its_answer(slow_server: Server, version: str, stream: bool) -> None:
    def one(number: int) -> bytes:
        return ask(slow_server, request({**BODY, "stream": stream}, version), half=True)

    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(one, range(50)))
    assert len(answers) == 50
    for found in answers:
        assert re.match(rb"HTTP/1\.1 200 OK\r\n[a-z]", found), found[:100]
        assert found.count(b"HTTP/1.1") == 1
        assert (b"data: [DONE]\n\n" if stream else b'"completion_tokens":3') in found
    assert under_way(slow_server) == 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(slow_server: Server, version: str, stream: bool) -> None:
    """400 steps of 50 ms would take 20 s."""
    with connect(slow_server) as connection:
        connection.sendall(request({**LONG, "stream": stream}, version))
        until(lambda: under_way(slow_server) == 1)
    until(lambda: under_way(slow_server) == 0, 10)


def test_a_client_that_leaves_behind_pipelined_requests(slow_server: Server) -> None:
    with connect(slow_server) as connection:
        connection.sendall(request(LONG) + request(path="/version") * 500)
        until(lambda: under_way(slow_server) == 1)
    until(lambda: under_way(slow_server) == 0, 10)


def test_incomplete_request_ends_with_its_connection(slow_server: Server) -> None:
    assert ask(slow_server, request(BODY)[:-5], half=True) == b""
    assert ask(slow_server, request(BODY) + request(BODY)[:-5], half=True).count(b"HTTP/1.1 200") == 1
    assert under_way(slow_server) == 0


# ---- pipelined requests -----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    half=st.booleans(),
    padding=st.sampled_from([0, 300, 70_000]),
)
def test_pipelined_requests_are_answered_in_order(
    server: Server, lengths: list[int], cuts: list[float], half: bool, padding: int
) -> None:
    """However their bytes are cut into packets."""
    last = len(lengths) - 1
    sent = b"".join(
        request(
            {"prompt": [1, 2, 3], "max_tokens": n, "ignore_eos": True, "user": "x" * padding},
            extra="" if half or i < last else CLOSE,
        )
        for i, n in enumerate(lengths)
    )
    places = sorted({0, len(sent), *(int(cut * len(sent)) for cut in cuts)})
    found = ask(server, *(sent[a:b] for a, b in pairwise(places)), half=half)
    assert [int(n) for n in re.findall(rb'"completion_tokens":(\d+)', found)] == lengths
    assert found.count(b"HTTP/1.1 200 OK") == len(lengths)


CLOSE = "Connection: close\r\n"


def test_pipelined_requests_apply_backpressure(server: Server) -> None:
    """Reading stops; 1,000 requests of 36 bytes took 1.7 MB before."""
    many, before = request(path="/version") * 1000, resident(server)
    with ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(connect(server))
            connection.settimeout(1)
            with pytest.raises(TimeoutError):
                connection.sendall(many * 1000)
        assert resident(server) < before + 30 * MIB
        assert server.http.get("/health").status_code == 200
    until(lambda: resident(server) < before + 15 * MIB)


def test_pipelined_bytes_have_a_limit(room: Server) -> None:
    """Of all connections together; one that goes beyond it ends after the answer under way, and HTTP clients retry."""
    body = {**BODY, "max_tokens": 40}
    assert ask(room, request(body) + request(BODY), half=True).count(b" 200 OK") == 2
    with connect(room) as connection:
        connection.sendall(request(body) + request({**BODY, "user": "x" * 2000}))
        found = answer(connection)
    assert found.count(b" 200 OK") == 1
    assert found.count(b'"completion_tokens":40') == 1


def test_a_request_behind_a_chunked_body_ends_the_connection(server: Server) -> None:
    """Its first bytes are read with the body's last ones; HTTP lets the client send it again."""
    body = json.dumps(BODY).encode()
    one = request(BODY).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    one += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    assert ask(server, one, half=True).count(b" 200 OK") == 1
    found = ask(server, one + one)
    assert found.count(b" 200 OK") == 1
    assert b"connection: close" in found
    assert ask(server, one[:-1], one[-1:] + request(BODY), half=True).count(b" 200 OK") == 1


# ---- HTTP/1.0 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_streams_to_http_1_0_end_with_the_connection(server: Server, path: str) -> None:
    body = {"prompt": [1, 2], "max_tokens": 2} if path != "/generate" else {"input_ids": [1, 2]}
    head, _, text = ask(server, request({**body, "stream": True}, "1.0", path=path)).partition(b"\r\n\r\n")
    assert b" 200 OK" in head
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert text.startswith(b"data: {")
    assert text.endswith(b"data: [DONE]\n\n")


def test_http_1_0_keeps_its_other_rules(server: Server) -> None:
    whole = ask(server, request(BODY, "1.0", "Connection: keep-alive\r\n"))
    head, _, text = whole.partition(b"\r\n\r\n")
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(text)  # type: ignore[index]
    head, _, text = request(BODY, "1.0", "Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        time.sleep(0.3)  # for a 100 Continue, which HTTP/1.0 does not know
        connection.sendall(text)
        assert answer(connection).startswith(b"HTTP/1.1 200")
    head, _, text = ask(server, request(path="/health", version="1.0").replace(b"GET", b"HEAD")).partition(b"\r\n\r\n")
    assert b" 200 OK" in head
    assert text == b""


def test_expect_100_continue(server: Server) -> None:
    head, body = request(BODY, extra="Expect: 100-continue\r\n" + CLOSE).split(b"\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")
    with connect(server) as connection:  # refused: the body may never come, so the connection ends
        connection.sendall(head.replace(b"application/json", b"text/plain").replace(b"Connection: close\r\n", b""))
        connection.sendall(b"\r\n\r\n")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 415")
    assert b"connection: close" in found


# ---- what is given back -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which bodies of 256 MiB may wait, and 1 KiB of pipelined requests."""
    with servers(tmp_path_factory) as start:
        yield start(load={"max_waiting_bytes": 256 * MIB}, limits={"ahead_bytes": 1024}, step_seconds=0.01)


def test_unfinished_bodies_leave_no_memory(room: Server) -> None:
    """Their bytes are counted until they are gone: after rounds of them there is as much memory and room as before."""
    head = request(BODY).partition(b"Content-Length")[0] + b"Content-Length: 62914560\r\n\r\n"
    before = 0

    def leave(number: int) -> None:
        with connect(room) as connection, suppress(OSError):
            connection.sendall(head)
            for _ in range(30):
                connection.sendall(b" " * MIB)
            time.sleep(0.1)

    with ThreadPoolExecutor(8) as pool:
        for round_ in range(4):
            list(pool.map(leave, range(8)))
            until(lambda: under_way(room) == 0)
            if round_ == 0:
                before = resident(room)
    until(lambda: resident(room) < before + 60 * MIB, 15)
    assert room.http.post("/v1/completions", json={**BODY, "user": "x" * 50 * MIB}).status_code != 503


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"])
def test_request_bodies_are_freed_after_preparation(start: Start, model_dir: Path, tmp_path: Path, path: str) -> None:
    """Their bytes are given back then; answers that are not streamed kept them to their end."""
    hold = tmp_path / "hold"
    hold.touch()
    server = start(model_dir, hold_file=str(hold))
    body: dict[str, Any] = {"max_tokens": 3}
    match path:
        case "/v1/completions":
            body["prompt"] = "a"
        case "/generate":
            body = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
        case _:
            body["messages"] = [{"role": "user", "content": "a"}]
    content = json.dumps(body).encode() + b" " * 40 * MIB

    def send(number: int) -> int:
        return server.http.post(path, content=content, headers={"content-type": "application/json"}).status_code

    before = resident(server)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(send, number) for number in range(6)]
        try:
            until(lambda: server.info()["requests"]["running"] == 6)
            until(lambda: resident(server) < before + 60 * MIB, 15)
        finally:
            hold.unlink()
        assert [one.result() for one in answers] == [200] * 6


def test_memory_of_large_bodies_is_returned(start: Start, model_dir: Path) -> None:
    """Of what was made of them, too: tokens and texts lie in the heap, between objects that stay."""
    server = start(model_dir)
    texts = [{"prompt": "a b " * (1 << 16)}] * 8
    tokens = [{"tokens": [1, 300, 2] * 80_000}] * 4

    def send(body: dict[str, Any]) -> int:
        return server.http.post("/tokenize" if "prompt" in body else "/detokenize", json=body).status_code

    assert send({"prompt": "a"}) == 200
    before = resident(server)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(send, [*texts, *tokens, *texts])) == {200}
    until(lambda: resident(server) < before + 30 * MIB, 20)


def test_bodies_on_operators_routes_are_small(server: Server) -> None:
    found = server.http.post("/abort", json={"request_ids": ["x" * 2 * MIB]})
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
