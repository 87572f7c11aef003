"""Token budget of the next prompt pass: bounds the time that running requests wait for their next round.

Pass times come from the planner's table, measured on padding, where attention reads no keys. The budget adds attention
in proportion to the context and corrects the sum by measured run times.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Requests

from unisono.engine.scheduling.adaptive import MOST_CORRECTION
from unisono.engine.sequence import Extend, FeaturePass, Round, Sequence
from unisono.engine.startup.capture_candidates import LEAST_TOKENS
from unisono.graphs import GraphKey
from unisono.passes.features.base import Room

GUESSED_MS = 0.005
"""Milliseconds per prompt token where the table has no entry because nothing is captured; corrected like the table."""

LEAST_MS = 0.01
"""Least milliseconds charged for a pre-pass. A round follows where there is no time for more."""

BELIEF = 0.5
"""Weight of one measured pass in the correction; less for a short pass."""

OUTLIER = 2.0
"""Largest correction by one pass. Beyond it the host was late, and the time belongs to another pass."""

MOST_READ = 4
"""Passes that were read and whose device times are awaited; times of untimed passes never arrive."""

Took = Callable[[], float | None]
"""Milliseconds that a pass took on the device; None until known."""


WORTH = 0.5
"""Least size of a further pass, as a fraction of the longest pass since the last round."""


class PromptBudget:
    """Bound the time of all prompt passes between the end of a round and the start of the next.

    max_stall_ms: the bound. most: largest pass in tokens. extend_ms: table time of a pass with this number of tokens.
    attention: relative increase of a pass's time per token of context. launched_ms: table time of the pass as launched,
    which may replay a graph of more rows; by default extend_ms.

    Without running requests, passes are as large as they can be. A pass of LEAST_TOKENS may always run between two
    rounds.
    """

    def __init__(
        self,
        max_stall_ms: float,
        most: int,
        extend_ms: Callable[[int], float],
        attention: float = 0.0,
        launched_ms: Callable[[Extend], float] | None = None,
    ) -> None:
        self._max_stall_ms, self.most = max_stall_ms, most
        self._table, self._attention = extend_ms, attention
        self._launched = launched_ms or (lambda work: self._table(work.tokens))
        self._correction = 1.0  # moving average of measured time over expected time
        self._prepared = 0.0  # milliseconds of pre-passes since the last round
        self._extended: list[Extend] = []  # prompt passes since then
        # uncorrected expected times of full passes that may be in flight
        self._read: deque[tuple[float, Took]] = deque(maxlen=MOST_READ)

    def tokens(self, running: Collection[Sequence], prompts: Requests[Sequence], round_ms: float = 0.0) -> int:
        """Return the tokens of a pass of these prompts that may be launched now; 0 if a round comes first.

        round_ms: time of the round that a mixed pass contains; the bound does not count it.
        """
        if not running:
            self.round_launched()
            return self.most
        spent = self._spent
        left = self._max_stall_ms - spent + round_ms
        sizes = range(LEAST_TOKENS, self.most + 1, LEAST_TOKENS)
        fitting = bisect_right(sizes, left, key=lambda size: self._ms(size, _context_ahead(prompts, size)))
        if fitting == len(sizes):
            return self.most
        if not fitting:
            return 0 if spent else min(LEAST_TOKENS, self.most)
        # The rest after a long pass would be a small pass: the next one, after the round, has more tokens for its time.
        longest = max((work.tokens for work in self._extended), default=0)
        return sizes[fitting - 1] if sizes[fitting - 1] >= WORTH * longest else 0

    def room(self, running: Collection[Sequence], ms: Callable[[GraphKey], float]) -> Room:
        """Return the time that pre-passes may take now; see :meth:`tokens`. ms: the time of such a pass."""
        if not running:
            return Room(ms, math.inf, True)
        spent = self._spent
        return Room(ms, self._max_stall_ms - spent, not spent)

    def prepared(self, ms: float) -> None:
        """Count a pre-pass of this time."""
        self._prepared += max(ms, LEAST_MS)

    def extended(self, work: Extend) -> None:
        """Count a launched prompt pass."""
        self._extended.append(work)

    def round_launched(self) -> None:
        """Start a new interval: a round was launched, and the next prompt pass has all the time again."""
        self._prepared = 0.0
        self._extended.clear()

    @property
    def _spent(self) -> float:
        """Milliseconds of the passes since the last round. Computed on demand, which is rare."""
        return self._prepared + self._correction * sum(map(self._expected, self._extended))

    def read(self, work: Extend | FeaturePass | Round, took: Took) -> None:
        """Queue a pass whose outputs were read, to learn from its time once that is known.

        Shorter passes teach nothing: they are ends of prompts, few and of other sizes.
        """
        if isinstance(work, Extend) and work.full:
            self._read.append((self._expected(work), took))
        while self._read and (ms := self._read[0][1]()) is not None:
            self._learn(self._read.popleft()[0], ms)

    def _learn(self, expected: float, ms: float) -> None:
        """Update the correction. expected: uncorrected milliseconds. ms: measured ones."""
        expected *= self._correction
        belief = BELIEF * min(1.0, expected / self._max_stall_ms)  # the host's share is larger in short passes
        share = min(max(ms / expected, 1 / OUTLIER), OUTLIER)
        correction = self._correction * (1 + belief * (share - 1))
        self._correction = min(max(correction, 1 / MOST_CORRECTION), MOST_CORRECTION)

    def _ms(self, tokens: int, context: float) -> float:
        """Expected milliseconds of a pass whose tokens attend to ``context`` keys on average."""
        return self._correction * self._with_attention(self._table(tokens), tokens, context)

    def _expected(self, work: Extend) -> float:
        """Expected milliseconds of a launched pass, without the correction."""
        return self._with_attention(self._launched(work), work.tokens, _context(work))

    def _with_attention(self, table_ms: float, tokens: int, context: float) -> float:
        return (table_ms or GUESSED_MS * tokens) * (1 + self._attention * context)


def _context(work: Extend) -> float:
    """Mean number of keys per token of the pass."""
    return sum((c.end - c.start) * (c.start + c.end) / 2 for c in work.chunks) / max(1, work.tokens)


def _context_ahead(prompts: Requests[Sequence], tokens: int) -> float:
    """Mean number of keys per token for the next ``tokens`` tokens of these prompts."""
    left, seen = tokens, 0.0
    for prompt in prompts:
        start = prompt.extended
        taken = min(left, len(prompt.tokens) - start)
        seen += taken * (start + taken / 2)
        left -= taken
        if not left:
            break
    return seen / max(1, tokens)
