"""Per-slot request state on the host, one array per quantity.

A round's bookkeeping is then a few array operations, regardless of the number of requests. Owned by rank 0's scheduler;
nothing lies on the device.
"""

from __future__ import annotations

import numpy as np

from unisono.kv.specs import PAGE_SIZE
from unisono.types import MAX_DRAFTS

NOBODY = -1


class Progress:
    """Host mirror of per-slot request state, int64 [slots]. Undefined for free slots.

    owner: ``Sequence.order`` of the request; NOBODY for a free slot. length: number of ``Sequence.tokens``. max_length:
    tokens at which the request ends. max_drafts: drafts per round. mapped: leading pages in the slot's page table on
    the device. in_flight: launched passes that commit tokens and are not read yet. unobserved: last tokens that a
    paused drafter has not observed (``draft_controller.py``). round_start: position of the first token of the last read
    pass that committed any.
    """

    def __init__(self, slots: int) -> None:
        self.owner = np.full(slots, NOBODY)
        self.length, self.max_length, self.max_drafts, self.mapped = (np.zeros(slots, np.int64) for _ in range(4))
        self.in_flight, self.unobserved, self.round_start = (np.zeros(slots, np.int64) for _ in range(3))

    def begin(self, slot: int, owner: int, length: int, max_length: int, max_drafts: int | None, mapped: int) -> None:
        """Start a request in a slot. max_drafts: None for no limit of its own."""
        self.owner[slot], self.length[slot], self.max_length[slot] = owner, length, max_length
        self.max_drafts[slot] = MAX_DRAFTS if max_drafts is None else min(max_drafts, MAX_DRAFTS)
        self.mapped[slot] = mapped
        self.in_flight[slot] = self.unobserved[slot] = self.round_start[slot] = 0

    def end(self, slot: int) -> None:
        """Free a slot."""
        self.owner[slot] = NOBODY

    def owned(self, slots: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """bool [R]: True for the slots [R] that these requests still hold."""
        same: np.ndarray = self.owner[slots] == owners
        return same

    def going_on(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: True for requests that may take part in another pass. A pass in flight commits at least one
        token.
        """
        open_rows: np.ndarray = self.length[slots] + self.in_flight[slots] < self.max_length[slots]
        return open_rows

    def worst(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[R]: tokens after one more round of ``width`` tokens in which everything is accepted."""
        worst: np.ndarray = np.minimum(self.length[slots] + (self.in_flight[slots] + 1) * width, self.max_length[slots])
        return worst

    def outgrown(self, slots: np.ndarray, worst: np.ndarray) -> list[int]:
        """Return the rows whose page table on the device is too short for ``worst`` [R] tokens."""
        rows: list[int] = np.flatnonzero(worst > PAGE_SIZE * self.mapped[slots]).tolist()
        return rows

    def most_drafts(self, slots: np.ndarray) -> np.ndarray:
        """[R]: drafts that each request may have in its next round."""
        left = self.max_length[slots] - self.length[slots] - 1
        most: np.ndarray = np.minimum(self.max_drafts[slots], np.maximum(0, left))
        return most

    def launched(self, slots: np.ndarray) -> None:
        """Count a launched pass that commits tokens of these requests."""
        self.in_flight[slots] += 1

    def read(self, slots: np.ndarray, counts: np.ndarray, some: np.ndarray) -> None:
        """Count a pass that was read. ``counts`` [R]: its tokens; ``some`` [R]: counts > 0."""
        self.in_flight[slots] -= 1
        lengths = self.length[slots]
        starts = lengths - 1
        self.round_start[slots] = starts if some.all() else np.where(some, starts, self.round_start[slots])
        self.length[slots] = lengths + counts
