"""HTTP/1 connections: one request at a time, half-closed clients, answers to HTTP/1.0.

:class:`OrderedProtocol` is uvicorn's HTTP protocol with three changes. It parses a pipelined request only after the
answer to the one before it; until then its bytes are buffered, reading is paused, and :class:`ReadAhead` bounds the
buffers of all connections together. A client that shuts down its sending direction gets its answer. An answer of
unknown length to an HTTP/1.0 client ends with the connection. ``limits/connections`` adds sizes and times.
"""

from __future__ import annotations

import asyncio
import select
from asyncio import TimerHandle
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

STATUS_BEGINS = b"HTTP/1.1 "
"""First bytes of every answer. Sent one by one as probes, they reveal if a half-closed client still reads."""
COMMENT = b":\n\n"
"""A comment of server-sent events, for the same purpose once a stream has begun."""
PROBE_SECONDS = (0.05, 0.25, 1.0, 4.0, 15.0)
"""Pauses between probes, seconds; the last one repeats."""
PEER_SECONDS = 1.0
"""Interval of checks of a client whose input is not read, seconds."""
CHUNKED_SLICE = 4096
"""Bytes of a chunked body that are parsed at once. Its end is unknown, and bytes after it cannot be unread."""
HEAD_END = b"\r\n\r\n"
GONE = select.POLLERR | select.POLLHUP
ENDED = getattr(select, "POLLRDHUP", 0)


@dataclass
class ReadAhead:
    """Bytes of pipelined requests that are buffered on all connections. most: the limit."""

    most: int
    waiting: int = 0


class OrderedProtocol(HttpToolsProtocol):
    """One connection. Subclasses override :meth:`feed` to count parsed bytes; :meth:`stop` ends parsing."""

    cycle: Cycle
    flow: _Reading

    def __init__(self, *args: Any, ahead: ReadAhead, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ahead, self._waiting = ahead, bytearray()  # bytes after the request in progress
        self._busy = False  # a complete request waits for its answer
        self._stopped = False  # further input is ignored
        self._ended = False  # the client has shut down its sending direction
        self._body_left: int | None = 0  # bytes of the body still to come; None: chunked
        self._in_body, self._last = False, b""  # the last bytes of an incomplete head
        self._probe_timer: TimerHandle | None = None
        self._probes = 0

    # ---- reading ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport)

    def data_received(self, data: bytes) -> None:
        if self._stopped:
            return
        if self._busy:
            self._hold(data)
        else:
            self._parse(data)

    def feed(self, data: bytes) -> None:
        """Parse bytes of one request."""
        super().data_received(data)

    def stop(self) -> None:
        """Ignore all further input."""
        self._stopped = True
        self._release()

    def _parse(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self._busy and not self._stopped:
            size = self._size(data, at)
            self.feed(data if size == len(data) else data[at : at + size])
            at += size
        if at < len(data) and not self._stopped:
            self._hold(data[at:])

    def _size(self, data: bytes, at: int) -> int:
        """The number of bytes from ``at`` on that belong to the current request, as far as known."""
        rest = len(data) - at
        if self._in_body:
            return min(rest, CHUNKED_SLICE if self._body_left is None else self._body_left or rest)
        begun = len(self._last)
        end = (self._last + data[at : at + 3]).find(HEAD_END)
        if end < 0 and (end := data.find(HEAD_END, at)) >= 0:
            end += begun - at
        if end < 0:
            self._last = (self._last + data[-3:])[-3:]
            return rest
        self._last = b""
        return end + len(HEAD_END) - begun

    def _hold(self, data: bytes) -> None:
        """Buffer bytes that came before the answer was finished, and pause reading until it is."""
        self._ahead.waiting += len(data)
        self._waiting += data
        if self._ahead.waiting > self._ahead.most:  # HTTP lets a server close instead; clients send again
            self.cycle.keep_alive = False
            self.stop()
        self.flow.hold()
        self._watch(PEER_SECONDS)

    def _release(self) -> bytes:
        data, self._waiting = bytes(self._waiting), bytearray()
        self._ahead.waiting -= len(data)
        return data

    # ---- the parser's callbacks ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._busy:  # bytes of the next request after a chunked body
            raise _NextRequest
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_body, self._last = True, b""
        self._body_left = 0
        for name, value in self.headers:
            if name == b"transfer-encoding":
                self._body_left = None
            elif name == b"content-length" and self._body_left is not None:
                self._body_left = int(value) if value.isdigit() else None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        self._busy = not self.cycle.response_complete
        if self._busy and self._ended:
            self._begin_probes()

    def send_400_response(self, msg: str) -> None:
        if self._busy:  # the previous request is still in progress
            self.cycle.keep_alive = False
            self.stop()
            return
        super().send_400_response(msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.cycle = Cycle.of(cycle)
        super()._start_asgi_task(self.cycle, app)

    # ---- after an answer ----------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._busy = False
        self._stop_probes()
        super().on_response_complete()
        if not self.transport.is_closing() and (self._waiting or self._ended):
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Parse the buffered bytes."""
        if self.transport.is_closing() or self._busy:
            return
        data = self._release()
        self.flow.release()
        if data and not self._stopped:
            self._parse(data)
        if self._ended and not self._busy:
            self.transport.close()

    # ---- the end of a connection ----------------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection if a complete request waits for its answer. asyncio's TLS cannot be half-closed."""
        if not self._busy or self.scheme == "https":
            return None
        self._end_input()
        return True

    def _end_input(self) -> None:
        self._ended = True
        self.flow.end()
        self._begin_probes()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_probes()
        self.stop()
        super().connection_lost(exc)

    def _begin_probes(self) -> None:
        """Start probing if the client still reads.

        A closed and a half-closed client send the same FIN. Only bytes of the answer distinguish them: a closed one's
        machine replies with a reset, and the next write fails.
        """
        self.cycle.waiting_for_100_continue = False
        self._probes = 0
        self._probe()

    def _probe(self) -> None:
        if self.transport.is_closing():
            return
        self.cycle.probe()
        pause = PROBE_SECONDS[min(self._probes, len(PROBE_SECONDS) - 1)]
        self._probes += 1
        self._watch(pause)

    def _watch(self, seconds: float) -> None:
        self._stop_probes()
        self._probe_timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Check if a client whose input is not read has half-closed or closed its connection."""
        seen = _state(self.transport)
        if seen & GONE:
            self.transport.abort()
        elif self._ended or (seen & ENDED and self._busy and self.scheme != "https"):
            self._probe()
        else:
            self._watch(PEER_SECONDS)

    def _stop_probes(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None


class _NextRequest(Exception):
    """Leaves the parser at the first byte of a request that must wait."""


def _state(transport: asyncio.Transport) -> int:
    """The poll events of a transport's socket: GONE, ENDED or neither."""
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:
        return 0
    poll = select.poll()
    poll.register(socket.fileno(), ENDED)
    return next((events for _, events in poll.poll(0)), 0)


class _Reading(FlowControl):
    """Flow control with two more reasons to pause: buffered pipelined bytes, or the end of the client's input."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = self._over = False

    def hold(self) -> None:
        self._held = True
        self.pause_reading()

    def release(self) -> None:
        self._held = False
        self.resume_reading()

    def end(self) -> None:
        self._over = True

    def pause_reading(self) -> None:
        if not self._over:
            super().pause_reading()

    def resume_reading(self) -> None:
        if not self._held and not self._over:
            super().resume_reading()


class Cycle(RequestResponseCycle):
    """A request and its answer.

    sent: bytes of STATUS_BEGINS that were sent as probes.
    """

    sent = 0
    until_close = False
    comments = False

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> Cycle:
        """A Cycle in the state of a new one of uvicorn's."""
        made = cls.__new__(cls)
        made.__dict__.update(cycle.__dict__)
        made.old = cycle.scope["http_version"] != "1.1"
        made.expects = made.waiting_for_100_continue = made.waiting_for_100_continue and not made.old
        return made

    old: bool
    expects: bool

    def probe(self) -> None:
        """Send bytes without effect on a client: the next one of the status line, or a comment in a stream."""
        if not self.response_started:
            self.transport.write(STATUS_BEGINS[self.sent : self.sent + 1])
            self.sent = min(self.sent + 1, len(STATUS_BEGINS))
        elif self.comments and not self.response_complete and not self.flow.write_paused:
            self.transport.write(b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if self.chunked_encoding else COMMENT)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
        elif self.until_close and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        transport = self.transport
        if self.sent and not self.response_started:
            self.transport = _Rest(transport, self.sent)  # type: ignore[assignment]
        try:
            await super().send(message)
        finally:
            self.transport = transport

    def _begin(self, message: Any) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        self.comments = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if self.expects and self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may leave out the body that it announced
        bodyless = self.scope["method"] == "HEAD" or message["status"] in (204, 304)
        if self.old and not bodyless and b"content-length" not in headers:
            # RFC 9112, 6.1: no chunks for HTTP/1.0. The connection's end marks the end of the body.
            self.until_close, self.keep_alive = True, False
            self.chunked_encoding, self.expected_content_length = False, float("inf")  # type: ignore[assignment]

    async def receive(self) -> Any:
        if not self.more_body:
            self.waiting_for_100_continue = False
        return await super().receive()


class _Rest:
    """A transport that drops the first bytes of the next write, which have been sent as probes."""

    def __init__(self, transport: asyncio.Transport, skip: int) -> None:
        self._transport, self._skip = transport, skip

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._skip :])
        self._skip = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
