"""The outermost layer of the HTTP application: times, numbers, counts and logs every request.

Each request has an id: the client's ``x-request-id`` if it is valid, else a new one. Answers carry it, and a failed
request is logged once, with it.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.http.observability.metrics import REFUSALS
from unisono.http.observability.request_note import RequestNote
from unisono.http.service import Service
from unisono.types.unknown_fields import dropping

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
ID_HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's clients read the first, Anthropic's the second."""
DROPPED_HEADER = b"x-unknown-fields"
"""Names of the dropped fields of the request (``--allow-unknown-fields``)."""
MAX_LOGGED = 300
"""Characters of an error's message in the log."""


class RequestMiddleware:
    """Wraps the application. HEAD is handled as GET without the body."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        written = RequestNote(_request_id(scope))
        method = scope["method"]
        scope = {**scope, "unisono": written, "method": "GET" if method == "HEAD" else method}
        headers = [(name, written.request_id.encode()) for name in ID_HEADERS]

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                written.status = message["status"]
                dropped_names = [(DROPPED_HEADER, ", ".join(unknown).encode())] if unknown else []
                message = {**message, "headers": [*message.get("headers", ()), *headers, *dropped_names]}
            elif method == "HEAD" and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        counted = method == "POST"
        self._service.in_flight += counted
        unknown: Collection[str] = ()
        try:
            if self._service.allow_unknown_fields:
                with dropping() as unknown:
                    await self._app(scope, receive, forward)
            else:
                await self._app(scope, receive, forward)
        except Exception:
            if written.status is None:
                raise
            # its client has the error; the connection stays
            logger.exception("A request failed [%s]", written.request_id)
        finally:
            self._service.in_flight -= counted
            if written.error is not None:
                forget_frames(written.error)
            if written.ticket is not None:
                written.ticket.leave()
            self._finish(scope, method, written)
            for name in self._service.metrics.unknown_fields(unknown):
                logger.warning("Unknown field %s of a request to %s was dropped", name, _shown(scope["path"]))

    def _finish(self, scope: Scope, method: str, written: RequestNote) -> None:
        """Count the request; log it if it failed."""
        path = getattr(scope.get("route"), "path", None) or "none"
        error, status = written.error, written.status or 500
        if error is not None and status < 400:  # a stream that failed after its headers
            status = error.status
        self._service.metrics.http_request(path, method, status, time.monotonic() - written.arrival)
        if written.key:
            self._service.metrics.key_request(written.key, status)
        if status < 400:
            return
        code = "" if error is None else error.code or error.kind
        self._service.metrics.http_error(path, status, code)
        if code in REFUSALS:
            self._service.metrics.refused(code, written.key)
        log = logger.error if status >= 500 else logger.warning
        message = "" if error is None else " ".join(str(error).split())[:MAX_LOGGED]
        who = f"{written.request_id}, key {written.key}" if written.key else written.request_id
        log("%s %s: %d %s %s[%s]", method, _shown(scope["path"]), status, code, f"{message} ", who)


def forget_frames(error: BaseException) -> None:
    """Clear the tracebacks of an error and of its causes: their frames hold bodies in reference cycles."""
    todo: list[BaseException | None] = [error]
    while todo:
        if (one := todo.pop()) is not None:
            todo += [one.__context__, one.__cause__]
            one.__traceback__ = one.__context__ = one.__cause__ = None


def _request_id(scope: Scope) -> str:
    client_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return client_id.decode() if REQUEST_ID.fullmatch(client_id) else f"req_{uuid.uuid4().hex}"


def _shown(path: str) -> str:
    return ascii(path[:MAX_LOGGED])[1:-1]
