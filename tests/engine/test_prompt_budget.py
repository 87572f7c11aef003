"""Running requests wait for prompts, but not longer than was asked; by a fake device whose passes take what we say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.helpers import engine, mixed_params, prompts, tokens
from unisono.engine.scheduling.prompt_budget import PromptBudget
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.sequence import NO_ROWS, Chunk, Extend, Pass, Round, RoundWidths, Sequence, Verify
from unisono.engine.worker.device_state import DeviceState, StateSizes
from unisono.engine.worker.slots import SlotPool
from unisono.graphs import PendingOutputs
from unisono.graphs.graph_set import Launch
from unisono.kv.pages import PagePool
from unisono.types import ConfigError, EngineRequest, FinishReason, SamplingParams

BOUND, ROUND_MS, MOST = 40.0, 5.0, 8192


def table(tokens: int) -> float:
    return 2.0 + 0.01 * tokens


@dataclass
class Device:
    """Runs one pass after the other and has each read when the next one was launched, as the engine does."""

    extend_ms: Callable[[int], float] = table
    timed: bool = True
    max_stall_ms: float = BOUND
    now: float = 0.0  # milliseconds
    gaps: list[float] = field(default_factory=list)  # from one round to the next, with the same requests running
    sizes: list[int] = field(default_factory=list)  # of prompt passes that requests waited for
    _round_at: float | None = None
    _order: int = 0

    def __post_init__(self) -> None:
        self.slots = SlotPool(8, 64, lambda command: None)
        budget = PromptBudget(self.max_stall_ms, MOST, table)
        pool = PagePool(40_000)
        device = DeviceState(pool, StateSizes(1, MOST, 65536), lambda command: None)
        self.scheduler = Scheduler(pool, self.slots, device, RoundWidths(1, 1), 8, budget)

    def add(self, prompt: int, output: int) -> Sequence:
        self._order += 1
        ids = [self._order] * prompt
        request = EngineRequest(str(self._order), ids, SamplingParams(seed=0, max_tokens=output))
        sequence = Sequence(request, list(ids), prompt + output, self._order)
        self.scheduler.add(sequence)
        return sequence

    def run(self, passes: int = 10_000) -> None:
        """Until nothing is left, or so many passes were launched."""
        before: Pass | None = None
        while (self.scheduler.has_work or before is not None) and passes:
            passes -= 1
            waiting = bool(self.scheduler.running)
            work = self.scheduler.schedule()
            if isinstance(work, Extend) and waiting:
                self.sizes.append(work.tokens)
            if before is not None:
                self.read(before)
            before = work
        if before is not None:
            self.read(before)

    def read(self, work: Pass) -> None:
        assert not isinstance(work, Verify)
        took = self.extend_ms(work.tokens) if isinstance(work, Extend) else ROUND_MS
        self.now += took
        self.scheduler.budget.read(work, lambda: took if self.timed else None)
        if isinstance(work, Round):
            if self._round_at is not None:
                self.gaps.append(self.now - self._round_at)
            self._round_at = self.now
        rows = work.committing
        every = np.ones(len(rows), dtype=bool)
        for row in self.scheduler.committed(rows, every.astype(np.int64), every):
            sequence = rows.sequences[row]
            sequence.tokens.append(0)
            if len(sequence.tokens) == sequence.max_length:
                self.scheduler.retire(sequence, FinishReason.LENGTH)
        if not self.scheduler.running:
            self._round_at = None


def test_the_bound_holds_and_passes_are_as_large_as_it_allows() -> None:
    device = Device()
    streams = [device.add(10, 400) for _ in range(3)]
    device.run(20)
    long = [device.add(8000, 3) for _ in range(5)]
    device.run()
    assert max(device.gaps) <= BOUND + ROUND_MS + 1e-6
    largest = max(n for n in range(16, MOST, 16) if table(n) <= BOUND)
    assert max(device.sizes) == largest
    assert device.sizes.count(largest) >= len(device.sizes) - len(long), "all but ends of prompts"
    assert all(s.finish is FinishReason.LENGTH for s in (*streams, *long))


def test_without_running_requests_passes_are_unbounded() -> None:
    device = Device()
    for _ in range(4):
        device.add(8000, 1)
    device.run()
    assert device.sizes == []
    assert device.now < table(32_000) + 4 * table(0) + 1


@pytest.mark.parametrize("bound", [1.0, 2.1])
def test_prompts_progress_under_any_stall_bound(bound: float) -> None:
    """The least pass runs between two rounds, and no other."""
    device = Device(max_stall_ms=bound)
    stream = device.add(10, 300)
    device.run(10)
    prompt = device.add(320, 2)
    device.run()
    assert device.sizes == [16] * 20
    assert max(device.gaps) <= ROUND_MS + table(16) + 1e-6
    assert stream.finish is prompt.finish is FinishReason.LENGTH


@pytest.mark.parametrize("timed", [True, False])
def test_cost_table_is_corrected_by_measured_passes(timed: bool) -> None:
    """Long contexts take half as long again; after a few passes the bound holds."""
    device = Device(extend_ms=lambda n: 1.5 * table(n), timed=timed)
    device.add(10, 3000)
    device.run(10)
    device.add(60_000, 2)
    device.run()
    late = [gap for gap in device.gaps if gap > ROUND_MS + 0.1][8:-1]
    assert len(late) > 5
    assert (max(late) <= 1.01 * BOUND + ROUND_MS) is timed


def test_prompts_without_running_requests_also_correct_the_table() -> None:
    """The first prompt that comes to running requests finds the right sizes."""
    device = Device(extend_ms=lambda n: 1.5 * table(n))
    for _ in range(6):
        device.add(16_000, 1)
    device.run()
    device.add(10, 3000)
    device.run(10)
    device.add(30_000, 2)
    device.run()
    assert len(device.sizes) > 8
    assert max(device.gaps) <= 1.05 * BOUND + ROUND_MS


def test_long_prefill_pass_is_not_followed_by_a_short_filler() -> None:
    """Passes come in the sizes of graphs; a short one takes more time a token, and the next long one has to wait."""

    def stairs(tokens: int) -> float:
        return 6.0 if tokens <= 256 else 34.0 if tokens <= 1408 else 60.0

    device = Device(extend_ms=stairs)
    device.scheduler.budget._table = stairs
    device.add(10, 400)
    device.run(10)
    for _ in range(3):
        device.add(7040, 2)
    device.run()
    assert device.sizes == [1408] * 15
    assert max(device.gaps) <= 34.0 + ROUND_MS + 1e-6


REQUEST = EngineRequest("r", [0], SamplingParams(seed=0))


def size_after(tokens: int, share: float) -> float:
    """Of the largest pass, what is left after a full pass of ``tokens`` took ``share`` times what was expected."""
    budget = PromptBudget(BOUND, MOST, table)
    running: Any = [object()]
    before = budget.tokens(running, [])
    work = Extend([Chunk(running[0], 0, tokens, last=False)])
    budget.extended(work)
    budget.read(work, lambda: share * table(tokens))
    budget.round_launched()
    return budget.tokens(running, []) / before


def test_pass_in_flight_is_measured_after_completion() -> None:
    """Its outputs are read before its drafter has caught up; what it took is known with a later pass."""
    budget, took = PromptBudget(BOUND, MOST, table), list[float]()
    running: Any = [object()]
    before = budget.tokens(running, [])
    work = Extend([Chunk(running[0], 0, before, last=False)])
    budget.extended(work)
    budget.read(work, lambda: took[0] if took else None)
    budget.round_launched()
    assert budget.tokens(running, []) == before
    took.append(1.6 * table(before))
    budget.read(Round(NO_ROWS, {}, 0), lambda: None)
    assert budget.tokens(running, []) < 0.85 * before


def test_short_passes_correct_the_table_weakly() -> None:
    assert size_after(3600, 1.6) < 0.85, "a long one teaches"
    assert size_after(100, 1.6) > 0.95


def test_outlier_measurements_are_clamped() -> None:
    """Where the host was late in launching its kernels, a pass has taken many times as long."""
    assert 0.6 < size_after(3600, 10.0) < 0.75
    assert size_after(3600, 0.01) < 1.5


def test_each_prompt_of_a_pass_counts_with_its_own_context() -> None:
    """The end of a long prompt and the begin of the next one: most of these tokens see few keys."""
    budget = PromptBudget(BOUND, MOST, table, attention=1e-4)
    running: Any = [object()]
    ending, late, new = (Sequence(REQUEST, [0] * n, n + 1, 0) for n in (8000, 20_000, 8000))
    ending.extended, late.extended = 7900, 7900
    assert budget.tokens(running, [new]) == 3232
    assert budget.tokens(running, [ending, new]) == 3200
    assert budget.tokens(running, [late]) == 1920


def test_rows_of_the_graph_that_a_pass_replays_are_no_surprise() -> None:
    """A pass of 1,000 tokens takes what the graph's 2,000 rows take: nothing is learnt, and it counts in full."""
    budget = PromptBudget(BOUND, MOST, table, launched_ms=lambda work: table(2 * work.tokens))
    running: Any = [object()]
    before = budget.tokens(running, [])
    work = Extend([Chunk(running[0], 0, 1000, last=False)])
    budget.extended(work)
    assert budget.tokens(running, []) == (BOUND - table(2000) - 2) / 0.01 // 16 * 16
    budget.read(work, lambda: table(2000))
    budget.round_launched()
    assert budget.tokens(running, []) == before


def test_a_pass_that_is_a_round_too_may_take_as_much_longer() -> None:
    budget = PromptBudget(BOUND, MOST, table)
    running: Any = [object()]
    assert budget.tokens(running, [], round_ms=ROUND_MS) == (BOUND + ROUND_MS - 2) / 0.01 // 16 * 16
    assert budget.tokens([], [], round_ms=ROUND_MS) == MOST


def test_budget_without_a_cost_table() -> None:
    """Without graphs nothing is measured at start: a guess is corrected until the bound holds."""
    device = Device(extend_ms=lambda n: 0.02 * n)
    device.scheduler.budget._table = lambda n: 0.0
    device.add(10, 3000)
    device.run(10)
    device.add(60_000, 2)
    device.run()
    late = [gap for gap in device.gaps if gap > ROUND_MS + 0.1][8:-1]
    assert BOUND * 0.9 < max(late) - ROUND_MS <= 1.01 * BOUND


def test_full_prompt_passes_are_timed_on_the_device(qwen3: Path) -> None:
    """The budget learns from these alone, and events are the host's time before a first token."""
    timed: set[tuple[str, bool, bool]] = set()
    with engine(qwen3, max_num_batched_tokens=16, max_stall_ms=1e6) as llm:
        execute = llm.engine.worker.execute

        def spy(command: Any) -> Any:
            if isinstance(command, Launch):
                timed.add((command.key.program, command.key.shape.rows == 16, command.timed))
            return execute(command)

        llm.engine.worker.execute = spy  # type: ignore[method-assign]
        tokens(llm, BATCH[:3], PARAMS[:3])
    assert timed == {("extend", True, True), ("extend", False, False), ("round", False, False)}


class Event:
    """A device's event. at: in milliseconds; None: not reached."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: Any) -> float:
        return end.at - self.at


@pytest.mark.parametrize(("span", "ms"), [(None, None), ((2.0, None), None), ((2.0, 9.5), 7.5)], ids=str)
def test_device_time_of_a_pass(span: Any, ms: float | None) -> None:
    events = None if span is None else tuple(map(Event, span))
    assert PendingOutputs((), None, None, events).device_ms() == ms  # type: ignore[arg-type]


@functools.cache
def plain(path: Path) -> list[list[int]]:
    with engine(path, max_num_seqs=1) as llm:
        return tokens(llm, BATCH, PARAMS)


BATCH, PARAMS = prompts(10, 250, low=3, high=120, seed=4), mixed_params(10)


@pytest.mark.parametrize("bound", [1.0, 25.0, 1e9])
def test_same_bytes(bound: float, qwen3: Path) -> None:
    with engine(qwen3, max_num_seqs=3, max_stall_ms=bound) as llm:
        assert tokens(llm, BATCH, PARAMS) == plain(qwen3)
        assert llm.engine.info()["settings"]["max_stall_ms"] == bound  # type: ignore[index]


def test_a_bound_is_a_time() -> None:
    with pytest.raises(ConfigError, match="--max-stall-ms 0"):
        engine("tiny", max_stall_ms=0)
