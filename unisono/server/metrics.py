"""Prometheus metrics: what the API process times itself, and what the engine counts.

Names are vLLM's, prefixed ``unisono:``.

The engine's numbers are :class:`unisono.server.ipc.MetricSample`. Those that the server's log line reads:
gauges ``num_requests_running``, ``num_requests_waiting``, ``kv_cache_usage_perc`` (a share, 0 … 1); counters
``prompt_tokens``, ``generation_tokens``, ``prefix_cache_queries``, ``prefix_cache_hits`` (tokens), and
``passes`` with the labels ``program``, ``kind`` (the graph's, or ``eager``) and ``reason``, and
``spec_decode_num_rounds`` with the label ``num_speculative_tokens``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unisono.server.ipc import MetricSample

PREFIX = "unisono:"
FIRST_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class ServerMetrics:
    """The server's registry. ``samples`` gives the engine's latest numbers at each scrape."""

    def __init__(self, model_name: str, samples: Callable[[], Sequence[MetricSample]]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.registry.register(_EngineCollector(model_name, samples))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of a request; tokens of one round share its time.",
            TOKEN_BUCKETS,
        )
        self._request = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self._finished = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._errors = Counter(
            PREFIX + "request_errors",
            "Requests answered with 4xx or 5xx, and streams that ended in an error, by route, status and code.",
            ("model_name", "handler", "status", "code"),
            registry=self.registry,
        )
        self._http = Counter("http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self.registry)
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From an HTTP request's headers to the end of its answer.",
            ("handler", "method"),
            registry=self.registry,
            buckets=REQUEST_BUCKETS,
        )

    def http_request(self, path: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. path: the route's."""
        self._http.labels(path, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(path, method).observe(seconds)

    def http_error(self, path: str, status: int, code: str) -> None:
        """A request was answered with 4xx or 5xx, or its stream ended so."""
        self._errors.labels(self._model_name, path, str(status), code).inc()

    def timer(self) -> RequestTimer:
        """The clock of one request, started now."""
        return RequestTimer(self)

    def render(self) -> bytes:
        """The page for a scrape, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), registry=self.registry, buckets=tuple(buckets))
        return histogram.labels(self._model_name)


class RequestTimer:
    """Times one request into a server's histograms, from ``start`` on."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.start = time.monotonic()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """``count`` tokens have come."""
        if count == 0:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics._first_token.observe(now - self.start)
        else:
            for _ in range(count):
                self._metrics._inter_token.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str) -> None:
        """The request has ended: ``stop``, ``length`` or ``abort``."""
        self._metrics._request.observe(time.monotonic() - self.start)
        self._metrics._finished.labels(self._metrics._model_name, reason).inc()


class _EngineCollector:
    """Turns samples into metric families."""

    def __init__(self, model_name: str, samples: Callable[[], Sequence[MetricSample]]) -> None:
        self._model_name = model_name
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._samples():
            names = ["model_name", *sorted(sample.labels)]
            if sample.name not in families:
                family = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[sample.name] = family(PREFIX + sample.name, sample.help, labels=names)
            values = [self._model_name, *(sample.labels[name] for name in names[1:])]
            families[sample.name].add_metric(values, sample.value)
        return families.values()


def _speculation(since: Mapping[str, float]) -> str:
    """Acceptance and drafts per round, with a trailing comma; empty without drafts."""
    passes = since.get("spec_decode_num_rounds", 0)
    mean = f"mean k {since.get('drafts of rounds', 0) / passes:.1f}, " if passes else ""
    rounds, drafted = since.get("spec_decode_num_drafts", 0), since.get("spec_decode_num_draft_tokens", 0)
    accepted = since.get("spec_decode_num_accepted_tokens", 0)
    if not rounds:
        return f"drafts: none, {mean}" if mean else ""
    return f"drafts: {1 + accepted / rounds:.2f} tokens a round, {accepted:.0f} of {drafted:.0f} accepted, {mean}"


class ProgressLine:
    """What the periodic log line says: the engine's numbers against those of the line before."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counters: dict[str, float] = {}
        self._eager: dict[tuple[str, str], float] = {}

    def line(self, samples: Sequence[MetricSample]) -> str | None:
        """One line, or None if nothing has happened since the last and nothing is running."""
        gauges = {sample.name: sample.value for sample in samples if sample.kind == "gauge"}
        counters: dict[str, float] = {}
        for sample in samples:
            if sample.kind == "counter":
                name = sample.name
                if name == "passes":
                    name = "eager" if sample.labels["kind"] == "eager" else "replayed"
                if name == "spec_decode_num_rounds":
                    drafts = int(sample.labels["num_speculative_tokens"]) * sample.value
                    counters["drafts of rounds"] = counters.get("drafts of rounds", 0) + drafts
                counters[name] = counters.get(name, 0) + sample.value
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        since = {name: value - self._counters.get(name, 0) for name, value in counters.items()}
        self._counters = counters
        eager = self._newly_eager(samples)
        running, waiting = gauges.get("num_requests_running", 0), gauges.get("num_requests_waiting", 0)
        if not (running or waiting or since.get("generation_tokens") or since.get("prompt_tokens")):
            return None
        return (
            f"{running:.0f} running, {waiting:.0f} waiting, "
            f"{since.get('prompt_tokens', 0) / seconds:.0f} prompt tok/s, "
            f"{since.get('generation_tokens', 0) / seconds:.0f} generated tok/s, "
            f"KV cache {100 * gauges.get('kv_cache_usage_perc', 0):.1f} % used, "
            f"{_speculation(since)}"
            f"passes: {since.get('replayed', 0):.0f} replayed, {since.get('eager', 0):.0f} eager{eager}"
        )

    def _newly_eager(self, samples: Sequence[MetricSample]) -> str:
        """Which passes ran eagerly since the last line and why, in brackets; empty if none did."""
        counts: dict[tuple[str, str], float] = {}
        for sample in samples:
            if sample.name == "passes" and sample.labels["kind"] == "eager":
                counts[sample.labels["program"], sample.labels["reason"]] = sample.value
        new = {key: value - self._eager.get(key, 0) for key, value in counts.items()}
        self._eager = counts
        named = [f"{count:.0f} {program} {reason}" for (program, reason), count in new.items() if count]
        return f" ({', '.join(named)})" if named else ""
