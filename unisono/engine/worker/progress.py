"""The numbers of running requests that every pass changes, as one array for each, so that a round's bookkeeping is a
few operations however many requests take part. Owned by rank 0's scheduler; nothing of the device.
"""

from __future__ import annotations

import numpy as np

from unisono.kv.specs import PAGE_SIZE
from unisono.types import MAX_DRAFTS

NOBODY = -1


class Progress:
    """Of the request in each slot, int64 [slots]. Values of slots that no request has mean nothing.

    owner: its ``Sequence.order``; NOBODY where the slot is free. length: how many ``Sequence.tokens`` it has.
    max_length: tokens at which it ends. max_drafts: of a round. mapped: leading pages that the slot's page table on the
    device holds. in_flight: launched passes that commit tokens and are not read yet. unobserved: its last tokens of
    which the drafter has only been told (``draft_controller.py``). round_start: position of the first token of its last
    pass that committed some and was read.
    """

    def __init__(self, slots: int) -> None:
        self.owner = np.full(slots, NOBODY)
        self.length, self.max_length, self.max_drafts, self.mapped = (np.zeros(slots, np.int64) for _ in range(4))
        self.in_flight, self.unobserved, self.round_start = (np.zeros(slots, np.int64) for _ in range(3))

    def begin(self, slot: int, owner: int, length: int, max_length: int, max_drafts: int | None, mapped: int) -> None:
        """A request gets a slot. max_drafts: None for no limit of its own."""
        self.owner[slot], self.length[slot], self.max_length[slot] = owner, length, max_length
        self.max_drafts[slot] = MAX_DRAFTS if max_drafts is None else min(max_drafts, MAX_DRAFTS)
        self.mapped[slot] = mapped
        self.in_flight[slot] = self.unobserved[slot] = self.round_start[slot] = 0

    def end(self, slot: int) -> None:
        """A request gives its slot back."""
        self.owner[slot] = NOBODY

    def owned(self, slots: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """bool [R]: which of the slots [R] these requests still have."""
        return self.owner[slots] == owners

    def going_on(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: which requests may take part in another pass. A pass in flight commits one token at least."""
        return self.length[slots] + self.in_flight[slots] < self.max_length[slots]

    def worst(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[R]: tokens after one more round of ``width`` tokens in which everything is accepted."""
        return np.minimum(self.length[slots] + (self.in_flight[slots] + 1) * width, self.max_length[slots])

    def outgrown(self, slots: np.ndarray, worst: np.ndarray) -> list[int]:
        """The rows whose page table on the device is too short for ``worst`` [R] tokens."""
        return np.flatnonzero(worst > PAGE_SIZE * self.mapped[slots]).tolist()

    def most_drafts(self, slots: np.ndarray) -> np.ndarray:
        """[R]: drafts that a request may have in its next round."""
        left = self.max_length[slots] - self.length[slots] - 1
        return np.minimum(self.max_drafts[slots], np.maximum(0, left))

    def launched(self, slots: np.ndarray) -> None:
        """A pass that commits tokens of these requests is launched."""
        self.in_flight[slots] += 1

    def read(self, slots: np.ndarray, counts: np.ndarray, some: np.ndarray) -> None:
        """That pass is read: it brought ``counts`` [R] tokens; ``some`` [R]: whether that is any."""
        self.in_flight[slots] -= 1
        lengths = self.length[slots]
        starts = lengths - 1
        self.round_start[slots] = starts if some.all() else np.where(some, starts, self.round_start[slots])
        self.length[slots] = lengths + counts
