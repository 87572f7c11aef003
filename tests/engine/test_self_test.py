"""The start-up test of a drafter: it tells heads that fit from heads that don't, and leaves nothing behind."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.engine.helpers import counted, engine, mixed_params, prompts, tensors_of, tokens
from tests.engine.matrix import config_of, drafting
from tests.models.make import make_checkpoint
from unisono.engine import engine as engine_module
from unisono.entrypoints.llm import LLM
from unisono.types import SpeculativeConfig

K = 3


def outcome(llm: LLM) -> tuple[str, str] | None:
    """(value, reason) of the decision that tells of the test; None where there is none."""
    found = [d for d in llm.engine.info()["decisions"] if d["name"] == "draft self-test"]
    assert len(found) < 2
    return (found[0]["value"], found[0]["reason"]) if found else None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "self_test" in r.name]


@pytest.fixture
def wrong_head(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A head of random weights, which no target likes."""
    return make_eagle(tmp_path / "head", config_of(checkpoints["mistral"])).path


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_drafter_that_fits_passes(qwen3: Path, caplog: pytest.LogCaptureFixture, eager: bool) -> None:
    """The target drafts for itself: 16 tokens for each of four texts, all drafted right."""
    with drafting("standalone", (qwen3, qwen3), K, enforce_eager=eager, whole_self_test=True) as llm:
        assert outcome(llm) == ("100% of 16 first drafts accepted", "4 texts continued greedily, 4.00 tokens a round")
        assert llm.engine.info()["start_seconds"]["self-test"] > 0
    assert not warnings(caplog)


def test_mismatched_head_fails_the_self_test(
    checkpoints: dict[str, Path], wrong_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with drafting("eagle", (checkpoints["mistral"], wrong_head), K, whole_self_test=True) as llm:
        value, reason = outcome(llm) or ("", "")
    assert int(value.split("%")[0]) < 5
    (warning,) = warnings(caplog)
    for told in (reason, warning):
        assert "trained for another target" in told
    assert value in warning


def test_ambiguous_layer_ids_are_reported(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = checkpoints["mistral"]
    head = make_eagle3(tmp_path, config_of(target), (2, 1, 3), aux=[2, 1, 3]).path
    with drafting("eagle3", (target, head), K, whole_self_test=True):
        pass
    (warning,) = warnings(caplog)
    assert "inputs of layers [2, 1, 3] ([2, 1, 3] can only name inputs" in warning
    assert 'set "aux_layers" to "input" or "output"' in warning


def test_self_test_restores_engine_state(
    checkpoints: dict[str, Path], wrong_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an engine that was not tested: slots, pages, counts; and what requests get, drafts included."""
    batch, params = prompts(6, 250), mixed_params(6)

    def state(tested: bool) -> Any:
        if not tested:
            monkeypatch.setattr(engine_module, "run_self_test", lambda engine: False)
        eager = torch.cuda.is_available()  # where a clock chooses the graphs
        with drafting(
            "eagle", (checkpoints["mistral"], wrong_head), K, enforce_eager=eager, whole_self_test=True
        ) as llm:
            assert (outcome(llm) is not None) == tested
            e = llm.engine
            s, planner = e.scheduler, e.runner.planner
            rows = {name: tensor.clone() for name, tensor in tensors_of(e.worker.slots).items()}
            free = e.scheduler.slots._free, e.pool.free, e.pool.tree.pages, len(e._sequences), e.has_work()
            counts = [asdict(e.counters), s.prefix_queries, s.prefix_hits, s.preemptions, counted(llm)]
            told = [
                metric for metric in e.metrics() if metric[0] not in ("graph_capture_seconds", "graph_bytes")
            ]  # a clock chose them
            counts += [dict(planner.filled_rows), dict(planner.padded_rows), e.info()["passes"], told]
            free, counts = str(free), str(counts)
            e.check_integrity()
            answers = tokens(llm, batch, params)
            return rows, free, counts, answers, asdict(e.counters), s.prefix_hits, counted(llm), next(e._order)

    (rows, *rest), (rows_without, *rest_without) = state(True), state(False)
    assert rest == rest_without
    assert rows.keys() == rows_without.keys()
    for name, tensor in rows.items():
        assert torch.equal(tensor, rows_without[name]), name


SKIPPED = {
    "random target": ({"load_format": "dummy"}, {}, "the target's weights are random"),
    "random head": ({}, {"load_format": "dummy"}, "the drafter's weights are random"),
    "short context": ({"max_model_len": 33}, {}, "a context of 33 tokens is too short"),
    "synthetic": ({"synthetic_acceptance_length": 2.0}, {}, "acceptance is synthetic"),
}


@pytest.mark.parametrize(("flags", "options", "why"), SKIPPED.values(), ids=SKIPPED)
def test_inconclusive_draft_self_test_is_skipped(
    checkpoints: dict[str, Path], wrong_head: Path, caplog: pytest.LogCaptureFixture, flags: Any, options: Any, why: str
) -> None:
    caplog.set_level(logging.INFO)
    spec = SpeculativeConfig("eagle", str(wrong_head), K, options)
    with engine(checkpoints["mistral"], speculative=spec, **flags, whole_self_test=True) as llm:
        value, reason = outcome(llm) or ("", "")
        assert "self-test" not in llm.engine.info()["start_seconds"]
    assert value == "skipped"
    assert why in reason
    assert f"No draft self-test: {reason}." in caplog.text
    assert not warnings(caplog)


def test_minimum_context_of_the_self_test(checkpoints: dict[str, Path], wrong_head: Path) -> None:
    with drafting(
        "eagle", (checkpoints["mistral"], wrong_head), K, max_model_len=34, max_num_seqs=1, whole_self_test=True
    ) as llm:
        assert "first drafts" in (outcome(llm) or ("", ""))[0]


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "mistral", tokenizer=False)
    head = make_eagle(tmp_path / "head", config_of(target)).path
    with drafting("eagle", (target, head), K, whole_self_test=True) as llm:
        assert outcome(llm) == ("skipped", "the checkpoint has no tokenizer, so there is no text")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafter_without_weights_needs_no_self_test(qwen3: Path, method: str) -> None:
    with drafting(method, (qwen3, None), K, whole_self_test=True) as llm:
        assert outcome(llm) is None
