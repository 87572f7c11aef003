"""The engine's graphs: flags and what they refuse, what ``explain`` says, prompt log-probabilities, an idle engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, engine, mixed_params, prompts, tokens
from tests.graphs.programs import FULL, SEGMENTED
from unisono.config import EngineConfig, parse_graphs
from unisono.entrypoints.llm import LLM
from unisono.graphs import Reason, eager_break
from unisono.passes.features import output_logprobs
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

CUDA = torch.cuda.is_available()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"graphs": "fast"}, "--graphs 'fast' is unknown; choose one of auto, full, segmented, off"),
        ({"graphs": "rounds=off"}, "the program 'rounds' is unknown; choose one of extend, round, score"),
        ({"graphs": "round=maybe"}, "the mode 'maybe' is unknown; choose one of auto, full, segmented, off"),
        ({"graphs": "round="}, "the mode '' is unknown"),
        ({"graphs": "full", "enforce_eager": True}, "--enforce-eager captures no graph, --graphs full does"),
        ({"compile": True, "enforce_eager": True}, "--compile compiles what graphs capture, and graphs are off"),
        ({"compile": True, "graphs": "off"}, "--compile compiles what graphs capture, and graphs are off"),
        ({"graph_capture": "never"}, "--graph-capture 'never' is unknown; choose one of start, lazy"),
        ({"graph_memory": 0.0}, "--graph-memory 0.0: give GiB above 0"),
        ({"graph_memory": float("nan")}, "--graph-memory nan: give GiB above 0"),
    ],
)
def test_invalid_graph_flags_raise(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)


def test_modes_by_program() -> None:
    assert parse_graphs("segmented") == {"extend": "segmented", "round": "segmented", "score": "segmented"}
    assert parse_graphs("extend=off, round=full") == {"extend": "off", "round": "full", "score": "auto"}


def test_full_graphs_of_a_backend_that_none_can_hold_are_refused(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention backend 'torch' plans on the host: use --graphs auto or round="):
        engine(qwen3, attention_backend="torch", graphs="round=full")


def test_full_graphs_of_passes_that_break_are_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that breaks: here the sampling of log-probabilities."""
    monkeypatch.setattr(output_logprobs, "report_logprobs", eager_break(output_logprobs.report_logprobs))
    with pytest.raises(ConfigError, match="round passes run 1 functions eagerly, so they cannot be captured whole"):
        engine(qwen3, graphs="round=full", max_num_seqs=1)
    with engine(qwen3, max_num_seqs=1) as llm:
        assert {graph.kind for graph in llm.engine.runner.planner.graphs()} == {SEGMENTED}


def test_automatic_modes_are_decisions(qwen3: Path) -> None:
    for backend, mode in (("triton", "full"), ("torch", "segmented")):
        with engine(qwen3, attention_backend=backend, graphs="score=off", max_num_seqs=2) as llm:
            told = llm.engine.info()
        assert told["settings"]["graphs"] == {"extend": mode, "round": mode, "score": "off"}  # type: ignore[index]
        (decision,) = [d for d in told["decisions"] if d["name"] == "graphs"]  # type: ignore[attr-defined]
        assert decision["value"] == f"{mode} for extend, round"
        kinds = {row["kind"] for row in told["graphs"] if row["program"] == "round"}  # type: ignore[attr-defined]
        assert kinds == {FULL if mode == "full" else SEGMENTED}
        (row,) = [row for row in told["graphs"] if row["kind"] == "eager"]  # type: ignore[attr-defined]
        assert (row["program"], row["reason"]) == ("score", Reason.DISABLED.value)


@pytest.mark.parametrize("flags", [{}, {"graphs": "segmented"}, {"attention_backend": "torch"}], ids=str)
def test_the_bundled_model_has_no_eager_pass(flags: dict[str, Any]) -> None:
    with LLM("tiny", max_num_seqs=4, max_model_len=512, **flags) as llm:
        told: Any = llm.engine.info()
    programs = {"extend", "round", "score", "verify", "draft", "catch_up"}  # it speculates by default
    assert {row["program"] for row in told["graphs"]} == programs
    assert CUDA or all(row["kind"] != "eager" for row in told["graphs"])
    for row in told["graphs"]:
        if row["kind"] not in ("eager", "lazy"):
            assert row["bytes"] >= 0
            assert row["ms"] > 0
            assert row["breaks"] == (0 if row["kind"] == FULL else row["breaks"])
            assert (row["breaks"] > 0) == (row["kind"] == SEGMENTED)
    assert 0 < told["graph_memory"]["bytes"] <= told["graph_memory"]["budget"]
    assert 0 < told["graph_memory"]["capture_seconds"] <= told["start_seconds"]["total"]


def test_graphs_beyond_the_memory_budget_run_eagerly_and_say_so(qwen3: Path) -> None:
    batch, params = prompts(6, 250, low=20, seed=4), mixed_params(6)
    with engine(qwen3) as llm:
        expected = tokens(llm, batch, params)
        largest = max(graph.cost_bytes for graph in llm.engine.runner.planner.graphs())
    if CUDA:
        pytest.skip("graphs of a model this small take no measurable memory")
    with engine(qwen3, graph_memory=0.5 * largest / 2**30) as llm:
        assert tokens(llm, batch, params) == expected
        assert {reason for _, _, reason in counted(llm)} == {"", "OVER_BUDGET"}
        samples = {name: value for name, _, _, value, _ in llm.engine.metrics()}
        assert samples["graph_bytes"] <= 0.5 * largest
        assert any(r["advice"] == "raise --graph-memory" for r in llm.engine.info()["graphs"])  # type: ignore[attr-defined]


def test_lazy_capture_captures_only_used_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass replays a graph, each graph serves a pass, and a long answer learns what other rounds cost."""
    from unisono.engine.scheduling import draft_controller

    monkeypatch.setattr(draft_controller, "ROUNDS_PER_CHOICE", 3)
    asking = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("tiny", graph_capture="lazy", max_num_seqs=2, max_model_len=256) as llm:
        planner = llm.engine.runner.planner
        assert list(planner.graphs()) == []
        (skipped,) = [d for d in llm.engine.info()["decisions"] if d["name"] == "draft self-test"]  # type: ignore[attr-defined]
        assert (skipped["value"], skipped["reason"]) == ("skipped", "--graph-capture lazy starts without it")
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        first = {(g.key.program, g.key.shape.rows, g.key.shape.width) for g in planner.graphs()}
        assert first == {("extend", 16, 1), ("round", 1, 4)}
        lazy = tokens(llm, [[5, 6, 7]], asking)
        widths = {g.key.shape.width for g in planner.graphs() if g.key.program == "round"}
        assert {3, 4} <= widths
        assert {reason for _, _, reason in counted(llm)} == {""}
    plain = {"enforce_eager": True, "speculative_config": {"method": "none"}}
    with LLM("tiny", max_num_seqs=2, max_model_len=256, **plain) as llm:
        assert tokens(llm, [[5, 6, 7]], asking) == lazy


def test_prompt_logprobs_replay_graphs(qwen3: Path) -> None:
    asking = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    with engine(qwen3, graphs="full") as llm:
        llm.generate([[1, 2, 3] * 30, [4] * 9], asking)
        assert counted(llm)["score", FULL, ""] >= 1
        assert {kind for program, kind, _ in counted(llm) if program == "score"} == {FULL}


def test_idle_engine_captures_missing_graphs(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt passes for which nothing was captured at start, because few were expected."""
    from unisono.engine.startup import capture_candidates as buckets_module
    from unisono.engine.startup.capture_candidates import buckets_of
    from unisono.graphs.cost import PassCost

    def few(*args: Any) -> Any:
        from dataclasses import replace

        buckets = buckets_of(*args)
        cost = PassCost.linear(1.0, 1.0, eager_ms=1000.0, capture_ms=10.0)
        return buckets if buckets.program.name == "round" else replace(buckets, cost=cost, passes=1e-6, measured=False)

    monkeypatch.setattr(buckets_module, "buckets_of", few)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with engine(qwen3) as llm:
        first = tokens(llm, [[5] * 20], params)
        llm.engine.reset_prefix_cache()
        assert counted(llm)["extend", "eager", "NOT_CAPTURED"] == 1
        llm.engine.add(llm._request([1, 2, 3], params))
        assert llm.engine.capture_missing() == 0, "not while there is work"
        while llm.engine.has_work():
            llm.engine.step()
        assert [llm.engine.capture_missing() for _ in range(3)] == [1, 1, 0]
        assert tokens(llm, [[5] * 20], params) == first
        assert counted(llm)["extend", FULL, ""] == 1
        assert {name: value for name, _, _, value, _ in llm.engine.metrics()}["graph_idle_captures"] == 2


def test_metrics_report_graph_padding(qwen3: Path) -> None:
    with engine(qwen3, max_num_seqs=4, graphs="full") as llm:
        llm.generate([[1, 2]] * 3, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        samples = {(n, labels.get("program")): v for n, _, labels, v, _ in llm.engine.metrics()}
    padded, filled = samples["graph_rows_padded", "extend"], samples["graph_rows_filled", "extend"]
    assert samples["graph_padding_share", "extend"] == padded / (padded + filled) > 0.5
    assert samples["graphs", None] > 3
    assert samples["graph_capture_seconds", None] > 0


# ---- the backend that plans on the host -------------------------------------------------------------


def test_attention_on_the_host_is_exact_too(qwen3: Path) -> None:
    """Batches, chunks and speculation change no token; and it computes what the other backend computes, nearly."""
    batch, params = prompts(5, 250, high=40, seed=8), mixed_params(5, max_tokens=10)
    batch[1] = batch[1][:4] * 8
    with engine(qwen3, attention_backend="torch", max_num_seqs=1) as llm:
        alone = tokens(llm, batch, params)
    ngram = SpeculativeConfig("ngram", num_speculative_tokens=3)
    for flags in ({"max_num_batched_tokens": 16}, {"speculative": ngram}, {"speculative": ngram, "graphs": "off"}):
        with engine(qwen3, attention_backend="torch", **flags) as llm:
            assert tokens(llm, batch, params) == alone
    scores = []
    asking = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for backend in ("torch", "triton"):
        with engine(qwen3, attention_backend=backend) as llm:
            (output,) = llm.generate([batch[0]], asking)
        assert output.prompt_logprobs is not None
        scores.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:] if entry])
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=0, atol=0.1 if CUDA else 1e-4)
