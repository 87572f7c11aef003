"""The engine's numbers as Prometheus families, and the periodic log line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.conftest import Server, Start, servers, serving, until
from tests.http.fake_engine import Trick
from unisono.cluster.ipc import MetricSample
from unisono.http.observability.metrics import ProgressLine, ServerMetrics


def samples(running: int, tokens: int, eager: int) -> list[MetricSample]:
    labels = {"program": "round", "kind": "eager", "reason": "DISABLED"}
    return [
        MetricSample("num_requests_running", "gauge", {}, running, "Running."),
        MetricSample("kv_cache_usage_perc", "gauge", {}, 0.25, "Share."),
        MetricSample("generation_tokens", "counter", {}, tokens, "Tokens."),
        MetricSample("passes", "counter", labels, eager, "Passes."),
        MetricSample("passes", "counter", {**labels, "program": "extend"}, 1, "Passes."),
        MetricSample("passes", "counter", {"reason": "", "kind": "cuda graph", "program": "round"}, 7, "Passes."),
    ]


def test_metric_labels_in_any_order() -> None:
    page = ServerMetrics("m", lambda: samples(1, 2, 3)).render().decode()
    assert 'unisono:passes_total{engine="0",kind="eager",model_name="m",program="round",reason="DISABLED"} 3.0' in page
    assert 'unisono:passes_total{engine="0",kind="cuda graph",model_name="m",program="round",reason=""} 7.0' in page
    assert 'unisono:num_requests_running{engine="0",model_name="m"} 1.0' in page
    assert page.count("# TYPE unisono:passes_total counter") == 1
    assert 'unisono:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25' in page, "as older dashboards call it"


def test_log_line_reports_changes_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = ProgressLine()
    now = 10.0
    first = line.line(samples(3, 500, 4))
    assert first is not None
    for part in (
        "3 running",
        "50 generated tok/s",
        "KV cache 25.0 %",
        "7 replayed, 5 eager (4 round DISABLED, 1 extend DISABLED)",
    ):
        assert part in first
    now = 20.0
    second = line.line(samples(1, 600, 5))
    assert second is not None
    for part in ("1 running", "10 generated tok/s", "0 replayed, 1 eager (1 round DISABLED)"):
        assert part in second
    assert line.line(samples(0, 600, 5)) is None


def test_log_line_reports_acceptance_since_the_last() -> None:
    def counted(rounds: float, drafted: float, accepted: float) -> list[MetricSample]:
        names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        counts = dict(zip(names, (rounds, drafted, accepted), strict=True)) | {"generation_tokens": rounds + accepted}
        return [MetricSample(name, "counter", {}, value, "") for name, value in counts.items()]

    line = ProgressLine()
    assert "drafts: 2.50 tokens a round, 30 of 60 accepted, passes" in (line.line(counted(20, 60, 30)) or "")
    assert "drafts: 1.20 tokens a round, 2 of 30 accepted, passes" in (line.line(counted(30, 90, 32)) or "")
    without = [*counted(30, 90, 32)[:3], MetricSample("generation_tokens", "counter", {}, 99, "")]
    assert "drafts" not in (line.line(without) or "drafts")


DASHBOARD = [
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count",
    "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket",
    "time_to_first_token_seconds_bucket", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "prompt_tokens_total", "generation_tokens_total", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum",
    "request_params_n_sum", "request_params_max_tokens_sum", "request_inference_time_seconds_sum",
    "iteration_tokens_total_sum", "request_prefill_kv_computed_tokens_sum",
    "request_time_per_output_token_seconds_sum", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "num_preemptions_total", "engine_sleep_state", "cache_config_info", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
]  # fmt: skip
"""What vLLM's Grafana dashboards and benchmark scripts read, without the prefix."""


def scrape(http: httpx.Client) -> dict[str, float]:
    """Every sample, by name and labels, as Prometheus' own parser reads them."""
    page = http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {f"{sample.name} {sorted(sample.labels.items())}": sample.value for sample in samples}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(metrics_prefix="both", prefill_seconds=0.3, queue_seconds=0.1, step_seconds=0.03)


def test_request_time_histograms_by_phase(timed: Server) -> None:
    """Queue, prefill and decode add up to the whole; both prefixes say the same."""
    before = scrape(timed.http)
    timed.http.post("/v1/completions", json={"prompt": [5, 6, 7, 8], "max_tokens": 11, "n": 2}).raise_for_status()
    after = scrape(timed.http)
    labels = "[('engine', '0'), ('model_name', 'fake')]"

    def grown(name: str) -> float:
        key = f"unisono:{name} {labels}"
        assert after[key] == after[key.replace("unisono", "vllm", 1)]
        return after[key] - before[key]

    queue, prefill, decode = (grown(f"request_{part}_time_seconds_sum") / 2 for part in ("queue", "prefill", "decode"))
    assert queue == pytest.approx(0.1, abs=1e-6)
    assert prefill == pytest.approx(0.2, abs=0.1)
    assert 0.25 < decode < 0.6
    assert grown("request_inference_time_seconds_sum") / 2 == pytest.approx(prefill + decode)
    assert grown("time_to_first_token_seconds_sum") / 2 == pytest.approx(queue + prefill, abs=0.05)
    assert grown("e2e_request_latency_seconds_sum") / 2 == pytest.approx(queue + prefill + decode, abs=0.05)
    assert grown("request_time_per_output_token_seconds_sum") / 2 == pytest.approx(decode / 10)
    assert grown("inter_token_latency_seconds_count") == 20
    assert grown("request_prompt_tokens_sum") == 4, "once for the prompt"
    assert grown("request_prefill_kv_computed_tokens_sum") == 2
    assert (grown("request_generation_tokens_sum"), grown("request_generation_tokens_count")) == (22, 2)
    assert (grown("request_params_n_sum"), grown("request_params_n_count")) == (2, 1)
    assert grown("request_params_max_tokens_sum") == 11
    assert grown("iteration_tokens_total_sum") == 22 + 2 + 2, "tokens, and what the cache had not of both prompts"


def test_reasons_of_the_end(timed: Server) -> None:
    def ended(reason: str) -> float:
        labels = f"[('engine', '0'), ('finished_reason', '{reason}'), ('model_name', 'fake')]"
        return scrape(timed.http)[f"vllm:request_success_total {labels}"]

    bodies = {
        "length": {"prompt": [5], "max_tokens": 1},
        "stop": {"prompt": [5], "max_tokens": 9, "stop_token_ids": [5]},
        "error": {"prompt": [Trick.FAIL]},
    }
    for reason, body in bodies.items():
        before = ended(reason)
        timed.http.post("/v1/completions", json=body)
        assert ended(reason) == before + 1
    before = ended("abort")
    with pytest.raises(httpx.ReadTimeout):
        timed.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 400}, timeout=0.5)
    until(lambda: ended("abort") > before)


def test_sleep_is_a_state(timed: Server) -> None:
    def state(name: str) -> float:
        labels = f"[('engine', '0'), ('model_name', 'fake'), ('sleep_state', '{name}')]"
        return scrape(timed.http)[f"vllm:engine_sleep_state {labels}"]

    assert (state("awake"), state("idle")) == (1, 0)
    timed.http.post("/sleep")
    assert (state("awake"), state("idle")) == (0, 1)
    timed.http.post("/wake_up")
    assert (state("awake"), state("idle")) == (1, 0)


@pytest.mark.full
def test_vllms_dashboards_have_values(tmp_path: Path) -> None:
    """With a real engine: every name, under vLLM's prefix only."""
    with serving(tmp_path, "tiny", "--metrics-prefix", "vllm", "--speculative-method", "ngram") as server:
        server.openai.completions.create(model="tiny", prompt="Tom has 3 boxes", max_tokens=20).model_dump()
        page = server.http.get("/metrics").text
    names = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    assert {f"vllm:{name}" for name in DASHBOARD} <= names, {f"vllm:{name}" for name in DASHBOARD} - names
    assert not any(name.startswith("unisono:") for name in names)
    labelled = [line for line in page.splitlines() if line.startswith("vllm:") and 'engine="0"' not in line]
    assert labelled == []


def test_an_unknown_prefix_ends_the_start(start: Start) -> None:
    server = start(ready=False, metrics_prefix="prom")
    assert server.wait() == 1
    assert "unisono, vllm, both" in server.log.read_text()
