"""The requests that wait for a slot, in the order in which they get one.

First come, first served, or by priority: lower values first, and of equal ones who came first. A request that gave its
pages back waits at the place that it had.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from unisono.engine.sequence import Sequence


class Waiting:
    """by_priority: whether priorities count. ``rank`` is what requests are ordered by, lowest first."""

    def __init__(self, by_priority: bool = False) -> None:
        self.by_priority = by_priority
        self._last_first: list[Sequence] = []

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.request.priority if self.by_priority else 0, sequence.order)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._last_first, sequence, key=self._behind)

    def first(self) -> Sequence:
        return self._last_first[-1]

    def remove(self, sequence: Sequence) -> None:
        place = bisect.bisect_left(self._last_first, self._behind(sequence), key=self._behind)
        assert self._last_first[place] is sequence
        del self._last_first[place]

    def __len__(self) -> int:
        return len(self._last_first)

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._last_first)

    def _behind(self, sequence: Sequence) -> tuple[int, int]:
        priority, order = self.rank(sequence)
        return -priority, -order
