"""The engine's numbers as Prometheus families, and the periodic log line."""

from __future__ import annotations

import time

import pytest

from unisono.server.ipc import MetricSample
from unisono.server.metrics import ProgressLine, ServerMetrics


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


def test_labels_keep_their_values_whatever_their_order() -> None:
    page = ServerMetrics("m", lambda: samples(1, 2, 3)).render().decode()
    assert 'unisono:passes_total{kind="eager",model_name="m",program="round",reason="DISABLED"} 3.0' in page
    assert 'unisono:passes_total{kind="cuda graph",model_name="m",program="round",reason=""} 7.0' in page
    assert 'unisono:num_requests_running{model_name="m"} 1.0' in page
    assert page.count("# TYPE unisono:passes_total counter") == 1


def test_the_log_line_tells_what_happened_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_log_line_tells_how_drafts_fared_since_the_last() -> None:
    def counted(rounds: float, drafted: float, accepted: float) -> list[MetricSample]:
        names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        counts = dict(zip(names, (rounds, drafted, accepted), strict=True)) | {"generation_tokens": rounds + accepted}
        return [MetricSample(name, "counter", {}, value, "") for name, value in counts.items()]

    line = ProgressLine()
    assert "drafts: 2.50 tokens a round, 30 of 60 accepted, passes" in (line.line(counted(20, 60, 30)) or "")
    assert "drafts: 1.20 tokens a round, 2 of 30 accepted, passes" in (line.line(counted(30, 90, 32)) or "")
    without = [*counted(30, 90, 32)[:3], MetricSample("generation_tokens", "counter", {}, 99, "")]
    assert "drafts" not in (line.line(without) or "drafts")
