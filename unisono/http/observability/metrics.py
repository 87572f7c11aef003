"""Prometheus metrics: times of the API process, and counters of the engine.

Names and labels are vLLM's, with the prefixes of ``--metrics-prefix``: ``unisono:``, ``vllm:`` or both.

The engine's numbers are :class:`unisono.cluster.ipc.MetricSample`, made in ``engine/report.py`` and by features. The
server's log line reads these: gauges ``num_requests_running``, ``num_requests_waiting``, ``kv_cache_usage_perc`` (a
fraction, 0 … 1); counters ``prompt_tokens``, ``generation_tokens``, ``prefix_cache_queries``, ``prefix_cache_hits``
(tokens), and ``passes`` with the labels ``program``, ``kind`` (the graph's, or ``eager``) and ``reason``, and
``spec_decode_num_rounds`` with the label ``num_speculative_tokens``.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from unisono.cluster.ipc import MetricSample
from unisono.http.observability.history import History, RequestRecord, Times
from unisono.http.observability.prefixes import PREFIXES, check_prefix
from unisono.types import EngineRequest

ENGINE = "0"
"""Value of the label ``engine`` (vLLM's number of an engine) for values without an engine."""
FIRST_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.16, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_BUCKETS = tuple(float(2**power) for power in range(15))
OLDER_NAMES: Mapping[str, str] = {"kv_cache_usage_perc": "gpu_cache_usage_perc"}
"""Gauges of the engine -> their names in older versions of vLLM, which some dashboards use."""
REFUSALS = (
    "engine_dead", "invalid_api_key", "operators_only", "queue_full", "rate_limit_exceeded", "shutting_down",
    "sleeping", "too_many_bytes", "too_many_concurrent_requests", "unknown_host",
)  # fmt: skip
"""Error codes of requests that are refused because of the state of the server or the client, not their contents."""
MOST_FIELDS = 50
"""Names of unknown fields with a label of their own."""
FINISHED = ("stop", "length", "abort", "error")
CACHE_LABELS = ("block_size", "num_gpu_blocks")
SECONDS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Between tokens of a request; tokens of one round share its time.", TOKEN_BUCKETS),
    "time_per_output_token_seconds": ("The older name of inter_token_latency_seconds.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Decode time of a request divided by its number of tokens after the first.",
        TOKEN_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From the engine's queue to a request's first pass.", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("From a request's first pass to its first token.", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From a request's first token to its last.", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("From a request's first pass to its last token.", REQUEST_BUCKETS),
}
"""Histograms of seconds: help text and buckets."""
LENGTHS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not found in the prefix cache.",
    "request_generation_tokens": "Tokens that a sequence generated.",
    "request_max_num_generation_tokens": "The same as request_generation_tokens: a sequence is a request here.",
    "request_params_max_tokens": "max_tokens of requests.",
}
"""Histograms of tokens; their buckets end at the model's context."""


class ServerMetrics:
    """The server's registry.

    ``samples`` returns the engine's latest numbers at each scrape.

    ``history`` has the last requests. prefix: a key of PREFIXES. context: the model's, in tokens. engines: number of
    engines. Raises ConfigError for an unknown prefix.
    """

    def __init__(
        self,
        model_name: str,
        samples: Callable[[], Sequence[MetricSample]],
        prefix: str = "unisono",
        context: int = 1 << 20,
        engines: int = 1,
    ) -> None:
        check_prefix(prefix)
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._engines = [str(i) for i in range(engines)]
        self._registry, self._http_registry = CollectorRegistry(), CollectorRegistry()
        self._prefixes = PREFIXES[prefix]
        self.history = History()
        self._registry.register(_EngineCollector(self._labels, samples))
        self._seconds = {name: self._histogram(name, *about) for name, about in SECONDS.items()}
        lengths = length_buckets(context)
        self._lengths = {name: self._histogram(name, text, lengths) for name, text in LENGTHS.items()}
        self._n = self._histogram("request_params_n", "n of requests.", (1, 2, 5, 10, 20))
        text = "Prompt and generated tokens per engine step."
        self._step_tokens = self._histogram("iteration_tokens_total", text, STEP_BUCKETS)
        self._finished = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        for reason in FINISHED:
            for engine in self._engines:
                self._finished.labels(model_name, engine, reason)
        text = "Requests answered with 4xx or 5xx, and streams that ended in an error, by route, status and code."
        self._errors = self._counter("request_errors", text, "handler", "status", "code")
        text = "Refused requests and connections, by reason and name of the API key."
        self._refused = self._counter("requests_refused", text, "reason", "key")
        for reason in REFUSALS:
            self._refused.labels(**self._labels, reason=reason, key="")
        text = "Unknown fields of requests that were dropped (--allow-unknown-fields), by name."
        self._unknown_fields, self._known_fields = self._counter("unknown_fields", text, "field"), set[str]()
        text = "Requests, by name of the API key."
        self._by_key = self._counter("requests_by_key", text, "key", "status")
        text = "Requests from which hosted tools or their items were removed, by type."
        self._ignored = self._counter("ignored_tools", text, "type")
        text = "KV cache: tokens per page, and number of pages."
        self._cache = Gauge("cache_config_info", text, ("engine", *CACHE_LABELS), registry=self._registry)
        self._cache_values: dict[str, tuple[str, ...]] = {}
        text = "1 for the current state of the server."
        self._sleep = Gauge("engine_sleep_state", text, (*self._labels, "sleep_state"), registry=self._registry)
        self.sleeping(False)
        self._add_http()

    def _add_http(self) -> None:
        """Add the metrics of HTTP and of the process, whose names have no prefix."""
        registry = self._http_registry
        ProcessCollector(registry=registry)
        self._http = Counter("http_requests", "HTTP requests.", ("handler", "method", "status"), registry=registry)
        text = "From an HTTP request's headers to the end of its answer."
        self._http_seconds = Histogram(
            "http_request_duration_seconds", text, ("handler", "method"), registry=registry, buckets=REQUEST_BUCKETS
        )

    def http_request(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request. path: the route's."""
        self._http.labels(path, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(path, method).observe(seconds)

    def http_error(self, path: str, status: int, code: str) -> None:
        """Count an answer with 4xx or 5xx, or a failed stream."""
        self._errors.labels(**self._labels, handler=path, status=str(status), code=code).inc()

    def unknown_fields(self, names: Iterable[str]) -> list[str]:
        """Count dropped fields; returns the new ones.

        At most MOST_FIELDS names have a label of their own; the others count as "other".
        """
        new = []
        for name in names:
            if name not in self._known_fields and len(self._known_fields) < MOST_FIELDS:
                self._known_fields.add(name)
                new.append(name)
            field = name if name in self._known_fields else "other"
            self._unknown_fields.labels(**self._labels, field=field).inc()
        return new

    def refused(self, reason: str, key: str = "") -> None:
        """Count a refused request or connection. reason: the error's code. key: the key's name, if it had one."""
        self._refused.labels(**self._labels, reason=reason, key=key).inc()

    def ignored_tool(self, kind: str) -> None:
        """Count a hosted tool that was left out of a request."""
        self._ignored.labels(**self._labels, type=kind).inc()

    def key_request(self, key: str, status: int) -> None:
        """Count an answer to a request with a valid key."""
        self._by_key.labels(**self._labels, key=key, status=f"{status // 100}xx").inc()

    def sleeping(self, asleep: bool) -> None:
        """Set the gauge of the sleep state."""
        for state, now in (
            ("awake", not asleep),
            ("weights_offloaded", False),
            ("discard_all", False),
            ("idle", asleep),
        ):
            for engine in self._engines:
                self._sleep.labels(self._labels["model_name"], engine, state).set(now)

    def cache_config(self, info: Mapping[str, Any], number: int = 0) -> None:
        """Set the size of an engine's KV cache. info: of the engine, or of its replacement after a restart."""
        cache, engine = info.get("kv_cache", {}), str(number)
        if engine in self._cache_values:
            self._cache.remove(engine, *self._cache_values[engine])
        self._cache_values[engine] = str(cache.get("page_size", "")), str(cache.get("pages", ""))
        self._cache.labels(engine, *self._cache_values[engine]).set(1)

    def step(self, tokens: int, number: int = 0) -> None:
        """Record the number of tokens of an engine's step."""
        self._step_tokens[str(number)].observe(tokens)

    def timer(self, request: EngineRequest, n: int = 1) -> RequestTimer:
        """The timer of one sequence of a request with ``n``, started now."""
        return RequestTimer(self, request, n)

    def render(self) -> bytes:
        """The page for a scrape, in Prometheus' text format."""
        prefixed = (_Prefixed(self._registry, prefix) for prefix in self._prefixes)
        return b"".join(map(generate_latest, (*prefixed, _Prefixed(self._http_registry, ""))))

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> dict[str, _Observations]:
        """A histogram per engine."""
        histogram = {engine: _Observations(buckets) for engine in self._engines}
        self._registry.register(_HistogramCollector(name, text, self._labels, histogram))
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self._registry)


def length_buckets(context: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the model's context."""
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= max(1, context))


class RequestTimer:
    """Times one sequence into a server's histograms, from ``start`` on.

    Of a prompt's several sequences the first reports the request's own numbers.
    """

    def __init__(self, metrics: ServerMetrics, request: EngineRequest, n: int = 1) -> None:
        self._metrics, self._request, self._n = metrics, request, n
        self._engine = ENGINE
        self.start = self._submitted = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._queued: float | None = None
        self.end: Times | None = None  # once it has ended

    def submitted(self) -> None:
        """Record the submission to the engine."""
        self._submitted = time.monotonic()

    def placed(self, engine: int) -> None:
        """Record the number of the engine that runs the request."""
        self._engine = str(engine)

    def queued(self, seconds: float | None) -> None:
        """Record the seconds before the first pass, if the engine reports them."""
        self._queued = seconds if self._queued is None else self._queued

    def tokens(self, count: int) -> None:
        """Record the arrival of ``count`` tokens."""
        if count == 0:
            return
        now, engine, seconds = time.monotonic(), self._engine, self._metrics._seconds
        if self._last is None:
            self._first = now
            seconds["time_to_first_token_seconds"][engine].observe(now - self.start)
        else:
            seconds["inter_token_latency_seconds"][engine].observe((now - self._last) / count, count)
            seconds["time_per_output_token_seconds"][engine].observe((now - self._last) / count, count)
        self._last = now

    @property
    def begun(self) -> bool:
        """True once the first token has come."""
        return self._first is not None

    def times(self) -> Times:
        """The times so far."""
        now = time.monotonic()
        if self._first is None or self._last is None:
            return Times(now - self.start, None, self._queued, None, None)
        queue = min(self._queued or 0.0, self._first - self._submitted)
        prefill = self._first - self._submitted - queue
        return Times(now - self.start, self._first - self.start, queue, prefill, self._last - self._first)

    def finished(self, reason: str, tokens: int, cached: int) -> None:
        """Record the end of the sequence: ``stop``, ``length``, ``abort`` or ``error``.

        tokens: its length. cached: prompt tokens from the prefix cache.
        """
        metrics, request, times = self._metrics, self._request, self.times()
        self.end = times
        engine, seconds, lengths = self._engine, metrics._seconds, metrics._lengths
        metrics._finished.labels(metrics._labels["model_name"], engine, reason).inc()
        seconds["e2e_request_latency_seconds"][engine].observe(times.total)
        if times.queue is not None and times.prefill is not None and times.decode is not None:
            seconds["request_queue_time_seconds"][engine].observe(times.queue)
            seconds["request_prefill_time_seconds"][engine].observe(times.prefill)
            seconds["request_decode_time_seconds"][engine].observe(times.decode)
            seconds["request_inference_time_seconds"][engine].observe(times.prefill + times.decode)
            if tokens > 1:
                seconds["request_time_per_output_token_seconds"][engine].observe(times.decode / (tokens - 1))
        lengths["request_generation_tokens"][engine].observe(tokens)
        lengths["request_max_num_generation_tokens"][engine].observe(tokens)
        if request.shares_with is None:
            prompt = len(request.prompt_token_ids)
            lengths["request_prompt_tokens"][engine].observe(prompt)
            lengths["request_prefill_kv_computed_tokens"][engine].observe(prompt - cached)
            metrics._n[engine].observe(self._n)
            lengths["request_params_max_tokens"][engine].observe(request.params.max_tokens or 0)

    def remember(self, record: RequestRecord) -> None:
        """Add the sequence to the server's history."""
        self._metrics.history.add(record)


class _Observations:
    """A histogram of one engine.

    It serves one thread without a lock: prometheus_client's takes 0.6 us per value.

    buckets: upper bounds, ascending.
    """

    def __init__(self, buckets: Iterable[float]) -> None:
        self._bounds = (*buckets, float("inf"))
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``value``, ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bucket's bound in Prometheus' text, and the number of values up to it."""
        return list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return self._sum


class _HistogramCollector:
    """Histograms of one name, by engine, as a metric family."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], observations: Mapping[str, _Observations]
    ) -> None:
        self._name, self._text, self._labels, self._observations = name, text, labels, observations

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        for engine, one in self._observations.items():
            family.add_metric([self._labels["model_name"], engine], one.cumulative(), one.sum)
        yield family


class _Prefixed:
    """A registry whose names have ``prefix``. Creation times of counters are left out."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry, self._prefix = registry, prefix

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            named = Metric(self._prefix + family.name, family.documentation, family.type)
            named.samples = [
                sample._replace(name=self._prefix + sample.name)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield named


class _EngineCollector:
    """Converts samples into metric families. Samples of several engines already have the label ``engine``."""

    def __init__(self, labels: Mapping[str, str], samples: Callable[[], Sequence[MetricSample]]) -> None:
        self._labels = labels
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in _with_older_names(self._samples()):
            names = sorted(sample.labels.keys() - self._labels.keys())
            if sample.name not in families:
                family = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[sample.name] = family(sample.name, sample.help, labels=[*self._labels, *names])
            values = {**self._labels, **sample.labels}
            families[sample.name].add_metric([values[name] for name in (*self._labels, *names)], sample.value)
        return families.values()


def _with_older_names(samples: Iterable[MetricSample]) -> Iterator[MetricSample]:
    """The samples, and a copy under the older name for those that have one."""
    for sample in samples:
        yield sample
        if (older := OLDER_NAMES.get(sample.name)) is not None:
            yield replace(sample, name=older, help=f"The older name of {sample.name}.")


def _speculation(since: Mapping[str, float]) -> str:
    """Acceptance and drafts per round, with a trailing comma; empty without drafts."""
    passes = since.get("spec_decode_num_rounds", 0)
    mean = f"mean k {since.get('drafts of rounds', 0) / passes:.1f}, " if passes else ""
    rounds, drafted = since.get("spec_decode_num_drafts", 0), since.get("spec_decode_num_draft_tokens", 0)
    accepted = since.get("spec_decode_num_accepted_tokens", 0)
    if not rounds:
        return f"drafts: none, {mean}" if mean else ""
    return f"drafts: {1 + accepted / rounds:.2f} tokens a round, {accepted:.0f} of {drafted:.0f} accepted, {mean}"


def _grown(before: float, now: float) -> float:
    """The increase of a counter since ``before``. A smaller value is a restarted engine's, which began at 0."""
    return now - before if now >= before else now


class ProgressLine:
    """The periodic log line: the engine's numbers compared with those of the previous line."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counters: dict[str, float] = {}
        self._eager: dict[tuple[str, str], float] = {}

    def line(self, samples: Sequence[MetricSample]) -> str | None:
        """One line, or None if nothing has happened since the last and nothing is running."""
        gauges: dict[str, float] = {}
        for sample in samples:
            if sample.kind == "gauge":
                gauges[sample.name] = gauges.get(sample.name, 0) + sample.value
        engines = max(1, len({sample.labels.get("engine") for sample in samples}))
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
        since = {name: _grown(self._counters.get(name, 0), value) for name, value in counters.items()}
        self._counters = counters
        eager = self._newly_eager(samples)
        running, waiting = gauges.get("num_requests_running", 0), gauges.get("num_requests_waiting", 0)
        if not (running or waiting or since.get("generation_tokens") or since.get("prompt_tokens")):
            return None
        return (
            f"{running:.0f} running, {waiting:.0f} waiting, "
            f"{since.get('prompt_tokens', 0) / seconds:.0f} prompt tok/s, "
            f"{since.get('generation_tokens', 0) / seconds:.0f} generated tok/s, "
            f"KV cache {100 * gauges.get('kv_cache_usage_perc', 0) / engines:.1f} % used, "
            f"{_speculation(since)}"
            f"passes: {since.get('replayed', 0):.0f} replayed, {since.get('eager', 0):.0f} eager{eager}"
        )

    def _newly_eager(self, samples: Sequence[MetricSample]) -> str:
        """Passes that ran eagerly since the last line, with reasons, in brackets; empty if none did."""
        counts: dict[tuple[str, str], float] = {}
        for sample in samples:
            if sample.name == "passes" and sample.labels["kind"] == "eager":
                key = sample.labels["program"], sample.labels["reason"]
                counts[key] = counts.get(key, 0) + sample.value
        new = {key: _grown(self._eager.get(key, 0), value) for key, value in counts.items()}
        self._eager = counts
        named = [f"{count:.0f} {program} {reason}" for (program, reason), count in new.items() if count]
        return f" ({', '.join(named)})" if named else ""
