"""OpenTelemetry spans of requests, sent as OTLP/HTTP JSON: ``--otlp-traces-endpoint``.

A span ``llm_request`` for each generated sequence, with vLLM's attributes; its parent is what the client's
``traceparent`` header names (W3C Trace Context). The format is the OTLP specification's JSON, small enough to need no
SDK. Spans wait in a bounded queue and leave in batches, from a thread; a collector that does not answer costs spans,
never a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from unisono import __version__
from unisono.types import ConfigError

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Spans; the oldest go first when a collector is slow."""
MAX_BATCH = 512
EVERY = 1.0
"""Seconds between two batches."""
TIMEOUT = 10.0
"""Seconds that a collector may take for a batch."""
COMPLAINT_EVERY = 60.0
TRACEPARENT = re.compile(r"[\da-f]{2}-(?P<trace>[\da-f]{32})-(?P<span>[\da-f]{16})-(?P<flags>[\da-f]{2})(-.*)?")
SERVER, ERROR = 2, 2
"""OTLP's numbers of a span's kind and of its status."""


@dataclass(frozen=True)
class Parent:
    """The caller's span. sampled: whether the caller wants the trace recorded."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def of(cls, header: str | None) -> Parent | None:
        """What a ``traceparent`` header says; None without a valid one."""
        found = TRACEPARENT.fullmatch((header or "").strip())
        if found is None or set(found["trace"]) == {"0"} or set(found["span"]) == {"0"}:
            return None
        return cls(found["trace"], found["span"], bool(int(found["flags"], 16) & 1))


def endpoint_url(endpoint: str) -> str:
    """The URL that spans are posted to. Raises ConfigError for what is no OTLP/HTTP endpoint."""
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is no URL; give one like http://localhost:4318/v1/traces (OTLP over "
            "HTTP; gRPC is not spoken)."
        )
    return endpoint if url.path not in ("", "/") else endpoint.rstrip("/") + "/v1/traces"


class Tracer:
    """Collects spans and sends them. :meth:`run` is a task of the event loop; :meth:`close` sends what is left."""

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint_url(endpoint)
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        name = os.environ.get("OTEL_SERVICE_NAME", "unisono")
        self._resource = {"attributes": _attributes({"service.name": name, "service.version": __version__})}
        given = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        pairs = (pair.partition("=") for pair in given.split(",") if "=" in pair)
        self._headers = {key.strip(): urllib.parse.unquote(value.strip()) for key, _, value in pairs}
        self._complained = -COMPLAINT_EVERY

    def span(self, parent: Parent | None, start: float, attributes: Mapping[str, Any], failed: bool) -> None:
        """Record a request that has ended now. start: its ``time.monotonic()``."""
        if parent is not None and not parent.sampled:
            return
        end = time.time_ns()
        span = {
            "traceId": secrets.token_hex(16) if parent is None else parent.trace_id,
            "spanId": secrets.token_hex(8),
            "name": "llm_request",
            "kind": SERVER,
            "startTimeUnixNano": str(end - int((time.monotonic() - start) * 1e9)),
            "endTimeUnixNano": str(end),
            "attributes": _attributes(attributes),
            "status": {"code": ERROR} if failed else {},
        }
        if parent is not None:
            span["parentSpanId"] = parent.span_id
        self._waiting.append(span)

    async def run(self) -> None:
        """Send what waits, again and again."""
        while True:
            await asyncio.sleep(EVERY)
            await self._send_waiting()

    async def close(self) -> None:
        """Send what waits, once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                await self._send_waiting()

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            try:
                await asyncio.to_thread(self._post, batch)
            except OSError as error:
                self._complain(len(batch), error)
                return

    def _post(self, batch: list[dict[str, Any]]) -> None:
        scope = {"scope": {"name": "unisono", "version": __version__}, "spans": batch}
        body = msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})
        headers = {"Content-Type": "application/json", **self._headers}
        with urllib.request.urlopen(urllib.request.Request(self._url, body, headers), timeout=TIMEOUT) as answer:
            answer.read()

    def _complain(self, lost: int, error: OSError) -> None:
        now = time.monotonic()
        if now - self._complained >= COMPLAINT_EVERY:
            self._complained = now
            logger.warning("%d spans are lost: %s does not take them: %s", lost, self._url, error)


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP's JSON has them; those that are None are left out."""
    found = []
    for key, value in given.items():
        match value:
            case None:
                continue
            case bool():
                typed: dict[str, Any] = {"boolValue": value}
            case int():
                typed = {"intValue": str(value)}
            case float():
                typed = {"doubleValue": value}
            case _:
                typed = {"stringValue": str(value)}
        found.append({"key": key, "value": typed})
    return found
