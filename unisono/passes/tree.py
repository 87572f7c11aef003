"""Tree rounds: several paths per request, and the steps before and after the target's pass.

Defines the order of a tree's steps inside the round; ``round.py`` and ``verify.py`` call it for draft trees. A path is
a row of the round like any other, with the request's slot and a page-table row of its own. So it computes the same bits
as alone, and the best path is committed like a chain.
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
    """Pages used only by tree paths, for this number of requests."""
    return (paths - 1) * span_pages(drafts, PAGE_SIZE) * num_slots


@dataclass(frozen=True)
class Tree:
    """Paths of a draft tree, their page-table rows and their pages. Shapes: R requests, P paths, W = 1 + k."""

    paths: Sequence[Sequence[int]]
    drafter: TreeDrafter
    slots: SlotTensors
    store: StateStore
    num_pages: Mapping[int, int]  # by window group, excluding the paths' pages
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
        """The R · P rows of a round over ``slots [R]``, with a copy of the state they begin with."""
        for window_group in self.store.window_groups[1:]:
            fork = self._fork(window_group, slots)
            self.store.copy_span(window_group, fork.sources, fork.tables, fork.first, fork.last)
        fork = self.rows(slots)
        self.store.copy_span(ALL, fork.sources, fork.tables, fork.first, fork.last)
        if self.store.recurrent:
            self.store.copy_recurrent(fork.slots, fork.tables)
        return fork

    def rows(self, slots: torch.Tensor) -> Fork:
        """The rows only: within a round the state was copied already, and the rows are the same."""
        return self._fork(ALL, slots)

    def _fork(self, window_group: int, slots: torch.Tensor) -> Fork:
        """The rows in the page table of a window group; they have the same numbers in each."""
        s, table, first = self.slots, self.store.page_tables[window_group], self.num_pages[window_group]
        pages = span_pages(self.drafter.num_drafts, PAGE_SIZE)
        return fork_paths(table, slots, s.length, s.status, len(self.paths), pages, first, PAGE_SIZE)

    def propose(self, fork: Fork, drafts: torch.Tensor) -> None:
        """Write ``drafts [R · P, k]``, -1 after each path's end."""
        self.drafter.propose(fork.slots, drafts, fork.tables)
        drafts.view(-1, *self.unused.shape).masked_fill_(self.unused, -1)

    def best(self, fork: Fork, sampled: torch.Tensor, drafts: torch.Tensor) -> Best:
        """The path of each request with the longest agreement with the target's sampled [R · P, W]."""
        return best_path(sampled, drafts, fork.tables, len(self.paths))

    def adopt(self, slots: torch.Tensor, best: Best, result: torch.Tensor) -> None:
        """Copy the state of the best paths' accepted drafts to the requests' own pages and recurrent state.

        slots [R]; result [R, W + 2] as committed: ``slots.length`` already includes the count.
        """
        length = self.slots.length.index_select(0, slots)
        for window_group in self.store.window_groups:
            self.store.copy_span(window_group, best.tables, slots, length - result[:, 0], length - 1)
        if self.store.recurrent:
            self.store.copy_recurrent(best.tables, slots)
