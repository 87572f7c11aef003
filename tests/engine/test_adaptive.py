"""Rounds whose number of drafts changes: the same bytes, a drafter that has missed nothing, and graphs all the way."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.ledger import play
from tests.engine.helpers import counted, draw_drafts, engine, note_launches, prompts, tokens
from tests.engine.matrix import DRAFTERS, PARAMS, PROMPTS, SCARCE, Checkpoints
from unisono.drafters.base import PausableDrafter
from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.sequence import Extend
from unisono.engine.startup.capture_candidates import usual_name
from unisono.entrypoints.llm import LLM
from unisono.types import ConfigError, EngineRequest, SamplingParams, SpeculativeConfig, StructuredOutputs

CUDA = torch.cuda.is_available()
GRAPH = "full" if CUDA else "tape"


def drafting(method: str, checkpoints: Checkpoints, k: int = 3, **flags: Any) -> LLM:
    target, model = checkpoints
    spec = SpeculativeConfig(method, None if model is None else str(model), k)
    return engine(target, speculative=spec, **{"adaptive": True, **flags})


@pytest.fixture
def at_random(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[random.Random, tuple[int, ...]], int]], None]:
    return functools.partial(draw_drafts, monkeypatch)


def check(method: str, checkpoints: Checkpoints, expected: list[Any], **flags: Any) -> None:
    count = len(expected)
    with drafting(method, checkpoints, **flags) as llm:
        assert tokens(llm, PROMPTS[:count], PARAMS[:count]) == expected
        newest = slice(None, -9, -1)  # cached, most of them
        before = llm.engine.scheduler.prefix_hits
        assert tokens(llm, PROMPTS[:count][newest], PARAMS[:count][newest]) == expected[newest], "after a prefix hit"
        assert llm.engine.scheduler.prefix_hits > before
        assert set(llm.engine.draft_controller.rounds) == set(llm.engine.runner.choices)
        assert llm.engine.counters.accepted_tokens > 0
        if "num_pages" in flags:
            assert llm.engine.scheduler.preemptions > 0
        passes = counted(llm)
        # On a GPU a pass of catching up may be quicker without a graph, by measured costs.
        always = ("round",) if CUDA else ("round", "catch_up")
        assert {kind for program, kind, _ in passes if program in always} == {GRAPH}
        caught_up = sum(count for (program, *_), count in passes.items() if program == "catch_up")
        assert (caught_up > 0) is isinstance(llm.engine.worker.drafter, PausableDrafter)
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize("method", ["eagle3", "ngram", "mtp", "standalone"])
def test_same_bytes_with_random_draft_lengths(method: str, checkpoints_of: Any, plain: Any, at_random: Any) -> None:
    at_random()
    checkpoints = checkpoints_of(method)
    flags = SCARCE if method == "mtp" else {"max_num_batched_tokens": 16}
    check(method, checkpoints, plain(checkpoints[0], 12), **flags)


@pytest.mark.parametrize("flags", [{"graphs": "round=segmented"}, {"attention_backend": "torch"}], ids=str)
def test_catching_up_is_captured_as_rounds_are(
    flags: dict[str, Any], checkpoints_of: Any, plain: Any, at_random: Any
) -> None:
    if "attention_backend" in flags and CUDA:
        pytest.skip("on a GPU the two backends have other bits")
    at_random()
    checkpoints = checkpoints_of("eagle3")
    with drafting("eagle3", checkpoints, **flags) as llm:
        assert tokens(llm, PROMPTS[:6], PARAMS[:6]) == plain(checkpoints[0], 12)[:6]
        segmented = {
            program for program, kind, _ in counted(llm) if kind == ("segmented" if CUDA else "tape-segmented")
        }
        # On a GPU a pass of catching up may be quicker without a graph, by measured costs.
        assert segmented >= ({"round"} if CUDA else {"round", "catch_up"})


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
LETTERS = StructuredOutputs(regex="[a-z]*")
PAUSABLE = ("eagle", "eagle3", "mtp", "standalone")


def carried(llm: LLM) -> list[torch.Tensor]:
    """The hidden states [S, H] that the drafter carries from round to round."""
    state = llm.engine.worker.store.view("drafter").tree
    return [part["hidden"] for part in (state, *state.get("stages", ())) if "hidden" in part]


def proposals(llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[float]]:
    """What an eager engine drafts for TEXTS, and for what goes on from their answers' cached pages: by text so far.

    And the sum of the hidden states that its drafter carries then: one wrong key among many changes few drafts.
    """
    drafter, seen = llm.engine.worker.drafter, {}
    slots, real = llm.engine.worker.slots, drafter.propose

    def propose(rows: torch.Tensor, drafts: torch.Tensor) -> None:
        real(rows, drafts)
        for slot, row in zip(rows.tolist(), drafts.tolist(), strict=True):
            if slot != slots.padding:
                text = tuple(slots.history[slot, : int(slots.length[slot])].tolist())
                seen[text] = [*row, *(part[slot].sum().item() for part in carried(llm))]

    monkeypatch.setattr(drafter, "propose", propose)
    answers = tokens(llm, TEXTS, params)
    before = llm.engine.scheduler.prefix_hits
    tokens(llm, [text + answer for text, answer in zip(TEXTS, answers, strict=True)], replace(params, max_tokens=30))
    assert llm.engine.scheduler.prefix_hits - before >= 3 * 48, "of the answers too"
    return seen


def pauses(rng: random.Random, choices: tuple[int, ...]) -> int:
    """Long pauses: more rounds than a drafter remembers, and a few."""
    return 0 if rng.random() < 0.93 else choices[-1]


@pytest.mark.parametrize("method", PAUSABLE)
def test_resumed_drafter_drafts_as_if_never_paused(
    method: str, checkpoints_of: Any, at_random: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: equal text, equal drafts, behind pauses shorter and longer than what can be remembered."""
    checkpoints = checkpoints_of(method)
    eager = {"enforce_eager": True, "max_num_batched_tokens": 32}
    with drafting(method, checkpoints, **eager) as llm:
        always = proposals(llm, replace(LONG, max_drafts=0), monkeypatch)  # at every length: none are accepted
    at_random(pauses)
    monkeypatch.setattr("unisono.engine.worker.build.draft_choices", lambda config, most: ((0, most), "a test"))
    with drafting(method, checkpoints, **eager) as llm:
        now_and_then = proposals(llm, LONG, monkeypatch)
        rounds, each = llm.engine.draft_controller.rounds, llm.engine.runner.max_unobserved
    assert len(now_and_then) >= 6
    assert rounds[0] > 5 * each
    assert now_and_then == {at: always[at] for at in now_and_then}


# ---- around it --------------------------------------------------------------------------------------

CERTAIN = SamplingParams(temperature=0, max_tokens=1 + 10 * 4, ignore_eos=True)


@pytest.mark.parametrize("paused", [0, 7, 40])
def test_prefix_hits_after_paused_drafting_have_complete_draft_state(qwen3: Path, paused: int) -> None:
    """The target is its own draft: whoever goes on from cached pages has every draft accepted, or keys were missing."""
    prompt = prompts(1, 250, 20, 21, seed=5)[0]
    with drafting("standalone", (qwen3, qwen3)) as llm:
        (first,) = play(llm, [prompt], [replace(CERTAIN, max_tokens=4)])  # compiles; the prompt is cached
        llm.engine.pin_drafts(0 if paused else 3)
        (told,) = play(llm, [prompt], [replace(CERTAIN, max_tokens=max(paused, 40))])
        llm.engine.pin_drafts(3)
        before = llm.engine.scheduler.prefix_hits
        (entry,) = play(llm, [prompt + told.tokens], [CERTAIN])
        assert entry.rounds == [4] * 10
        assert llm.engine.scheduler.prefix_hits - before >= (16 if paused else 48)
        assert first.tokens == told.tokens[:4]


def test_a_resumed_request_has_every_draft_accepted(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the pause: what a user would see of it, tokens a round."""
    turns = iter([3] * 3 + [0] * 21 + [3] * 99)
    monkeypatch.setattr(DraftController, "_choose", lambda self, sequences: next(turns))
    with drafting("standalone", (qwen3, qwen3), max_num_batched_tokens=512) as llm:
        (entry,) = play(llm, [[1, 2, 3]], [replace(CERTAIN, max_tokens=1 + 12 + 21 + 40)])
    assert entry.rounds == [4] * 3 + [1] * 21 + [4] * 10


def test_only_those_behind_catch_up(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while others are paused has nothing to catch up with; nor have those that do not run."""
    with drafting("standalone", (qwen3, qwen3)) as llm:
        sizes: list[int] = []
        note_launches(monkeypatch, lambda key, batch: key.program == "catch_up" and sizes.append(key.shape.rows))
        llm.engine.pin_drafts(0)
        old = EngineRequest("old", [1, 2, 3], replace(CERTAIN, seed=0))
        llm.engine.add(old)
        for _ in range(4):
            llm.engine.step()
        llm.engine.add(EngineRequest("new", [4, 5, 6], replace(CERTAIN, seed=0)))
        llm.engine.step()
        llm.engine.pin_drafts(3)
        while llm.engine.has_work():
            llm.engine.step()
        assert sizes == [1]


@pytest.mark.parametrize("method", ["standalone", "ngram"])
def test_rounds_are_plain_if_no_request_drafts(method: str, qwen3: Path) -> None:
    """Speculation is off for every request: k = 0, whatever drafting might bring, and nothing to catch up with."""
    with drafting(method, (qwen3, qwen3 if method == "standalone" else None)) as llm:
        before = llm.engine.draft_controller.rounds.copy()
        tokens(llm, TEXTS, replace(LONG, max_drafts=0))
        assert set(llm.engine.draft_controller.rounds - before) == {0}
        assert ("catch_up", GRAPH, "") not in counted(llm)


def test_fixed_draft_length_is_a_decision(qwen3: Path) -> None:
    for flags, why in (({"adaptive": False}, "adaptive is off"), ({"enforce_eager": True}, "without graphs")):
        with drafting("ngram", (qwen3, None), **flags) as llm:
            assert llm.engine.runner.choices == (3,)
            tokens(llm, TEXTS, LONG)
            assert set(llm.engine.draft_controller.rounds) == {3}
            (decision,) = [d for d in llm.engine.config.decisions if d.name == "drafts per round"]
            assert why in decision.reason
            assert llm.engine.info()["speculation"]["round_ms"] == []  # type: ignore[index]
            with pytest.raises(ConfigError, match="2 drafts"):
                llm.engine.pin_drafts(2)


@pytest.mark.parametrize(
    ("more", "known"),
    [({}, True), ({"return_hidden_states": True}, False), ({"structured_outputs": LETTERS}, False)],
    ids=["plain", "returned", "masked"],
)
def test_costs_are_those_of_plain_rounds(more: dict[str, Any], known: bool, ngram: LLM, monkeypatch: Any) -> None:
    """Other rounds are other passes: what they take says nothing of the graphs whose times are known."""
    told: list[tuple[int, int]] = []
    costs = ngram.engine.draft_controller.policy.costs
    for name in ("measured", "probed"):
        monkeypatch.setattr(costs, name, lambda rows, drafts, ms: told.append((rows, drafts)))
    tokens(ngram, TEXTS[:1], replace(LONG, **more))
    assert bool(told) is known


def test_first_round_after_a_prompt_is_not_timed(ngram: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's outputs came before its drafter had caught up, which falls into the time of that round."""
    told: list[int] = []
    reads: list[tuple[type, int]] = []
    draft_controller = ngram.engine.draft_controller

    def read(work: Any, result: Any, outputs: Any, plain: Any = draft_controller.read) -> None:
        before = len(told)
        plain(work, result, outputs)
        reads.append((type(work), len(told) - before))

    monkeypatch.setattr(draft_controller, "read", read)
    monkeypatch.setattr(draft_controller.policy.costs, "measured", lambda rows, drafts, ms: told.append(drafts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftController, "_choose", lambda self, sequences: 3)
        tokens(ngram, TEXTS[:1], LONG)
        tokens(ngram, TEXTS[1:2], LONG)
    behind = [count for (before, _), (_, count) in itertools.pairwise(reads) if before is Extend]
    assert behind == [0, 0]
    assert len(told) > 4


@pytest.fixture(scope="module")
def ngram(qwen3: Path) -> Any:
    with drafting("ngram", (qwen3, None)) as llm:
        yield llm


def test_adaptive_speculation_info_and_metrics(qwen3: Path) -> None:
    with drafting("ngram", (qwen3, None), k=7, max_num_seqs=4) as llm:
        tokens(llm, TEXTS, LONG)
        info: dict[str, Any] = llm.engine.info()["speculation"]  # type: ignore[assignment]
        samples = [sample for sample in llm.engine.metrics() if sample[0] == "spec_decode_num_rounds"]
        counts = {int(labels["num_speculative_tokens"]): value for _, _, labels, value, _ in samples}
        assert llm.engine.runner.choices == (0, 1, 2, 3, 5, 7)
        assert (
            counts
            == dict(llm.engine.draft_controller.rounds)
            == {int(k): n for k, n in info["rounds_by_drafts"].items()}
        )
        assert info["adaptive"]
        assert {1, 2, 4} <= {row["requests"] for row in info["round_ms"]}
        for row in info["round_ms"]:
            assert list(row) == ["requests", *(f"k={k}" for k in llm.engine.runner.choices)]
            assert all(ms > 0 for ms in row.values())
        kinds = {(usual_name(program), kind) for program, kind, _ in counted(llm)}
        assert kinds == {("extend", GRAPH), ("round", GRAPH)}, "the policy's own choices replay graphs too"


def test_a_tree_is_drafted_whole_or_not_at_all(qwen3: Path, plain: Any, at_random: Any) -> None:
    at_random()
    spec = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3, "topk": 2, "num_draft_tokens": 6})
    with engine(qwen3, speculative=spec, adaptive=True) as llm:
        assert llm.engine.runner.choices == (0, 3)
        assert tokens(llm, PROMPTS[:12], PARAMS[:12]) == plain(qwen3, 12)
        assert set(llm.engine.draft_controller.rounds) == {0, 3}


def test_standby_cost_of_a_paused_drafter(checkpoints_of: Any) -> None:
    """Its share of a pass that catches up with all that is pending; nothing where no memory runs out."""
    costs = {}
    for method in ("eagle", "standalone", "ngram"):
        target, model = checkpoints_of(method)
        path = {} if model is None else {"model": str(model)}
        spec = SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 3, **path})
        with engine(target, speculative=spec, adaptive=True) as llm:
            runner, draft_controller = llm.engine.runner, llm.engine.draft_controller
            costs[method] = draft_controller._standby_ms(2)
            if method == "eagle":
                whole = runner.planner.expected_ms(runner.catch_up_key(2))
                assert whole > 0
                assert costs[method] == whole / runner.max_unobserved
    assert costs["standalone"] == costs["ngram"] == 0
