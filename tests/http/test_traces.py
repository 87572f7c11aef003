"""Spans leave as OTLP over HTTP; a collector that is gone costs nobody anything."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.http.conftest import Start, until
from tests.http.fake_engine import Trick
from unisono.http.observability.traces import RequestTracer, endpoint_url
from unisono.types import ConfigError

TEXT = "/v1/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def value_of(attribute: Any) -> Any:
    return getattr(attribute, attribute.WhichOneof("value"))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a collector, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            (resource,) = body.resource_spans
            names = {one.key: value_of(one.value) for one in resource.resource.attributes}
            assert names["service.name"] == "unisono"
            spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


def test_every_request_is_a_span(start: Start, collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    server = start(otlp_traces_endpoint=url, prefill_seconds=0.1)
    body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0.5}
    server.http.post(TEXT, json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}).raise_for_status()
    server.http.post(TEXT, json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"}).raise_for_status()
    server.http.post(TEXT, json={**body, "stream": True}).raise_for_status()
    server.http.post(TEXT, json={"prompt": [Trick.FAIL]})
    until(lambda: len(spans) == 3)
    server.signal()
    assert server.wait() == 0
    first, streamed, failed = spans  # the second request's caller did not sample the trace
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, SPAN)
    assert streamed.parent_span_id == b""
    assert first.name == "llm_request"
    values = {one.key: value_of(one.value) for one in first.attributes}
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (2, 3)
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.max_tokens"]) == (0.5, 3)
    assert 0.1 <= values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
    seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(values["gen_ai.latency.e2e"], abs=0.1)
    assert abs(first.end_time_unix_nano / 1e9 - time.time()) < 60
    assert (failed.status.code, first.status.code) == (2, 0)
    assert (len(first.trace_id), len(first.span_id)) == (16, 8)


def test_a_collector_that_is_gone_costs_spans_only(start: Start) -> None:
    server = start(otlp_traces_endpoint="http://127.0.0.1:9/")
    for _ in range(3):
        server.http.post(TEXT, json={"prompt": [5], "max_tokens": 1}).raise_for_status()
    until(lambda: "opentelemetry" in server.log.read_text() or "export" in server.log.read_text())
    server.signal()
    assert server.wait() == 0


def test_endpoints() -> None:
    assert endpoint_url("http://host:4318") == "http://host:4318/v1/traces"
    assert endpoint_url("https://host/own/path") == "https://host/own/path"
    for wrong in ("host:4317", "grpc://host:4317", ""):
        with pytest.raises(ConfigError, match="4318"):
            endpoint_url(wrong)


def test_spans() -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer("http://127.0.0.1:9", exporter)
    arrival = time.monotonic() - 2
    tracer.span(f"00-{TRACE}-{SPAN}-01", arrival, {"a": 1, "left out": None}, failed=True)
    tracer.span(f"00-{TRACE}-{SPAN}-00", arrival, {}, failed=False)  # not sampled
    for wrong in (None, "", f"00-{TRACE}-{SPAN}", f"00-{'0' * 32}-{SPAN}-01"):
        tracer.span(wrong, arrival, {}, failed=False)
    asyncio.run(tracer.close())
    first, *others = exporter.get_finished_spans()
    assert (first.context.trace_id, first.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert (dict(first.attributes), first.status.status_code) == ({"a": 1}, StatusCode.ERROR)
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(2, abs=0.5)
    assert [one.parent for one in others] == [None] * 4


def test_the_flag_without_the_sdk() -> None:
    """Without the extra the flag is refused before anything starts; without the flag nothing imports the SDK."""
    code = (
        "import sys; import unisono.http.server\n"
        "from unisono.http.observability.traces import check_endpoint\n"
        "assert 'opentelemetry.sdk' not in sys.modules\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        "try: check_endpoint('http://127.0.0.1:4318')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        'ConfigError --otlp-traces-endpoint needs the OpenTelemetry SDK: pip install "unisono[otel]".\n'
    ), done.stderr
