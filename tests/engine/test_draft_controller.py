"""Draft controller over a runner without a model: estimates from shared rounds, and reasons for fewer drafts."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.sequence import Round, Rows
from unisono.engine.worker.progress import Progress
from unisono.types import FinishReason
from unisono.types.acceptance import FewerDrafts

K, SLOTS = 5, 4
CHOICES = (0, 1, 2, 3, K)


def runner(captured: tuple[int, ...] = CHOICES, max_unobserved: int = 0) -> Any:
    """A runner whose rounds take 1 ms for each draft and 1 ms more, if their number of drafts was captured."""
    planner = SimpleNamespace(
        pass_ms=lambda key: 1.0 + key[1] if key[1] in captured else None, expected_ms=lambda key: 1.0
    )
    requested = SimpleNamespace(graph_capture="eager", max_forced_tokens=0)
    return SimpleNamespace(
        choices=CHOICES, shared=(1, 2, 3), max_unobserved=max_unobserved, planner=planner,
        worker=SimpleNamespace(drafter=SimpleNamespace(num_drafts=K), slots=SimpleNamespace(padding=SLOTS)),
        config=SimpleNamespace(requested=requested, forced_drafts=(), device=SimpleNamespace(type="cpu")),
        round_key=lambda rows, drafts: (rows, drafts), catch_up_key=lambda rows: (rows, 0),
        shared_drafts=lambda rows, drafts: rows * drafts,
    )  # fmt: skip


def controller(**more: Any) -> tuple[DraftController, Progress, Rows]:
    """A controller with requests in slots 2 and 0, in this order."""
    progress = Progress(SLOTS + 1)
    for slot, owner in ((2, 7), (0, 8)):
        progress.begin(slot, owner, 10, 1000, None, 1)
    sequences: Any = (SimpleNamespace(states={}, reads_drafts=False), SimpleNamespace(states={}, reads_drafts=False))
    rows = Rows(sequences, np.array([2, 0]), np.array([7, 8]))
    return DraftController(runner(**more), progress), progress, rows


def results(*counts: int) -> np.ndarray:
    """Results of running requests that committed these numbers of tokens."""
    return np.array([[count, FinishReason.RUNNING, *[0] * (K + 1)] for count in counts], np.int32)


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A controller of shared rounds of 2 drafts a row; the request in slot 2 accepts all, that in slot 0 none."""
    controls, progress, rows = controller()
    monkeypatch.setattr(DraftController, "_choose", lambda self, rows: 2)
    work = controls.launching(Round(rows, {}, K))
    assert isinstance(work, Round)
    for _ in range(40):
        controls.read(work, results(5, 1), {"drafted": np.array([4, 0]), "found": np.array([K, K])})
    return controls, progress, rows


def test_requests_without_room_are_not_judged(taught: Any) -> None:
    """No draft of the second request was verified, so its estimate is the shared average."""
    controls, _, _ = taught
    first, second, unknown = controls.policy.acceptance.conditional(np.array([2, 0, 1]))
    assert first[0] > 0.9
    assert np.array_equal(second, unknown)


def test_estimates_of_unverified_drafts_fade(taught: Any) -> None:
    """A request that lost its drafts gets some again; verified ones keep their weight."""
    controls, _, rows = taught
    acceptance = controls.policy.acceptance
    for _ in range(40):
        acceptance.count(np.array([0]), np.array([K]), np.array([0]))
    kept, before = acceptance.conditional(np.array([2, 0]))
    work = replace(controls.launching(Round(rows, {}, K)), drafts=2)
    for _ in range(300):
        controls.read(work, results(1, 1), {"drafted": np.array([0, 0]), "found": np.array([K, K])})
    _, after = acceptance.conditional(np.array([2, 0]))
    assert after[0] > before[0] + 0.2
    for _ in range(60):
        controls.read(work, results(5, 1), {"drafted": np.array([4, 0]), "found": np.array([K, K])})
    again, _ = acceptance.conditional(np.array([2, 0]))
    assert again[0] > kept[0] - 0.05


def test_verified_drafts_count_as_in_other_rounds(taught: Any) -> None:
    controls, _, rows = taught
    alone = deepcopy(controls.policy.acceptance)
    work = controls.launching(Round(rows, {}, K))
    controls.read(work, results(5, 1), {"drafted": np.array([K, K]), "found": np.array([K, K])})
    alone.count(np.array([2, 0]), np.array([K, K]), np.array([4, 0]))
    slots = np.array([2, 0])
    assert np.array_equal(controls.policy.acceptance.conditional(slots), alone.conditional(slots))


def test_a_round_has_the_rates_of_its_rows(taught: Any) -> None:
    controls, _, rows = taught
    work = controls.launching(Round(rows, {}, K))
    assert work.drafts == 2
    assert work.rates.dtype == np.float32
    assert np.allclose(work.rates, controls.policy.acceptance.conditional(np.array([2, 0])))
    assert work.rates[0, 0] > work.rates[1, 0] + 0.01


def test_ended_requests_teach_nothing(taught: Any) -> None:
    """Another request has the slot, or the round ended the request."""
    controls, progress, rows = taught
    before = controls.policy.acceptance.conditional(np.array([2, 0]))
    work = controls.launching(Round(rows, {}, K))
    ended = results(1, 1)
    ended[:, 1] = FinishReason.STOP
    every = {"drafted": np.array([K, K]), "found": np.array([K, K])}
    controls.read(work, ended, every)
    progress.begin(2, 9, 10, 1000, None, 1)
    progress.begin(0, 10, 10, 1000, None, 1)
    controls.read(work, results(1, 1), every)
    assert np.array_equal(controls.policy.acceptance.conditional(np.array([2, 0])), before)


@pytest.mark.parametrize(
    ("chosen", "captured", "pinned", "why"),
    [
        (K, CHOICES, None, FewerDrafts.NONE),
        (1, CHOICES, None, FewerDrafts.PROBE),
        (2, CHOICES, 2, FewerDrafts.PINNED),
        (1, (0, 1), None, FewerDrafts.NO_GRAPH),
    ],
    ids=str,
)
def test_reasons_of_rounds(
    chosen: int, captured: tuple[int, ...], pinned: int | None, why: FewerDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's own number is k."""
    controls, _, rows = controller(captured=captured)
    monkeypatch.setattr(DraftController, "_choose", lambda self, rows: chosen)
    controls.pin(pinned)
    work = controls.launching(Round(rows, {}, K))
    assert isinstance(work, Round)
    assert (work.drafts, work.fewer) == (chosen, why)


def test_fewer_drafts_than_k_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    controls, _, rows = controller()
    controls.policy.drafts = 3
    monkeypatch.setattr(DraftController, "_choose", lambda self, rows: 3)
    work = controls.launching(Round(rows, {}, K))
    assert isinstance(work, Round)
    assert work.fewer is FewerDrafts.COST


def test_a_round_that_only_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catch-up pass takes 4 tokens: with 6 pending, this round drafts nothing and the next one as many as chosen."""
    controls, progress, rows = controller(max_unobserved=4)
    progress.unobserved[[2, 0]] = 6, 1
    monkeypatch.setattr(DraftController, "_choose", lambda self, rows: 3)
    first = controls.launching(Round(rows, {}, K))
    assert isinstance(first, Round)
    assert (first.drafts, first.fewer, len(first.catching_up)) == (0, FewerDrafts.CATCH_UP, 2)
    assert progress.unobserved[[2, 0]].tolist() == [3, 1], "6 - 4 and 1 - 1, and this round's token"
    second = controls.launching(Round(rows, {}, K))
    assert isinstance(second, Round)
    assert (second.drafts, progress.unobserved[[2, 0]].tolist()) == (3, [0, 0])
