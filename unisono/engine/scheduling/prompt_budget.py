"""How many prompt tokens the next prompt pass takes, so that running requests do not wait too long for their next
round.

Costs of passes come from the planner's table, which is measured on padding, where attention sees nothing. So attention
is added in proportion to the context, and the sum is corrected by what passes take at run time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Requests

from unisono.engine.scheduling.adaptive import MOST_CORRECTION
from unisono.engine.sequence import Extend, Preparation, Round, Sequence
from unisono.engine.startup.buckets import LEAST_TOKENS
from unisono.graphs import Key
from unisono.passes.features.base import Room

GUESSED_MS = 0.005
"""Milliseconds of a prompt token where the table says nothing, for nothing is captured; corrected like the table."""

LEAST_MS = 0.01
"""Milliseconds that a pass ahead of prompts counts at least: a round follows it where there is no time for more."""

BELIEF = 0.5
"""How far what a single pass took corrects what is expected of the next ones; less where it is short."""

OUTLIER = 2.0
"""A pass corrects by this factor at most: where the host was late, its time was put down to another pass."""

MOST_READ = 4
"""Passes whose outputs were read and whose times are waited for; where passes are not timed none ever comes."""

Took = Callable[[], float | None]
"""Milliseconds that a pass took on the device; None as long as they are not known."""


WORTH = 0.5
"""Share of the tokens of the longest pass since the last round that a further one has at least."""


class PromptBudget:
    """Bounds the time from the end of a round to the start of the next: that of all prompt passes between them.

    max_stall_ms: the bound. most: tokens of a pass at most. extend_ms: the time of a pass with this number of tokens,
    by the table. attention: by what share of the table's time each token of context makes a pass longer. launched_ms:
    the table's time of a pass that is launched, which may replay a graph of more rows; by default that of its tokens.

    Where nothing runs, passes are as large as they can be. A pass of LEAST_TOKENS may always run between two rounds.
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
        self._correction = 1.0  # what passes take over what is expected of them, a moving average
        self._prepared = 0.0  # milliseconds of passes ahead of prompts since the last round
        self._extended: list[Extend] = []  # prompt passes since then
        # of full passes that may be under way still, what was expected without the correction
        self._read: deque[tuple[float, Took]] = deque(maxlen=MOST_READ)

    def tokens(self, running: Collection[Sequence], prompts: Requests[Sequence], round_ms: float = 0.0) -> int:
        """Tokens of a pass of these prompts that may be launched now; 0 where a round comes first.

        round_ms: what the round takes that the pass is at once; the bound does not count it.
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
        # What is left after a long pass would have few tokens for its time: the next one, after the round, has more.
        longest = max((work.tokens for work in self._extended), default=0)
        return sizes[fitting - 1] if sizes[fitting - 1] >= WORTH * longest else 0

    def room(self, running: Collection[Sequence], ms: Callable[[Key], float]) -> Room:
        """The time that passes ahead of prompts may take now; see :meth:`tokens`. ms: what such a pass takes."""
        if not running:
            return Room(ms, math.inf, True)
        spent = self._spent
        return Room(ms, self._max_stall_ms - spent, not spent)

    def prepared(self, ms: float) -> None:
        """A pass ahead of prompts is launched, which takes this long."""
        self._prepared += max(ms, LEAST_MS)

    def extended(self, work: Extend) -> None:
        """A prompt pass is launched."""
        self._extended.append(work)

    def round_launched(self) -> None:
        """A round is launched: the next prompt pass has all the time again."""
        self._prepared = 0.0
        self._extended.clear()

    @property
    def _spent(self) -> float:
        """Milliseconds of the passes since the last round; computed when asked for, which is rare."""
        return self._prepared + self._correction * sum(map(self._expected, self._extended))

    def read(self, work: Extend | Preparation | Round, took: Took) -> None:
        """The outputs of a pass were read: learn what prompt passes cost, once they are through.

        Shorter ones are the ends of prompts: few, and of other sizes. Nothing is learnt from these.
        """
        if isinstance(work, Extend) and work.full:
            self._read.append((self._expected(work), took))
        while self._read and (ms := self._read[0][1]()) is not None:
            self._learn(self._read.popleft()[0], ms)

    def _learn(self, expected: float, ms: float) -> None:
        """A pass took this long. expected: without the correction."""
        expected *= self._correction
        belief = BELIEF * min(1.0, expected / self._max_stall_ms)  # the host's share of short ones is larger
        share = min(max(ms / expected, 1 / OUTLIER), OUTLIER)
        correction = self._correction * (1 + belief * (share - 1))
        self._correction = min(max(correction, 1 / MOST_CORRECTION), MOST_CORRECTION)

    def _ms(self, tokens: int, context: float) -> float:
        """What a pass takes whose tokens see ``context`` keys on average."""
        return self._correction * self._with_attention(self._table(tokens), tokens, context)

    def _expected(self, work: Extend) -> float:
        """What a pass takes that is launched, without the correction."""
        return self._with_attention(self._launched(work), work.tokens, _context(work))

    def _with_attention(self, table_ms: float, tokens: int, context: float) -> float:
        return (table_ms or GUESSED_MS * tokens) * (1 + self._attention * context)


def _context(work: Extend) -> float:
    """Keys that a token of the pass sees, on average."""
    return sum((c.end - c.start) * (c.start + c.end) / 2 for c in work.chunks) / max(1, work.tokens)


def _context_ahead(prompts: Requests[Sequence], tokens: int) -> float:
    """Keys that each of the next ``tokens`` tokens of these prompts sees, on average."""
    left, seen = tokens, 0.0
    for prompt in prompts:
        start = prompt.extended
        taken = min(left, len(prompt.tokens) - start)
        seen += taken * (start + taken / 2)
        left -= taken
        if not left:
            break
    return seen / max(1, tokens)
