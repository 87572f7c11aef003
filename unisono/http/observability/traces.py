"""OpenTelemetry spans of requests, exported as OTLP over HTTP: ``--otlp-traces-endpoint``.

A span ``llm_request`` for each generated sequence, with vLLM's attributes; its parent is the span in the client's
``traceparent`` header (W3C Trace Context), whose sampling decision it follows. The SDK (extra ``otel``) is imported
only with the flag. It exports batches from a thread, with a bounded queue: a collector that does not answer costs
spans, never a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from unisono import __version__
from unisono.types import ConfigError

MAX_WAITING = 4096
"""Most queued spans; the oldest are dropped first."""
MAX_BATCH = 512
EVERY = 1.0
"""Interval of exports, seconds."""
TIMEOUT = 10.0
"""Timeout of an export, and of the last one at shutdown, seconds."""


def endpoint_url(endpoint: str) -> str:
    """The URL that spans are posted to. Raises ConfigError for an invalid endpoint."""
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not a URL; give one like http://localhost:4318/v1/traces (OTLP "
            "over HTTP; gRPC is not supported)."
        )
    return endpoint if url.path not in ("", "/") else endpoint.rstrip("/") + "/v1/traces"


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an invalid endpoint, or without the OpenTelemetry SDK."""
    endpoint_url(endpoint)
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ConfigError('--otlp-traces-endpoint needs the OpenTelemetry SDK: pip install "unisono[otel]".') from None


class RequestTracer:
    """Records spans of requests, which the SDK's thread exports. :meth:`close` exports the rest.

    exporter: replaces the OTLP exporter in tests.
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "unisono")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter or OTLPSpanExporter(endpoint_url(endpoint), timeout=TIMEOUT),
                max_queue_size=MAX_WAITING,
                max_export_batch_size=MAX_BATCH,
                schedule_delay_millis=EVERY * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("unisono", __version__)

    def span(self, traceparent: str | None, start: float, attributes: Mapping[str, Any], failed: bool) -> None:
        """Record a request that ends now.

        traceparent: the client's header. start: arrival, ``time.monotonic()``. attributes: those that are None are left
        out.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract({"traceparent": traceparent or ""}, Context()),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value is not None},
            start_time=end - int((time.monotonic() - start) * 1e9),
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    async def close(self) -> None:
        """Export the queued spans, for at most TIMEOUT seconds."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), TIMEOUT)
