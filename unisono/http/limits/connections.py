"""Limits of a connection before any key is checked: sizes, counts and times of requests, and number of connections.

:class:`LimitedProtocol` is ``connection``'s HTTP protocol with these limits; ``serve`` passes it to uvicorn.
docs/reference/limits.md lists the numbers.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from unisono.http.connection import OrderedProtocol
from unisono.http.errors import ApiError
from unisono.http.limits.sizes import Limits

logger = logging.getLogger(__name__)

SHARED_OUT = 8
"""One connection in this many is reserved for addresses with less than half of all, once there are several."""


class _RequestRefused(Exception):
    """Leaves the parser from within a callback."""


class LimitedProtocol(OrderedProtocol):
    """One connection. A request beyond the limits is answered 408, 431 or 503, and its connection closed."""

    def __init__(
        self, *args: Any, limits: Limits, refused: Callable[[str], None] = lambda reason: None, **options: Any
    ) -> None:
        """refused: called with the error code of each request or connection that is refused here."""
        super().__init__(*args, **options)
        self._refused = refused
        self._limits = limits
        self._timer: TimerHandle | None = None
        self._in_head = True  # waiting for headers
        self._head = self._headers = self._received = self._body = 0
        self._begun = 0.0
        self._refusal: ApiError | None = None
        self._stall: TimerHandle | None = None
        self._unsent = 0

    # ---- connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (message := self._crowded()) is not None:
            kind, code = "service_unavailable_error", "too_many_connections"
            self._refuse(ApiError(503, message, kind, code=code, retry_after=1))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)

    def feed(self, data: bytes) -> None:
        self._received += len(data)
        if self._in_head:
            self._head += len(data)
            if self._timer is None:  # the first bytes of a further request
                self._expect_head()
        super().feed(data)
        if self._refusal is not None:
            return
        # Callbacks get complete names and values; incomplete ones are counted here.
        overhead = self._received - self._body
        if (self._in_head and self._head > self._limits.head_bytes) or (
            overhead > self._limits.head_bytes + 8 * self._body and not self._in_head
        ):
            self._refuse(self._too_large())

    # ---- the parser's callbacks ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.head_bytes:
            self._leave(self._too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > self._limits.headers:
            limit = self._limits.headers
            self._leave(
                ApiError(431, f"The request has more than {limit} headers; send fewer.", code="too_many_headers")
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url) > self._limits.head_bytes:
            self._leave(self._too_large())
        self._in_head, self._head, self._received, self._body = False, 0, 0, 0
        self._begun = self.loop.time()
        self._start_timer(self._limits.body_seconds, self._check_body)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._head = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._busy:
            super().send_400_response(msg)
            return
        self._refuse(self._refusal or ApiError(400, "This is not an HTTP request.", code="invalid_http"))

    # ---- answers that are not read ------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stop_stall()
        self._stall = self.loop.call_later(self._limits.write_seconds, self._check_write)

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def _check_write(self) -> None:
        """Close the connection unless its client has read something since the last check."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < before:
            self._stall = self.loop.call_later(self._limits.write_seconds, self._check_write)
            return
        self._refused("answer_not_read")
        logger.warning("A connection was closed: its client read nothing for %g s", self._limits.write_seconds)
        self.transport.abort()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # ---- limits -------------------------------------------------------------------------------------

    def _crowded(self) -> str | None:
        """The reason to refuse this connection, or None. The last connections are reserved for addresses with few."""
        limit, opened = self._limits.connections, len(self.connections)
        if opened > limit:
            return f"{limit} connections are open, the most that are taken; try again later."
        if self.client is None or opened <= limit - limit // SHARED_OUT:
            return None
        addresses = [getattr(other, "client", None) for other in self.connections]
        own = sum(one is not None and one[0] == self.client[0] for one in addresses)
        if own > limit // 2 and own < opened:
            return f"This address has {own} of {opened} open connections, and few are left; close some."
        return None

    def _too_large(self) -> ApiError:
        limit = self._limits.head_bytes // 2**10
        return ApiError(431, f"The request's headers are larger than {limit} KiB; send less.", code="headers_too_large")

    def _expect_head(self) -> None:
        self._start_timer(self._limits.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self._head:  # an idle connection, opened in advance
            self._stop_timer()
            self.transport.close()
            return
        self._late(f"The request's headers did not come within {self._limits.head_seconds:g} s.")

    def _check_body(self) -> None:
        deadline = self._begun + self._limits.body_seconds + self._body / self._limits.body_rate
        left = deadline - self.loop.time()
        if left > 0:
            self._start_timer(left, self._check_body)
        else:
            self._late(
                f"The body comes too slowly: {self._body} bytes in {self.loop.time() - self._begun:.0f} s; "
                f"{self._limits.body_rate // 2**10} KiB/s are expected."
            )

    def _late(self, message: str) -> None:
        self._refuse(ApiError(408, message, "timeout_error", code="request_timeout"))

    def _leave(self, error: ApiError) -> None:
        self._refusal = error
        raise _RequestRefused(str(error))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has begun, and close."""
        self._refusal = error
        self.stop()
        self._refused(error.code or error.kind)
        where = "a socket" if self.client is None else self.client[0]
        logger.warning("A connection from %s: %d %s %s", where, error.status, error.code, error)
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        if self._in_head or self.cycle is None or not self.cycle.response_started:
            body = error.body()
            headers = {
                "content-type": "application/json", "connection": "close", "content-length": len(body), **error.headers,
            }  # fmt: skip
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode() + b"\r\n"
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _start_timer(self, seconds: float, late: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
