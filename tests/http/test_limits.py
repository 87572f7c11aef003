"""What a connection may cost before its key is looked at."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.http.conftest import Server, servers, until
from tests.http.wire import answer, connect, resident

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SMALL = {
    "head_bytes": 8192,
    "headers": 20,
    "head_seconds": 0.6,
    "body_seconds": 0.6,
    "body_rate": 1000,
    "connections": 20,
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(limits=SMALL, api_key="secret")


@pytest.fixture(autouse=True)
def still_serves(guarded: Server) -> Iterator[None]:
    yield
    key = {"authorization": "Bearer secret"}
    body = {"prompt": [1, 2], "max_tokens": 2}
    assert guarded.http.post("/v1/completions", json=body, headers=key).status_code == 200


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /" + b"a" * 1000, b"a" * 1000),
        (HEAD + b"x-a: ", b"b" * 1000),
        (HEAD, b"x-a: " + b"b" * 900 + b"\r\n"),
        (HEAD, b"x" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ", b"b" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"b" * 1000),
    ],
    ids=["path", "one header", "many headers", "a header's name", "a trailer", "a chunk's extension"],
)
def test_heads_without_end(guarded: Server, begin: bytes, more: bytes) -> None:
    """They end soon, long before they fill memory."""
    before, sent = resident(guarded), 0
    with connect(guarded) as connection:
        connection.sendall(begin)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(20_000):
                connection.sendall(more)
                sent += len(more)
        said = answer(connection)
    assert sent < 8_000_000
    assert b" 431 " in said or b" 400 " in said or b" 401 " in said or not said  # a reset may overtake the answer
    assert resident(guarded) < before + 4 * 2**20


def test_too_many_headers_are_named(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.sendall(HEAD + b"".join(b"x-%d: 1\r\n" % i for i in range(30)) + b"\r\n")
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert b"more than 20 headers" in said
    assert b"too_many_headers" in said
    with connect(guarded) as connection:
        connection.sendall(HEAD + b"x-a: " + b"b" * 9000 + b"\r\n\r\n")
        assert b"larger than 8 KiB" in answer(connection)


def test_non_http_bytes_return_invalid_http(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert b"invalid_http" in answer(connection)


def test_slow_heads_are_closed(guarded: Server) -> None:
    """Those that come byte by byte, those that never come, and those of a connection's second request."""
    for second in (False, True):
        with connect(guarded) as connection:
            if second:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"200 OK" in connection.recv(65536)
            begun = time.monotonic()
            with suppress(BrokenPipeError, ConnectionResetError):
                for byte in HEAD[:40]:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)
            assert b"408" in answer(connection)
            assert time.monotonic() - begun < 50
    with connect(guarded) as connection:
        begun = time.monotonic()
        assert answer(connection) == b"", "nothing was asked, so nothing is said"
        assert time.monotonic() - begun < 50


def test_slow_bodies_are_closed_and_steady_ones_are_not(guarded: Server) -> None:
    head = HEAD + b"authorization: Bearer secret\r\ncontent-length: 3000\r\n\r\n"
    with connect(guarded) as connection:
        connection.sendall(head)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(40):
                connection.sendall(b" ")
                time.sleep(0.05)
        said = answer(connection)
    assert b" 408 " in said
    assert b"too slowly" in said
    body = b'{"prompt": [1, 2], "max_tokens": 2}'.ljust(3000)
    with connect(guarded) as connection:
        connection.sendall(head)
        for i in range(0, 3000, 300):
            connection.sendall(body[i : i + 300])
            time.sleep(0.12)
        assert b" 200 OK" in connection.recv(65536)


def test_connections_have_a_limit(guarded: Server) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(guarded)) for _ in range(20)]
        time.sleep(0.1)
        for connection in opened[:2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        over = [stack.enter_context(connect(guarded)) for _ in range(3)]
        assert all(b"too_many_connections" in answer(connection) for connection in over)
    time.sleep(0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="only there every 127.x.y.z is this machine")
def test_one_address_leaves_connections_for_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    with servers(tmp_path_factory) as start, ExitStack() as stack:
        server = start(limits={"connections": 32})

        def opened(source: str) -> bytes:
            connection = stack.enter_context(connect(server, source))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return connection.recv(65536)

        assert b" 200 OK" in opened("127.0.0.2")
        answers = [opened("127.0.0.1") for _ in range(31)]
        assert sum(b" 200 OK" in answer for answer in answers) == 27
        assert b"This address has 28 of 29 open connections" in answers[-1]
        assert b"retry-after: 1" in answers[-1]
        assert [b" 200 OK" in opened("127.0.0.2") for _ in range(3)] == [True] * 3
        log = server.log.read_text()
        assert log.count("A connection from 127.0.0.1: 503 too_many_connections") == 4
    with servers(tmp_path_factory) as start, ExitStack() as stack:
        server = start(limits={"connections": 32})
        alone = [opened("127.0.0.1") for _ in range(30)]
        assert all(b" 200 OK" in answer for answer in alone), "alone it may have all"
        refused = r'requests_refused_total{[^}]*reason="too_many_connections"} (\S+)'
        assert [b"too_many_connections" in opened("127.0.0.1") for _ in range(4)] == [False] * 2 + [True] * 2
        stack.close()
        until(lambda: (found := re.search(refused, server.http.get("/metrics").text)) and float(found[1]) >= 2)


def test_many_connections_one_after_another(guarded: Server) -> None:
    for _ in range(100):
        connect(guarded).close()


def test_a_stream_is_longer_than_all_limits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They are about requests: an answer may take its time."""
    with servers(tmp_path_factory) as start:
        server = start(limits=SMALL, step_seconds=0.1)
        answer = server.http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 15, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
