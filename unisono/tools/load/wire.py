"""HTTP/1.1 with minimal work per token, so that a benchmark does not measure its client.

A response is kept as (arrival time, bytes) and parsed by ``streams`` outside of the critical path. Times are seconds of
``time.perf_counter``, which all processes of a Linux machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from unisono.types import ConfigError

now = time.perf_counter


@dataclass
class Exchange:
    """A request and its response.

    sent: scheduled time of sending, connecting included. pieces: (arrival, bytes) of the body. ended: end of the body.
    failure: kind and text of an error.
    """

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    failure: tuple[str, str] | None = None

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None

    async def send(self, request: bytes, exchange: Exchange) -> None:
        """Send a request and wait for the end of its response, which fills ``exchange``."""
        self._exchange, self._done = exchange, asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        try:
            await self._done
        finally:
            self.used, self._done, self._exchange = True, None, None

    def close(self) -> None:
        self.reusable = False
        self._transport.abort()

    # ---- called by the event loop -----------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._now = now()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:
            self._fail("not HTTP", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        with contextlib.suppress(Exception):  # a body without a length ends with its connection
            self._parser.feed_data(b"")
        self._fail("connection lost", str(error or "the server closed the connection before the end of its response"))

    def _fail(self, kind: str, text: str) -> None:
        if self._done is not None and not self._done.done():
            assert self._exchange is not None
            self._exchange.failure, self._exchange.ended = (kind, text), now()
            self._done.set_result(None)
        self.close()

    # ---- called by the parser ---------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.ended = self._now
            self._done.set_result(None)


class Wire:
    """Connections to one server.

    url: http(s)://host[:port]. headers: sent with every request.

    insecure: accept any certificate.
    """

    def __init__(self, url: str, headers: dict[str, str], timeout: float, insecure: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url!r}: give http://HOST:PORT or https://HOST:PORT.")
        for name, value in headers.items():
            if not (name + value).isprintable() or not (name + value).isascii():
                raise ConfigError(f"--header {name}: names and values are printable ASCII.")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl._create_unverified_context() if insecure else ssl.create_default_context()
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "unisono-bench"} | headers
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout = timeout
        self._idle: list[Connection] = []

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """The bytes of a request."""
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}{length}\r\n".encode() + body

    async def exchange(self, request: bytes, into: Exchange | None = None) -> Exchange:
        """Send a request.

        Never raises errors of the network or the server: they are in ``failure``.

        A connection that the server closed while idle is replaced once.
        """
        exchange = into or Exchange(now())
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(request, exchange)
        except TimeoutError:
            exchange.failure, exchange.ended = ("timeout", f"no end within {self._timeout:g} s"), now()
        except OSError as error:
            exchange.failure, exchange.ended = ("cannot connect", str(error)), now()
        return exchange

    async def _exchange(self, request: bytes, exchange: Exchange) -> None:
        while True:
            connection = await self._connection()
            try:
                old = connection.used
                await connection.send(request, exchange)
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            if not (old and exchange.failure and not exchange.status and not exchange.pieces):
                return
            exchange.failure = None

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
