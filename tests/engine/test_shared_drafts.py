"""Requests that share the drafts of a round: the same bytes, one launch, and drafts where they are accepted."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.drafters.make_blocks import make_dflash
from tests.engine.helpers import counted, draw_drafts, engine, tokens
from tests.engine.matrix import PARAMS, PROMPTS, SCARCE, config_of
from tests.engine.pictures import make_seeing, run, several, vision_of
from unisono.drafters.block.drafter import DFlashDrafter
from unisono.engine.scheduling.adaptive import AcceptanceEstimate
from unisono.engine.startup.capture_candidates import shared_choices
from unisono.entrypoints.llm import LLM
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig, StructuredOutputs

GRAPH = "full" if torch.cuda.is_available() else "tape"
COUNT = 12


def sharing(method: str, checkpoints: Any, shared: bool | None = True, **flags: Any) -> LLM:
    target, model = checkpoints
    spec = SpeculativeConfig(method, None if model is None else str(model), 5, share_drafts=shared)
    return engine(target, speculative=spec, **{"adaptive": True, **flags})


def between(rng: random.Random, choices: tuple[int, ...]) -> int:
    """Mostly numbers of drafts that are shared."""
    return rng.choice((*choices[1:-1], *choices[1:-1], choices[0], choices[-1]))


@pytest.mark.parametrize(
    ("method", "flags"),
    [("eagle3", {"max_num_batched_tokens": 16}), ("ngram", SCARCE)],
    ids=["eagle3, chunks", "ngram, preemption"],
)
def test_same_bytes(
    method: str, flags: dict[str, Any], checkpoints_of: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_drafts(monkeypatch, between)
    checkpoints = checkpoints_of(method)
    expected = plain(checkpoints[0], COUNT)
    with sharing(method, checkpoints, **flags) as llm:
        assert llm.engine.runner.shared == (1, 2, 3)
        assert tokens(llm, PROMPTS[:COUNT], PARAMS[:COUNT]) == expected
        newest = slice(None, -9, -1)
        assert tokens(llm, PROMPTS[:COUNT][newest], PARAMS[:COUNT][newest]) == expected[newest], "after a prefix hit"
        passes = counted(llm)
        shared = {program for program, _, _ in passes if program.startswith("shared_round_")}
        assert shared == {f"shared_round_{k}" for k in (1, 2, 3)}
        assert {(kind, reason) for program, kind, reason in passes if program in shared} == {(GRAPH, "")}
        assert llm.engine.counters.accepted_tokens > 0
        if "num_pages" in flags:
            assert llm.engine.scheduler.preemptions > 0
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def test_beside_structured_outputs_and_logprobs(checkpoints_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that the host reads keep one width; log-probabilities of shared rounds are those of any other."""
    kinds = [
        SamplingParams(temperature=1, seed=3, max_tokens=12, structured_outputs=StructuredOutputs(regex="[0-9 ]+")),
        SamplingParams(temperature=1, seed=4, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=0.5),
    ]
    draw_drafts(monkeypatch, between)
    answers = []
    for shared in (False, True):
        with LLM(
            "tiny",
            speculative=SpeculativeConfig("ngram", None, 5, share_drafts=shared),
            max_num_seqs=4,
            graph_capture="lazy",
        ) as llm:
            outputs = llm.generate(["1 2 3 1 2 3 1 2"] * len(kinds), kinds, use_tqdm=False)
            answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            assert bool(llm.engine.runner.shared) is shared
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("method", "seed"), [("ngram", None), ("ngram", 3), ("dflash", 3)])
def test_pictures(method: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of compact rows keep the rotary positions of their requests."""
    path = make_seeing(tmp_path / "target")
    head = make_dflash(tmp_path / "head", config_of(path)).path if method == "dflash" else None
    how = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=16, ignore_eos=True)
    draw_drafts(monkeypatch, between)
    answers = []
    for drafting in (False, True):
        with sharing(method if drafting else "none", (path, head if drafting else None)) as llm:
            answers.append(run(llm, several(vision_of(path), llm.engine.config.dtype), how))
            assert bool(llm.engine.runner.shared) is drafting
    assert answers[0] == answers[1]


def test_shared_drafts_favour_requests_with_high_acceptance() -> None:
    """Of two requests, one of which never accepts, the other gets the drafts; the first gets some again later."""
    estimate = AcceptanceEstimate(2, 4, differ=True)
    both = np.arange(2)
    for _ in range(60):
        estimate.count(both, np.full(2, 4), np.array([4, 0]))
    most = np.full(2, 4)
    alike, shared = estimate.expected(both, most), estimate.expected(both, most, {2: 4})
    assert shared[2] > alike[2] + 0.5
    assert np.array_equal(np.delete(shared, 2), np.delete(alike, 2))
    before = estimate.conditional(both)
    for _ in range(300):
        estimate.forget(both, np.array([4, 0]))
    after = estimate.conditional(both)
    assert np.array_equal(after[0], before[0])
    assert after[1, 0] > before[1, 0] + 0.2


def test_drafters_that_share(qwen3: Path, tmp_path: Path) -> None:
    """By default on a CPU where drafting costs the same for any number; on a GPU where verified places alone are
    drafted and nothing is recurrent; elsewhere if set.
    """
    with sharing("ngram", (qwen3, None), None) as llm:
        on_cpu = llm.engine.config.device.type == "cpu"
        assert llm.engine.runner.shared == ((1, 2, 3) if on_cpu else ())
        ngram = llm.engine.worker.drafter
    head = make_dflash(tmp_path, config_of(qwen3), (0, 1)).path
    block = DFlashDrafter(SpeculativeConfig("dflash", str(head), 5), config_of(qwen3))
    anchored = SpeculativeConfig("dflash", str(head), 5, {"first_draft": "anchor"})

    def shared(
        drafter: Any, recurrent: bool = False, share: bool | None = None, device: str = "cuda"
    ) -> tuple[Any, str]:
        facts: Any = SimpleNamespace(
            device=SimpleNamespace(type=device), speculative=SpeculativeConfig("any", None, 5, share_drafts=share)
        )
        return shared_choices(facts, drafter, (0, 1, 2, 3, 5), recurrent)

    assert shared(block)[0] == (1, 2, 3)
    assert shared(block, share=False) == ((), "share_drafts is off")
    for apart in ((block, True), (DFlashDrafter(anchored, config_of(qwen3)),), (ngram,)):
        found, reason = shared(*apart)
        assert (found, reason.endswith("share_drafts turns it on")) == ((), True)
        assert shared(*apart, share=True)[0] == (1, 2, 3)
        assert shared(*apart, device="cpu")[0] == (1, 2, 3)
    with sharing("ngram", (qwen3, None), False) as llm:
        assert llm.engine.runner.shared == ()
        shown = {each.name: each for each in llm.engine.config.decisions}
        assert shown["drafts shared by requests"].value == "none"
    with pytest.raises(ConfigError, match="share_drafts"):
        SpeculativeConfig.parse({"method": "ngram", "share_drafts": 3})
