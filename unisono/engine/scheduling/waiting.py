"""Waiting queue: requests without a slot, in the order of admission.

Clients are served in turn (round-robin); each client's requests are first come, first served. A client with 10,000
requests therefore adds one turn to another client's wait. With priorities, lower values come first, then turns. A
preempted request keeps its position.

The order is start-time fair queueing (Goyal, Vin, Cheng 1996) with cost 1 per request. A request gets its turn, a
number, when it becomes the first of its client: one more than the client's last turn, and at least the turn being
served, so that idle clients do not save up turns. With one client, turns increase in order of arrival.
"""

from __future__ import annotations

import bisect

from unisono.engine.sequence import Sequence

MAX_IDLE = 64
"""Idle clients whose next turn is remembered before unneeded entries are removed."""


class Waiting:
    """Queue of waiting requests. by_priority: True if priorities count."""

    def __init__(self, by_priority: bool = False) -> None:
        self.by_priority = by_priority
        self._lines: dict[str, list[Sequence]] = {}  # each client's requests, last first
        self._heads: list[Sequence] = []  # the first request of each client, last first
        self._next: dict[str, int] = {}  # each client's first free turn
        self._now = 0  # the turn being served
        self._count = 0

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Sort key, lowest first. sequence: the first of its client, or one that has a slot."""
        return self._priority(sequence), sequence.turn, sequence.order

    def add(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(sequence.request.client, [])
        head = line[-1] if line else None
        bisect.insort(line, sequence, key=self._last_in_line)
        self._count += 1
        self._set_head(line, head)

    def first(self) -> Sequence:
        """Return the request that gets the next slot."""
        return self._heads[-1]

    def take(self) -> Sequence:
        """Remove the first request, which gets a slot. Its client has used that turn."""
        sequence = self._heads[-1]
        client = sequence.request.client
        self._next[client] = max(self._next.get(client, 0), sequence.turn + 1)
        self.remove(sequence)
        if len(self._next) > len(self._lines) + MAX_IDLE:
            self._next = {c: turn for c, turn in self._next.items() if turn > self._now}
        return sequence

    def served(self, sequence: Sequence) -> None:
        """Note that a pass of this sequence's prompt was launched."""
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
        """Update the sorted heads after a change of ``line``. ``old``: its former first request."""
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
