"""How many prompt tokens the next prompt pass takes, so that running requests do not wait too long for their next
round.

Costs of passes come from the planner's table, which is measured on padding, where attention sees nothing. So attention
is added in proportion to the context, and the sum is corrected by what passes take at run time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Requests

from unisono.engine.adaptive import MOST_CORRECTION
from unisono.engine.buckets import LEAST_TOKENS
from unisono.engine.sequence import Extend, Preparation, Round, Sequence
from unisono.passes.features.base import Room
from unisono.program import Key

GUESSED_MS = 0.005
"""Milliseconds of a prompt token where the table says nothing, for nothing is captured; corrected like the table."""

LEAST_MS = 0.01
"""Milliseconds that a pass ahead of prompts counts at least: a round follows it where there is no time for more."""

BELIEF = 0.5
"""How far what a single pass took corrects what is expected of the next ones."""


class PromptBudget:
    """Bounds the time from the end of a round to the start of the next: that of all prompt passes between them.

    max_stall_ms: the bound. most: tokens of a pass at most. extend_ms: the time of a pass with this number of tokens,
    by the table. round_ms: what the next round of these running requests takes; of both kinds where both run
    (``scheduler.py``). attention: by what share of the table's time each token of context makes a pass longer.
    learns: whether passes are timed. clock: in seconds.

    Where nothing runs, passes are as large as they can be. A pass of LEAST_TOKENS may always run between two rounds.
    """

    def __init__(
        self,
        max_stall_ms: float,
        most: int,
        extend_ms: Callable[[int], float],
        round_ms: Callable[[Requests[Sequence]], float],
        learns: bool = True,
        attention: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_stall_ms, self.most, self._round_ms = max_stall_ms, most, round_ms
        self._learns, self._clock = learns, clock
        self._table, self._attention = extend_ms, attention
        self._correction = 1.0  # what passes take over what is expected of them, a moving average
        self._spent = 0.0  # milliseconds of prompt passes since the last round
        self._read_at: float | None = None  # when the last round was read
        self._between: list[Extend | Preparation] = []  # passes for prompts that were read since

    def tokens(self, running: Requests[Sequence], start: int) -> int:
        """Tokens of a prompt pass that may be launched now; 0 where a round comes first. start: of its first prompt."""
        if not running:
            self._spent, self._read_at = 0.0, None
            return self.most
        left = self._max_stall_ms - self._spent
        sizes = range(LEAST_TOKENS, self.most + 1, LEAST_TOKENS)
        fitting = bisect_right(sizes, left, key=lambda size: self._ms(size, start + size / 2))
        if fitting == len(sizes):
            return self.most
        return sizes[fitting - 1] if fitting else 0 if self._spent else min(LEAST_TOKENS, self.most)

    def room(self, running: Requests[Sequence], ms: Callable[[Key], float]) -> Room:
        """The time that passes ahead of prompts may take now; see :meth:`tokens`. ms: what such a pass takes."""
        if not running:
            return Room(ms, math.inf, True)
        return Room(ms, self._max_stall_ms - self._spent, not self._spent)

    def prepared(self, ms: float) -> None:
        """A pass ahead of prompts is launched, which takes this long."""
        self._spent += max(ms, LEAST_MS)

    def extended(self, work: Extend) -> None:
        """A prompt pass is launched while requests are running."""
        self._spent += self._ms(work.tokens, _context(work))

    def round_launched(self) -> None:
        """A round is launched: the next prompt pass has all the time again."""
        self._spent = 0.0

    def read(self, work: Extend | Preparation | Round) -> None:
        """A pass was read. What one prompt pass between two rounds has added to the time between them is its cost."""
        if not self._learns:
            return
        if not isinstance(work, Round):
            self._between.append(work)
            return
        now, before, between = self._clock(), self._read_at, self._between
        self._read_at, self._between = (None if work.reads_drafts else now), []
        # Shorter ones are the ends of prompts: few, and of other sizes.
        alone = between[0] if len(between) == 1 else None
        if before is not None and isinstance(alone, Extend) and alone.full:
            added = 1e3 * (now - before) - self._round_ms(work.sequences)
            known = self._correction * added / self._ms(alone.tokens, _context(alone))
            correction = self._correction + BELIEF * (known - self._correction)
            self._correction = min(max(correction, 1 / MOST_CORRECTION), MOST_CORRECTION)

    def _ms(self, tokens: int, context: float) -> float:
        """What a pass takes whose tokens see ``context`` keys on average."""
        table = self._table(tokens) or GUESSED_MS * tokens
        return table * (1 + self._attention * context) * self._correction


def _context(work: Extend) -> float:
    """Keys that a token of the pass sees, on average."""
    return sum((c.end - c.start) * (c.start + c.end) / 2 for c in work.chunks) / max(1, work.tokens)
