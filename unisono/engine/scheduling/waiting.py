"""The requests that wait for a slot, in the order in which they get one.

Clients take turns: each has a line of its own, first come, first served, and the lines are served round-robin. So a
client with 10,000 requests adds one turn to another client's wait. Where priorities count they come first: lower values
before higher ones, then the turns. A request that gave its pages back waits at the place that it had.

The turns are those of start-time fair queueing (Goyal, Vin, Cheng 1996) with every request of cost 1. A request gets
its turn, a number, when it is the first of its line: the number after its client's last turn, but at least the turn
that is being served, so that nobody saves up turns while idle. With one client, turns go up as requests come.
"""

from __future__ import annotations

import bisect

from unisono.engine.sequence import Sequence

MAX_IDLE = 64
"""Clients without a waiting request whose next turn is remembered, before those are looked for that need none."""


class Waiting:
    """by_priority: whether priorities count."""

    def __init__(self, by_priority: bool = False) -> None:
        self.by_priority = by_priority
        self._lines: dict[str, list[Sequence]] = {}  # of each client, last first
        self._heads: list[Sequence] = []  # the first of each line, last first
        self._next: dict[str, int] = {}  # of each client, the first turn that is free
        self._now = 0  # the turn that is being served
        self._count = 0

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """What requests are ordered by, lowest first. sequence: the first of a line, or one that has a slot."""
        return self._priority(sequence), sequence.turn, sequence.order

    def add(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(sequence.request.client, [])
        head = line[-1] if line else None
        bisect.insort(line, sequence, key=self._last_in_line)
        self._count += 1
        self._set_head(line, head)

    def first(self) -> Sequence:
        """Who gets the next slot."""
        return self._heads[-1]

    def take(self) -> Sequence:
        """Remove the first request, which gets a slot now: its client has had that turn."""
        sequence = self._heads[-1]
        client = sequence.request.client
        self._next[client] = max(self._next.get(client, 0), sequence.turn + 1)
        self.remove(sequence)
        if len(self._next) > len(self._lines) + MAX_IDLE:
            self._next = {c: turn for c, turn in self._next.items() if turn > self._now}
        return sequence

    def served(self, sequence: Sequence) -> None:
        """A pass of this sequence's prompt is launched."""
        self._now = max(self._now, sequence.turn)

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.request.client]
        head = line[-1]
        place = bisect.bisect_left(line, self._last_in_line(sequence), key=self._last_in_line)
        assert line[place] is sequence
        del line[place]
        self._count -= 1
        self._set_head(line, head)
        if not line:
            del self._lines[sequence.request.client]

    def __len__(self) -> int:
        return self._count

    def _set_head(self, line: list[Sequence], old: Sequence | None) -> None:
        """The line has changed, and ``old`` was its first."""
        new = line[-1] if line else None
        if new is old:
            return
        if old is not None:
            del self._heads[bisect.bisect_left(self._heads, self._last_first(old), key=self._last_first)]
        if new is not None:
            if new.turn < 0:
                new.turn = max(self._now, self._next.get(new.request.client, 0))
            bisect.insort(self._heads, new, key=self._last_first)

    def _priority(self, sequence: Sequence) -> int:
        return sequence.request.priority if self.by_priority else 0

    def _last_in_line(self, sequence: Sequence) -> tuple[int, int]:
        return -self._priority(sequence), -sequence.order

    def _last_first(self, sequence: Sequence) -> tuple[int, int, int]:
        priority, turn, order = self.rank(sequence)
        return -priority, -turn, -order
