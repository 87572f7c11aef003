"""Spans leave as OTLP/HTTP JSON; a collector that is gone costs nobody anything."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.http.conftest import Start, until
from tests.http.fake_engine import Trick
from unisono.http.observability.traces import Parent, endpoint_url
from unisono.types import ConfigError

TEXT = "/v1/completions"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a collector, and the spans that it got."""
    spans: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/json")
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            (resource,) = body["resourceSpans"]
            names = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
            assert names["service.name"] == {"stringValue": "unisono"}
            spans.extend(span for scope in resource["scopeSpans"] for span in scope["spans"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


def test_every_request_is_a_span(start: Start, collector: tuple[str, list[dict[str, Any]]]) -> None:
    url, spans = collector
    server = start(otlp_traces_endpoint=url, prefill_seconds=0.1)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0.5}
    server.http.post(TEXT, json=body, headers={"traceparent": f"00-{trace}-{parent}-01"}).raise_for_status()
    server.http.post(TEXT, json=body, headers={"traceparent": f"00-{trace}-{parent}-00"}).raise_for_status()
    server.http.post(TEXT, json={**body, "stream": True}).raise_for_status()
    server.http.post(TEXT, json={"prompt": [Trick.FAIL]})
    until(lambda: len(spans) == 3)
    server.signal()
    assert server.wait() == 0
    first, streamed, failed = spans  # the second request's caller wanted no trace
    assert (first["traceId"], first["parentSpanId"]) == (trace, parent)
    assert "parentSpanId" not in streamed
    assert first["name"] == "llm_request"
    values = {one["key"]: next(iter(one["value"].values())) for one in first["attributes"]}
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == ("2", "3")
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.max_tokens"]) == (0.5, "3")
    assert 0.1 <= values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
    seconds = (int(first["endTimeUnixNano"]) - int(first["startTimeUnixNano"])) / 1e9
    assert seconds == pytest.approx(values["gen_ai.latency.e2e"], abs=0.1)
    assert abs(int(first["endTimeUnixNano"]) / 1e9 - time.time()) < 60
    assert (failed["status"], first["status"]) == ({"code": 2}, {})
    assert len(first["traceId"]), len(first["spanId"]) == (32, 16)


def test_a_collector_that_is_gone_costs_spans_only(start: Start) -> None:
    server = start(otlp_traces_endpoint="http://127.0.0.1:9/")
    for _ in range(3):
        server.http.post(TEXT, json={"prompt": [5], "max_tokens": 1}).raise_for_status()
    until(lambda: "spans are lost" in server.log.read_text())
    server.signal()
    assert server.wait() == 0


def test_endpoints() -> None:
    assert endpoint_url("http://host:4318") == "http://host:4318/v1/traces"
    assert endpoint_url("https://host/own/path") == "https://host/own/path"
    for wrong in ("host:4317", "grpc://host:4317", ""):
        with pytest.raises(ConfigError, match="4318"):
            endpoint_url(wrong)


def test_parents() -> None:
    trace, span = "a" * 32, "b" * 16
    assert Parent.of(f"00-{trace}-{span}-01") == Parent(trace, span, True)
    assert Parent.of(f"00-{trace}-{span}-00") == Parent(trace, span, False)
    for wrong in (None, "", f"00-{trace}-{span}", f"00-{'0' * 32}-{span}-01", f"00-{trace.upper()}-{span}-01"):
        assert Parent.of(wrong) is None
