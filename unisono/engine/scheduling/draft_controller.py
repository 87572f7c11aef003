"""Draft controller: chooses the number of drafts of each round and schedules catch-up passes of paused drafters.

The scheduler asks it for the drafts of each round that it has composed. One number serves all rows of a round; a row
has fewer if its ``max_drafts`` or its remaining length is smaller (``Progress.most_drafts``, ``limit_drafts``), or if
requests share drafts (``share_drafts``). Owns the bookkeeping of paused drafters
(*pending* tokens of each sequence, ``Progress.unobserved``) and feeds :mod:`unisono.engine.scheduling.adaptive` with
the results and times of rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from unisono.engine.scheduling.adaptive import AcceptanceEstimate, AdaptiveK, RoundCosts
from unisono.engine.scheduling.forced_drafts import ForcedDrafts
from unisono.engine.sequence import Extend, FeaturePass, Pass, Round, Rows, Sequence
from unisono.engine.startup.capture_candidates import CPU_COST
from unisono.engine.worker.progress import NOBODY, Progress
from unisono.types import FinishReason
from unisono.types.acceptance import FewerDrafts

if TYPE_CHECKING:
    from unisono.engine.worker.runner import Runner

ROUNDS_PER_CHOICE = 16
"""Rounds before rounds with another number of drafts are captured, if graphs are captured lazily."""


class DraftController:
    """Choose drafts for the rounds of one engine. ``pinned``: a fixed number of drafts; None: adapt.

    The numbers to choose from are ``runner.choices`` (``startup.capture_candidates.draft_choices``).

    ``rounds[k]`` counts rounds with k drafts.
    """

    def __init__(self, runner: Runner, progress: Progress) -> None:
        self._runner, self._progress, choices = runner, progress, runner.choices
        self.pinned: int | None = choices[0] if len(choices) == 1 else None
        self.rounds: Counter[int] = Counter()
        drafter = runner.worker.drafter
        slots = runner.worker.slots.padding + 1
        acceptance = AcceptanceEstimate(slots, drafter.num_drafts, differ=bool(runner.shared))
        self.policy = AdaptiveK(choices, acceptance, RoundCosts(self.padding_ms), down=not runner.max_unobserved)
        # Rounds whose drafts the host reads exist with 0 and k drafts only.
        self._reading_policy = AdaptiveK(sorted({choices[0], choices[-1]}), acceptance, self.policy.costs)
        self._limit = None if getattr(drafter, "unlimited", False) else runner.max_unobserved
        self._owners = np.full_like(progress.owner, NOBODY)  # [slots]: the requests that ``acceptance`` knows
        self._forced = ForcedDrafts(runner.config, drafter.num_drafts, progress)
        self._launched: Round | None = None  # the round launched last, unless another pass followed
        self._read_at: float | None = None  # end of the pass read last
        self._postponed: dict[bool, int] = {}  # by kind of round: drafts that wait for a catch-up pass
        lazy = runner.config.requested.graph_capture == "lazy"
        self._until_next_choice = ROUNDS_PER_CHOICE if lazy else None

    def padding_ms(self, rows: int, drafts: int) -> float | None:
        """Time of a round's graph on padding, in milliseconds; None if no graph serves it."""
        return self._runner.planner.pass_ms(self._runner.round_key(rows, drafts))

    def round_ms(self, running: Collection[Sequence]) -> float:
        """Expected milliseconds of the next round of these requests. If both kinds run: the sum of one round of
        each.
        """
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
        """Fix the number of drafts of every round; None: adapt, if there is a choice."""
        choices = self._runner.choices
        self.pinned = choices[0] if len(choices) == 1 else drafts

    # ---- before a pass ------------------------------------------------------------------------

    def launching(self, work: Pass | None) -> Pass | None:
        """Return the pass to launch: a round gets its number of drafts."""
        if not isinstance(work, Round):
            self._launched = None
            if isinstance(work, Extend) and work.decodes:
                self._track(work.decodes)
                self._note_undrafted(work.decodes)
            return work
        self._track(work.rows)
        fixed = self._postponed.get(work.reads_drafts) if self.pinned is None else self.pinned
        drafts = self._choose(work.rows) if fixed is None else fixed
        if drafts and work.reads_drafts:
            drafts = self._runner.choices[-1]  # rounds that the host reads have no widths in between
        if drafts != work.drafts or drafts < self._runner.choices[-1]:
            work = replace(work, drafts=drafts, fewer=self._why_fewer(work, drafts, fixed))
        work = self._shared(self._with_catch_up(self._forced.added(work) if work.reads_drafts else work))
        self.rounds[work.drafts] += 1
        self._launched = work
        return work

    def _why_fewer(self, work: Round, drafts: int, fixed: int | None) -> FewerDrafts:
        """The reason why a round has this number of drafts; NONE for k. fixed: the number of a postponed round."""
        most = self._runner.choices[-1]
        if drafts >= most:
            return FewerDrafts.NONE
        if self.pinned is not None:
            return FewerDrafts.PINNED
        policy = self._reading_policy if work.reads_drafts else self.policy
        if self.padding_ms(len(work.rows), most) is None:
            return FewerDrafts.NO_GRAPH
        probes = fixed is None and drafts != policy.drafts
        return FewerDrafts.PROBE if probes else FewerDrafts.COST

    def _shared(self, work: Round) -> Round:
        """Return the round with the rates by which its requests share drafts, if they do."""
        if work.reads_drafts or work.drafts not in self._runner.shared:
            return work
        return replace(work, rates=self.policy.acceptance.conditional(work.rows.slots).astype(np.float32))

    def drafts_nothing(self, sequences: Iterable[Sequence]) -> bool:
        """True if the next round of these requests would draft nothing and needs no catch-up pass.

        The host does not read drafts of these requests.
        """
        drafts = self.policy.drafts if self.pinned is None else self.pinned
        if drafts or self._postponed.get(False):
            return False
        limit = self._limit if self._runner.max_unobserved else None
        return limit is None or all(self._progress.unobserved[s.slot] < limit for s in sequences)

    def _note_undrafted(self, rows: Rows) -> None:
        """Note rows that commit a token without drafts; a paused drafter observes it later."""
        if self._runner.max_unobserved:
            self._progress.unobserved[rows.slots] += 1

    def _choose(self, rows: Rows) -> int:
        self._add_choice(len(rows))
        policy = self._reading_policy if rows.sequences[0].reads_drafts else self.policy
        most = self._progress.most_drafts(rows.slots)
        shared = {k: self._runner.shared_drafts(len(rows), k) for k in self._runner.shared}
        return policy.choose(rows.slots, most, self._catch_up_ms(rows), self._standby_ms(len(rows)), shared)

    def _add_choice(self, rows: int) -> None:
        """Capture rounds with another number of drafts from time to time, if graphs are captured lazily.

        The policy chooses among captured rounds: a short answer needs one graph, and a long one adapts.
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

    def _track(self, rows: Rows) -> None:
        new = rows.slots[self._owners[rows.slots] != rows.owners]
        if new.size:
            self._owners[rows.slots] = rows.owners
            self.policy.acceptance.begin(new)

    def _catch_up_ms(self, rows: Rows) -> float:
        """Milliseconds of catching up now: whole passes, even if little is pending."""
        pending = self._progress.unobserved[rows.slots]
        if not pending.any():
            return 0.0
        runner = self._runner
        passes = -(-int(pending.max()) // runner.max_unobserved)
        return runner.planner.expected_ms(runner.catch_up_key(int(np.count_nonzero(pending)))) * passes

    def _standby_ms(self, rows: int) -> float:
        """Milliseconds that each round without drafts adds to the later catch-up of a drafter that remembers a limited
        number of tokens.
        """
        runner = self._runner
        if not runner.max_unobserved or self._limit is None:
            return 0.0
        return runner.planner.expected_ms(runner.catch_up_key(rows)) / runner.max_unobserved

    def _with_catch_up(self, work: Round) -> Round:
        """Schedule a catch-up pass before a round that drafts, or before the drafter's memory is full.

        One catch-up pass per round: if more tokens are pending than it takes, this round drafts nothing.
        """
        self._postponed.pop(work.reads_drafts, None)
        if not self._runner.max_unobserved:
            return work
        pending, each = self._progress.unobserved[work.rows.slots], self._runner.max_unobserved
        most = int(pending.max())
        full = self._limit is not None and most >= self._limit
        if most and (work.drafts or full):
            work = replace(work, catching_up=work.rows.where(pending > 0))
            self._progress.unobserved[work.rows.slots] = np.maximum(0, pending - each)
            if most > each:
                self._postponed[work.reads_drafts] = work.drafts
                work = replace(work, drafts=0, forced=None, fewer=FewerDrafts.CATCH_UP)
        if not work.drafts:
            self._note_undrafted(work.rows)
        return work

    # ---- after a pass -------------------------------------------------------------------------

    def read(self, work: Extend | FeaturePass | Round, result: np.ndarray, outputs: Mapping[str, np.ndarray]) -> None:
        """Learn from a pass that was read. result [rows, …] int32: committed tokens and status of each row. outputs: as
        ``Launched.wait`` returns them.
        """
        now, before, after = time.perf_counter(), self._read_at, self._launched
        # Outputs of prompts, and of rounds whose drafts the host reads, arrive before the drafter has caught up
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
            requested = np.minimum(work.most, self._progress.max_drafts[rows.slots])
            if work.rates is not None:  # drafts that were not verified for lack of room are unknown
                verified, found = (outputs[name][: len(rows)] for name in ("drafted", "found"))
                requested = np.where(verified < found, verified, requested)
            # Skip ended requests: their last round was truncated, and another request may have their slots.
            going_on = (result[:, 1] == FinishReason.RUNNING) & self._progress.owned(rows.slots, rows.owners)
            known = (requested > 0) & (result[:, 0] > 0) & going_on
            if work.rates is not None:
                self.policy.acceptance.forget(rows.slots[going_on], requested[going_on])
            if work.forced is not None:  # forced drafts say nothing about the drafter
                known &= work.forced[:, 0] < 0
            if known.any():
                self.policy.acceptance.count(rows.slots[known], requested[known], result[known, 0] - 1)

    def _learn_cost(self, work: Round, after: Round, ms: float) -> None:
        """Learn the cost of ``work``, read ``ms`` after the pass before it. ``after``: the round launched next."""
        if _alike(work, after):
            self.policy.costs.measured(len(work.rows), work.drafts, ms)
            return
        # On a GPU that is the time of this pass. On a CPU it is the time of the next one, which ran meanwhile.
        timed = after if self._runner.config.device.type == "cpu" else work
        if self.pinned is None and timed.plain and timed.drafts != self.policy.drafts:
            self.policy.costs.probed(len(timed.rows), timed.drafts, ms)


def _alike(one: Round, other: Round) -> bool:
    """True if two rounds are of the same kind, so that the time between them is the time of either."""
    same = one.drafts == other.drafts and len(one.rows) == len(other.rows)
    return same and one.plain and other.plain
