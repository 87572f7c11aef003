"""Rounds whose number of drafts changes: the same bytes, a drafter that has missed nothing, and graphs all the way."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, engine, prompts, tokens
from tests.engine.test_speculation import DRAFTERS, PARAMS, PROMPTS, SCARCE, Checkpoints
from unisono.drafters.base import PausableDrafter
from unisono.engine.pace import Pace
from unisono.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig

CUDA = torch.cuda.is_available()
GRAPH = "full" if CUDA else "tape"


@pytest.fixture(scope="module")
def checkpoints_of(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoints]:
    return functools.cache(lambda method: DRAFTERS[method](checkpoints, tmp_path_factory.mktemp(method)))


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], list[Any]]:
    """What a target says without speculation."""

    @functools.cache
    def run(target: Path) -> list[Any]:
        with engine(target) as llm:
            return tokens(llm, PROMPTS, PARAMS)

    return run


def drafting(method: str, checkpoints: Checkpoints, k: int = 3, **flags: Any) -> LLM:
    target, model = checkpoints
    spec = SpeculativeConfig(method, None if model is None else str(model), k)
    return engine(target, speculative=spec, **{"adaptive": True, **flags})


@pytest.fixture
def at_random(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[random.Random, tuple[int, ...]], int]], None]:
    """Replace the policy: every round's number of drafts is drawn, by default from all there are."""

    def patch(draw: Callable[[random.Random, tuple[int, ...]], int] = random.Random.choice) -> None:
        rng = random.Random(7)
        monkeypatch.setattr(Pace, "_choose", lambda self, sequences: draw(rng, self._runner.choices))

    return patch


def check(method: str, checkpoints: Checkpoints, expected: list[Any], **flags: Any) -> None:
    count = len(expected)
    with drafting(method, checkpoints, **flags) as llm:
        assert tokens(llm, PROMPTS[:count], PARAMS[:count]) == expected
        newest = slice(None, -9, -1)  # cached, most of them
        before = llm.engine.scheduler.prefix_hits
        assert tokens(llm, PROMPTS[:count][newest], PARAMS[:count][newest]) == expected[newest], "after a prefix hit"
        assert llm.engine.scheduler.prefix_hits > before
        assert set(llm.engine.pace.rounds) == set(llm.engine.runner.choices)
        assert llm.engine.counters.accepted_tokens > 0
        if "num_pages" in flags:
            assert llm.engine.scheduler.preemptions > 0
        passes = counted(llm)
        assert {kind for program, kind, _ in passes if program in ("round", "catch_up")} == {GRAPH}
        caught_up = passes.get(("catch_up", GRAPH, ""), 0)
        assert (caught_up > 0) is isinstance(llm.engine.runner.drafter, PausableDrafter)
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize("method", ["eagle3", "ngram", "mtp", "standalone"])
def test_same_bytes_whatever_is_drafted(method: str, checkpoints_of: Any, plain: Any, at_random: Any) -> None:
    at_random()
    checkpoints = checkpoints_of(method)
    flags = SCARCE if method == "mtp" else {"max_num_batched_tokens": 16}
    check(method, checkpoints, plain(checkpoints[0])[:12], **flags)


@pytest.mark.full
@pytest.mark.parametrize("flags", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 16}, SCARCE], ids=str)
@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("method", DRAFTERS)
def test_same_bytes_in_every_way(
    method: str, k: int, flags: dict[str, Any], checkpoints_of: Any, plain: Any, at_random: Any
) -> None:
    at_random()
    checkpoints = checkpoints_of(method)
    check(method, checkpoints, plain(checkpoints[0]), k=k, **flags)


# ---- a drafter that was paused ----------------------------------------------------------------------

TEXTS = prompts(3, 250, low=5, high=40, seed=11)
LONG = SamplingParams(temperature=0.8, seed=3, max_tokens=90, ignore_eos=True)
PAUSABLE = ("eagle", "eagle3", "mtp", "standalone")


def proposals(llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[int]]:
    """What an eager engine drafts for TEXTS, by request and length of its text."""
    drafter, seen = llm.engine.runner.drafter, {}
    slots, real = llm.engine.runner.slots, drafter.propose

    def propose(rows: torch.Tensor, drafts: torch.Tensor) -> None:
        real(rows, drafts)
        for slot, row in zip(rows.tolist(), drafts.tolist(), strict=True):
            if slot != slots.padding:
                seen[slot, int(slots.length[slot])] = row

    monkeypatch.setattr(drafter, "propose", propose)
    tokens(llm, TEXTS, params)
    return seen


def pauses(rng: random.Random, choices: tuple[int, ...]) -> int:
    """Long pauses: more rounds than a drafter remembers, and a few."""
    return 0 if rng.random() < 0.93 else choices[-1]


@pytest.mark.parametrize("method", PAUSABLE)
def test_a_paused_drafter_drafts_as_if_it_had_not_been(
    method: str, checkpoints_of: Any, at_random: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: equal text, equal drafts, behind pauses shorter and longer than what can be remembered."""
    checkpoints = checkpoints_of(method)
    eager = {"enforce_eager": True, "max_num_batched_tokens": 32}
    with drafting(method, checkpoints, **eager) as llm:
        always = proposals(llm, replace(LONG, max_drafts=0), monkeypatch)  # at every length: none are accepted
    at_random(pauses)
    monkeypatch.setattr("unisono.engine.runner.draft_choices", lambda config, most: ((0, most), "a test"))
    with drafting(method, checkpoints, **eager) as llm:
        now_and_then = proposals(llm, LONG, monkeypatch)
        rounds, each = llm.engine.pace.rounds, llm.engine.runner.pending
    assert len(now_and_then) >= 6
    assert rounds[0] > 5 * each
    assert now_and_then == {at: always[at] for at in now_and_then}
