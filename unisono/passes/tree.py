"""A round over several paths for each request: what it does before its target pass and after.

Owns the order of a tree's steps inside the round; ``round.py`` and ``verify.py`` call it where a tree was asked for. A
path is a row of the round like any other, with the request's own slot and a page-table row of its own, so it computes
the bits that it would compute alone, and the best one is committed as a chain would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.drafters.base import TreeDrafter
from unisono.kernels.speculation.tree_paths import Best, Fork, best_path, fork_paths, span_pages
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.kv.store import StateStore
from unisono.passes.slot_tensors import SlotTensors


def path_pages(paths: int, drafts: int, num_slots: int) -> int:
    """Pages that only tree paths use, for this number of requests."""
    return (paths - 1) * span_pages(drafts, PAGE_SIZE) * num_slots


@dataclass(frozen=True)
class Tree:
    """The paths of a tree, their page-table rows and their pages. Shapes: R requests, P paths, W = 1 + k."""

    paths: Sequence[Sequence[int]]
    drafter: TreeDrafter
    slots: SlotTensors
    store: StateStore
    num_pages: Mapping[int, int]  # by lifetime, without those of the paths
    unused: torch.Tensor  # bool [P, k]: after each path's end

    @staticmethod
    def of(
        paths: Sequence[Sequence[int]],
        drafter: TreeDrafter,
        slots: SlotTensors,
        store: StateStore,
        num_pages: Mapping[int, int],
    ) -> Tree:
        unused = [[step >= len(path) for step in range(drafter.num_drafts)] for path in paths]
        return Tree(paths, drafter, slots, store, num_pages, torch.tensor(unused, device=slots.length.device))

    def fork(self, slots: torch.Tensor) -> Fork:
        """The R · P rows of a round over ``slots [R]``, with the state that they begin with."""
        for lifetime in self.store.lifetimes[1:]:
            fork = self._fork(lifetime, slots)
            self.store.copy_span(lifetime, fork.sources, fork.tables, fork.first, fork.last)
        fork = self.rows(slots)
        self.store.copy_span(ALL, fork.sources, fork.tables, fork.first, fork.last)
        if self.store.tails:
            self.store.copy_tails(fork.slots, fork.tables)
        return fork

    def rows(self, slots: torch.Tensor) -> Fork:
        """The rows alone: within a round, whose paths have what they begin with, they are the same again."""
        return self._fork(ALL, slots)

    def _fork(self, lifetime: int, slots: torch.Tensor) -> Fork:
        """The rows in the page table of a lifetime; they have the same numbers in each."""
        s, table, first = self.slots, self.store.page_tables[lifetime], self.num_pages[lifetime]
        pages = span_pages(self.drafter.num_drafts, PAGE_SIZE)
        return fork_paths(table, slots, s.length, s.status, len(self.paths), pages, first, PAGE_SIZE)

    def propose(self, fork: Fork, drafts: torch.Tensor) -> None:
        """Write ``drafts [R · P, k]``, -1 after each path's end."""
        self.drafter.propose(fork.slots, drafts, fork.tables)
        drafts.view(-1, *self.unused.shape).masked_fill_(self.unused, -1)

    def best(self, fork: Fork, sampled: torch.Tensor, drafts: torch.Tensor) -> Best:
        """The path of each request that the target's sampled [R · P, W] agree with longest."""
        return best_path(sampled, drafts, fork.tables, len(self.paths))

    def adopt(self, slots: torch.Tensor, best: Best, result: torch.Tensor) -> None:
        """Copy the state of the best paths' accepted drafts to the requests' own pages and tails.

        slots [R], result [R, W + 2] as committed: ``slots.length`` has moved on by the count.
        """
        length = self.slots.length.index_select(0, slots)
        for lifetime in self.store.lifetimes:
            self.store.copy_span(lifetime, best.tables, slots, length - result[:, 0], length - 1)
        if self.store.tails:
            self.store.copy_tails(best.tables, slots)
