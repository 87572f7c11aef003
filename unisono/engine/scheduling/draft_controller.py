"""How each round drafts: how many tokens, and whose drafter has to catch up before.

Between the scheduler, which says who runs, and the runner. Owns the bookkeeping of paused drafters (what is *pending*
of each sequence, ``Progress.unobserved``) and feeds :mod:`unisono.engine.scheduling.adaptive` with what rounds brought
and how long they took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from unisono.engine.scheduling.adaptive import Acceptance, AdaptiveK, RoundCosts
from unisono.engine.scheduling.forced_drafts import ForcedDrafts
from unisono.engine.sequence import Extend, Pass, Preparation, Round, Rows, Sequence
from unisono.engine.startup.buckets import CPU_COST
from unisono.engine.worker.progress import NOBODY, Progress
from unisono.types import FinishReason

if TYPE_CHECKING:
    from unisono.engine.worker.runner import Runner

ROUNDS_PER_CHOICE = 16
"""Rounds before rounds with another number of drafts are captured, where graphs are captured lazily."""


class DraftController:
    """Chooses for the rounds of one engine. ``pinned``: a fixed number of drafts; None: adapt.

    ``rounds[k]`` counts rounds with k drafts.
    """

    def __init__(self, runner: Runner, progress: Progress) -> None:
        self._runner, self._progress, choices = runner, progress, runner.choices
        self.pinned: int | None = choices[0] if len(choices) == 1 else None
        self.rounds: Counter[int] = Counter()
        drafter = runner.worker.drafter
        acceptance = Acceptance(runner.worker.slots.padding + 1, drafter.num_drafts)
        self.policy = AdaptiveK(choices, acceptance, RoundCosts(self.padding_ms), down=not runner.max_unobserved)
        # Rounds whose drafts the host reads have no widths between the extremes.
        self._reading_policy = AdaptiveK(sorted({choices[0], choices[-1]}), acceptance, self.policy.costs)
        self._limit = None if getattr(drafter, "unlimited", False) else runner.max_unobserved
        self._owners = np.full_like(progress.owner, NOBODY)  # [slots]: whom ``acceptance`` knows
        self._forced = ForcedDrafts(runner.config, drafter.num_drafts, progress)
        self._launched: Round | None = None  # the round launched last, unless another pass came after it
        self._read_at: float | None = None  # when the pass read last was over
        self._put_off: dict[bool, int] = {}  # by kind of round: drafts that wait for a drafter to catch up
        lazy = runner.config.asked.graph_capture == "lazy"
        self._until_next_choice = ROUNDS_PER_CHOICE if lazy else None

    def padding_ms(self, rows: int, drafts: int) -> float | None:
        """What a round's graph took on padding; None where no graph serves it."""
        return self._runner.planner.pass_ms(self._runner.round_key(rows, drafts))

    def round_ms(self, running: Collection[Sequence]) -> float:
        """What the next round of these requests takes; where both kinds run, a turn of both: one reads, two others."""
        reading = sum(s.reads_drafts for s in running)
        plain = len(running) - reading
        return self._round_ms(reading) + self._round_ms(plain) * (2 if reading else 1)

    def _round_ms(self, rows: int) -> float:
        if not rows:
            return 0.0
        if self._runner.config.device.type == "cpu":
            return CPU_COST.replay(rows)
        drafts = self.policy.drafts if self.pinned is None else self.pinned
        key = self._runner.round_key(rows, drafts)
        return self.policy.costs.ms(rows, drafts) or self._runner.planner.expected_ms(key)

    def pin(self, drafts: int | None) -> None:
        """Draft this number of tokens in every round; None: adapt, where there is a choice."""
        choices = self._runner.choices
        self.pinned = choices[0] if len(choices) == 1 else drafts

    # ---- before a pass ------------------------------------------------------------------------

    def launching(self, work: Pass | None) -> Pass | None:
        """The pass as it is to be launched: a round with its number of drafts."""
        if not isinstance(work, Round):
            self._launched = None
            if isinstance(work, Extend) and work.decodes:
                self._know(work.decodes)
                self._undrafted(work.decodes)
            return work
        self._know(work.rows)
        wanted = self._put_off.get(work.reads_drafts) if self.pinned is None else self.pinned
        drafts = self._choose(work.rows) if wanted is None else wanted
        if drafts and work.reads_drafts:
            drafts = self._runner.choices[-1]  # their passes have no widths between
        work = work if drafts == work.drafts else replace(work, drafts=drafts)
        work = self._with_catch_up(self._forced.added(work) if work.reads_drafts else work)
        self.rounds[work.drafts] += 1
        self._launched = work
        return work

    def drafts_nothing(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next round of these, which the host need not read in between, would draft nothing, and no
        drafter has to catch up before it."""
        drafts = self.policy.drafts if self.pinned is None else self.pinned
        if drafts or self._put_off.get(False):
            return False
        limit = self._limit if self._runner.max_unobserved else None
        return limit is None or all(self._progress.unobserved[s.slot] < limit for s in sequences)

    def _undrafted(self, rows: Rows) -> None:
        """These commit a token without drafts: a drafter that pauses observes it later."""
        if self._runner.max_unobserved:
            self._progress.unobserved[rows.slots] += 1

    def _choose(self, rows: Rows) -> int:
        self._add_choice(len(rows))
        policy = self._reading_policy if rows.sequences[0].reads_drafts else self.policy
        most = self._progress.most_drafts(rows.slots)
        return policy.choose(rows.slots, most, self._catch_up_ms(rows), self._standby_ms(len(rows)))

    def _add_choice(self, rows: int) -> None:
        """Capture rounds with another number of drafts, now and then, if graphs are captured lazily.

        The policy chooses among captured rounds, so a short answer needs one graph, and a long one adapts.
        """
        if self._until_next_choice is None:
            return
        self._until_next_choice -= 1
        if self._until_next_choice > 0:
            return
        self._until_next_choice = ROUNDS_PER_CHOICE
        missing = [k for k in self._runner.choices if self.padding_ms(rows, k) is None]
        if missing and len(missing) < len(self._runner.choices):
            self._runner.planner.capture_for(self._runner.round_key(rows, missing[-1]))

    def _know(self, rows: Rows) -> None:
        new = rows.slots[self._owners[rows.slots] != rows.owners]
        if new.size:
            self._owners[rows.slots] = rows.owners
            self.policy.acceptance.begin(new)

    def _catch_up_ms(self, rows: Rows) -> float:
        """What catching up would take now: whole passes, however little is pending."""
        pending = self._progress.unobserved[rows.slots]
        if not pending.any():
            return 0.0
        runner = self._runner
        passes = -(-int(pending.max()) // runner.max_unobserved)
        return runner.planner.expected_ms(runner.catch_up_key(int(np.count_nonzero(pending)))) * passes

    def _standby_ms(self, rows: int) -> float:
        """What each round without drafts adds to a drafter's catching up, which it has to before it forgets."""
        runner = self._runner
        if not runner.max_unobserved or self._limit is None:
            return 0.0
        return runner.planner.expected_ms(runner.catch_up_key(rows)) / runner.max_unobserved

    def _with_catch_up(self, work: Round) -> Round:
        """Have drafters catch up before a round that drafts, or before they can remember no more.

        One pass of catching up before each round: where more is pending than it takes, the round drafts nothing yet.
        """
        self._put_off.pop(work.reads_drafts, None)
        if not self._runner.max_unobserved:
            return work
        pending, each = self._progress.unobserved[work.rows.slots], self._runner.max_unobserved
        most = int(pending.max())
        full = self._limit is not None and most >= self._limit
        if most and (work.drafts or full):
            work = replace(work, catching_up=work.rows.where(pending > 0))
            self._progress.unobserved[work.rows.slots] = np.maximum(0, pending - each)
            if most > each:
                self._put_off[work.reads_drafts], work = work.drafts, replace(work, drafts=0, forced=None)
        if not work.drafts:
            self._undrafted(work.rows)
        return work

    # ---- after a pass -------------------------------------------------------------------------

    def read(self, work: Extend | Preparation | Round, result: np.ndarray) -> None:
        """A pass was read. result [rows, …] int32: of each row how many tokens it committed, and its status."""
        now, before, after = time.perf_counter(), self._read_at, self._launched
        # Of prompts and rounds whose drafts the host reads the outputs come before the drafter has caught up
        # (Buffers.outputs_ready).
        self._read_at = now if isinstance(work, Round) and not work.reads_drafts else None
        if not isinstance(work, Round):
            self.policy.costs.interrupted()
            return
        if len(self._runner.choices) == 1:
            return
        if after is not None and before is not None:
            self._learn_cost(work, after, 1e3 * (now - before))
        if work.drafts:
            rows, result = work.rows, result[: len(work.rows)]
            asked = np.minimum(work.drafts, self._progress.max_drafts[rows.slots])
            # What ended was cut short, and has a slot that may be another's by now.
            going_on = (result[:, 1] == FinishReason.RUNNING) & self._progress.owned(rows.slots, rows.owners)
            known = (asked > 0) & (result[:, 0] > 0) & going_on
            if work.forced is not None:  # forced drafts tell nothing about the drafter
                known &= work.forced[:, 0] < 0
            if known.any():
                self.policy.acceptance.count(rows.slots[known], asked[known], result[known, 0] - 1)

    def _learn_cost(self, work: Round, after: Round, ms: float) -> None:
        """``work`` was read this long after the pass before it; ``after`` was launched next."""
        if _alike(work, after):
            self.policy.costs.measured(len(work.rows), work.drafts, ms)
            return
        # On a GPU that is the time of this pass; a CPU has run the next one meanwhile.
        timed = after if self._runner.config.device.type == "cpu" else work
        if self.pinned is None and timed.plain and timed.drafts != self.policy.drafts:
            self.policy.costs.probed(len(timed.rows), timed.drafts, ms)


def _alike(one: Round, other: Round) -> bool:
    """Whether two rounds are of the same kind, so that the time between them is that of either."""
    same = one.drafts == other.drafts and len(one.rows) == len(other.rows)
    return same and one.plain and other.plain
