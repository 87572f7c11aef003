"""The store: every tensor that requests keep on the device, for target and drafter alike.

Paged state of one window group has page ids and a page table of its own. Within a window group, specs of the same shape
and dtype share one tensor [specs, pages, *shape]. The bytes of page p are thus defined in one place, and code that
copies or serialises pages (``kv/transfer.py``) is written once. The engine builds the store; models and drafters read
views of it.

Shapes: S slots (the last is the padding slot), NR table rows (one per slot, plus one per further tree path of each
slot), MP pages per row, NP pages of a window group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono.kernels.speculation.tree_paths import copy_span
from unisono.kv.specs import (
    ALL,
    PADDING_PAGE,
    PAGE_SIZE,
    SNAPSHOTS,
    Paged,
    PerSlot,
    Recurrent,
    Spec,
    Tree,
    leaves,
    map_tree,
)

PageKey = tuple[int, tuple[int, ...], torch.dtype, int]
"""Window group, shape and dtype of paged state."""


@dataclass(frozen=True)
class RecurrentView:
    """State of one recurrent layer: tensors by the names of :class:`unisono.kv.specs.Recurrent`.

    NR rows as in page tables; ring: buffered positions per row.

    snapshot [NR, *shape]: state after ``store.snapshot_positions`` tokens of each row.
    inputs [NR, ring, *shape]: raw inputs since then; position p is stored at p % ring.
    """

    snapshot: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors; their first dimension is the row."""
        return [*self.snapshot.values(), *self.inputs.values()]


class StateView:
    """State of one owner. ``tree`` is the tree of its specs with tensors in place of specs; it changes when pages are
    allocated."""

    def __init__(self) -> None:
        self.tree: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.tree[name]


class StateStore:
    """Allocates state and copies it.

    slots: S.
    paths: tree paths per request; 1 for a chain.
    max_model_len: positions of a request. Windows of at least this length become window group ALL.
    width: tokens per row in the widest round, which sets how many positions of recurrent input are buffered.
    zeros: allocates pages and saved snapshots; None: on ``device``.
    """

    def __init__(
        self, slots: int, paths: int, max_model_len: int, width: int, device: torch.device,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._page_zeros = zeros or (lambda dims, dtype: _zeros(dims, dtype, device))
        self.slots, self.paths, self.max_model_len, self.width, self.device = slots, paths, max_model_len, width, device
        # A drafter's entries are a position ahead. After a prompt that fills the context, the last one goes to padding.
        self.max_pages = max_model_len // PAGE_SIZE + 1
        self.num_pages: dict[int, int] = {}  # by window group, pages of tree paths included
        self.page_tables: dict[int, torch.Tensor] = {}  # by window group, [NR, MP] int32
        self.snapshot_positions = self._ints(slots * paths).zero_()  # [NR]: tokens covered by each row's snapshots
        self.window_groups: tuple[int, ...] = ()  # ALL first, then windows ascending
        self.recurrent = False  # True if an owner has recurrent state
        self._specs: dict[str, Tree] = {}
        self._views: dict[str, StateView] = defaultdict(StateView)
        self._slot_state: dict[str, Tree] = {}  # the owners' trees with None in place of paged specs
        self._pages: dict[PageKey, torch.Tensor] = {}  # [specs, NP, *shape]
        self._snapshots: list[torch.Tensor] = []  # one per recurrent layer and name, [ids, *shape]
        self._table(ALL)

    # ---- declaring and allocating --------------------------------------------------------------

    def view(self, owner: str) -> StateView:
        """State of an owner, which may declare it later."""
        return self._views[owner]

    def declare(self, owner: str, specs: Tree) -> None:
        """Declare an owner's state. Per-slot and recurrent state is allocated now, pages by :meth:`allocate`."""
        kept = map_tree(specs, self._clipped)
        self._specs[owner] = kept
        state = map_tree(kept, lambda spec: None if isinstance(spec, Paged) else self._of_slots(spec))
        self._views[owner].tree = self._slot_state[owner] = state
        for spec in leaves(kept):
            if isinstance(spec, Paged):
                self._table(spec.window_group)
        self.recurrent = self.recurrent or any(isinstance(spec, Recurrent) for spec in leaves(kept))

    def page_bytes(self, window_group: int, owner: str | None = None) -> int:
        """Bytes of one page of a window group, over all owners or for one."""
        return sum(
            spec.page_bytes
            for who, spec in self._every()
            if isinstance(spec, Paged) and spec.window_group == window_group and owner in (None, who)
        )

    def token_bytes(self, owner: str) -> int:
        """Bytes per token in an owner's pages, over all window groups."""
        return sum(self.page_bytes(window_group, owner) for window_group in self.window_groups) // PAGE_SIZE

    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of all recurrent state."""
        return sum(spec.snapshot_bytes for _, spec in self._every() if isinstance(spec, Recurrent))

    def allocate(self, num_pages: Mapping[int, int], snapshots: int = 0) -> None:
        """Allocate the pages of each window group and room for snapshots, freeing earlier allocations.

        Memory is zeroed, so that the padding page is finite before its first write.
        """
        for view in self._views.values():
            view.tree = None
        self._pages.clear()
        self._snapshots.clear()
        self.num_pages = dict(num_pages)
        count: dict[PageKey, int] = defaultdict(int)
        for _, spec in self._every():
            if isinstance(spec, Paged):
                count[_key(spec)] += 1
        for key, specs in count.items():
            window_group, shape, dtype, ranks = key
            dims = (specs, num_pages[window_group] // ranks, *shape)
            self._pages[key] = self._page_zeros(dims, dtype)
        taken: dict[PageKey, Iterator[torch.Tensor]] = {key: iter(pages) for key, pages in self._pages.items()}
        for owner, specs in self._specs.items():
            self._views[owner].tree = map_tree(
                specs, partial(self._filled, iter(_flat(self._slot_state[owner])), taken)
            )
        for live in self._live_snapshots():
            self._snapshots.append(self._page_zeros((snapshots, *live.shape[1:]), live.dtype))

    def nbytes(self, owner: str | None = None) -> int:
        """Bytes of pages, over all owners or for one."""
        return sum(pages * self.page_bytes(window_group, owner) for window_group, pages in self.num_pages.items())

    def page_memory(self) -> list[torch.Tensor]:
        """All pages as bytes, uint8 [bytes] per allocation: scratch memory while no page is in use."""
        return [pages.view(-1).view(torch.uint8) for pages in self._pages.values() if pages.numel()]

    # ---- copies on the device, inside passes ---------------------------------------------------

    def copy_span(
        self, window_group: int, sources: torch.Tensor, tables: torch.Tensor, first: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Copy the state of positions first[m] … last[m] - 1 from page-table row sources[m] to row tables[m]; all int32
        [M]."""
        table = self.page_tables[window_group]
        by_token = {_key(s) for _, s in self._every() if isinstance(s, Paged) and s.by_token}
        for key in self._pages:
            if key[0] == window_group and key in by_token:
                pages = self._pages[key]
                copy_span(
                    pages.view(torch.uint8) if key[2].itemsize == 1 else pages, table, sources, tables, first, last
                )

    def copy_recurrent(self, sources: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy snapshots and inputs from rows sources [M] to rows [M]; int32. A row may be its own source, but not
        another row's."""
        src, dst = sources.long(), rows.long()
        for view in self._recurrent_views():
            for tensor in view.tensors:
                tensor.index_copy_(0, dst, tensor.index_select(0, src))
        self.snapshot_positions.index_copy_(0, dst, self.snapshot_positions.index_select(0, src))

    # ---- commands between passes ---------------------------------------------------------------

    def reset_recurrent(self, slot: int) -> None:
        """Reset a slot's recurrent state to position 0."""
        self.snapshot_positions[slot] = 0
        for live in _by_dtype(self._live_snapshots(), slot):
            torch._foreach_zero_(live)

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy a slot's snapshots to a snapshot id."""
        self._copy(self._snapshots, snapshot, self._live_snapshots(), slot)

    def load_snapshot(self, slot: int, snapshot: int, position: int) -> None:
        """Restore a slot's state from a snapshot id, taken after ``position`` tokens."""
        self.snapshot_positions[slot] = position
        self._copy(self._live_snapshots(), slot, self._snapshots, snapshot)

    def parts(self, kind: int) -> list[torch.Tensor]:
        """Bytes of every page of a window group or, for SNAPSHOTS, of every snapshot.

        Returns views [pages, specs, words] of the current allocation, page first: int64 if a page's size allows it,
        else uint8.
        """
        if kind == SNAPSHOTS:
            return [_words(saved.unsqueeze(0)) for saved in self._snapshots]
        return [_words(pages) for key, pages in self._pages.items() if key[0] == kind]

    # ---- pieces --------------------------------------------------------------------------------

    def _every(self) -> Iterator[tuple[str, Spec]]:
        for owner, specs in self._specs.items():
            yield from ((owner, spec) for spec in leaves(specs))

    def _clipped(self, spec: Spec) -> Spec:
        """Move a window that no request outgrows to window group ALL, since none of its pages could be freed."""
        if isinstance(spec, Paged) and spec.window_group >= self.max_model_len:
            return replace(spec, window_group=ALL)
        return spec

    def _table(self, window_group: int) -> None:
        if window_group not in self.page_tables:
            table = self._ints(self.slots * self.paths, self.max_pages)
            self.page_tables[window_group] = table.fill_(PADDING_PAGE)
            self.window_groups = tuple(sorted(self.page_tables))

    def _of_slots(self, spec: Spec) -> Any:
        if isinstance(spec, Recurrent):
            rows = self.slots * self.paths
            shapes = {name: ((rows, *shape), dtype) for name, (shape, dtype) in spec.snapshot.items()}
            rings = {name: ((rows, r.ring(self.width), *r.shape), r.dtype) for name, r in spec.inputs.items()}
            return RecurrentView(self._zeros(shapes), self._zeros(rings))
        assert isinstance(spec, PerSlot)
        return torch.full((self.slots, *spec.shape), spec.fill, dtype=spec.dtype, device=self.device)

    def _filled(self, slot_state: Iterator[Any], taken: Mapping[PageKey, Iterator[torch.Tensor]], spec: Spec) -> Any:
        held = next(slot_state)
        return next(taken[_key(spec)]) if isinstance(spec, Paged) else held

    def _recurrent_views(self) -> list[RecurrentView]:
        return [held for state in self._slot_state.values() for held in _flat(state) if isinstance(held, RecurrentView)]

    def _live_snapshots(self) -> list[torch.Tensor]:
        """[NR, *shape] for each recurrent layer and name."""
        return [tensor for view in self._recurrent_views() for tensor in view.snapshot.values()]

    @staticmethod
    def _copy(to: Sequence[torch.Tensor], row: int, source: Sequence[torch.Tensor], source_row: int) -> None:
        """Copy row ``source_row`` of each tensor to row ``row`` of its counterpart: one launch per dtype."""
        for those, these in zip(_by_dtype(to, row), _by_dtype(source, source_row), strict=True):
            torch._foreach_copy_(those, these)

    def _zeros(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(dims, dtype=dtype, device=self.device) for name, (dims, dtype) in shapes.items()}

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)


def _key(spec: Paged) -> PageKey:
    """Pages with equal keys are in one tensor."""
    return spec.window_group, spec.shape, spec.dtype, spec.ranks


def _by_dtype(tensors: Sequence[torch.Tensor], row: int) -> list[list[torch.Tensor]]:
    """A row of each tensor, grouped by dtype: torch copies each group in one launch."""
    found = defaultdict[torch.dtype, list[torch.Tensor]](list)
    for tensor in tensors:
        found[tensor.dtype].append(tensor[row])
    return list(found.values())


def _words(pages: torch.Tensor) -> torch.Tensor:
    """View [specs, pages, *shape] as [pages, specs, words]."""
    rows = pages.reshape(*pages.shape[:2], -1)
    wide = rows.shape[-1] * rows.element_size() % 8 == 0
    return rows.view(torch.int64 if wide else torch.uint8).transpose(0, 1)


def _flat(tree: Any) -> Iterator[Any]:
    """Yield the values in place of specs, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _flat(part)
    else:
        yield tree


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. A CPU commits their memory on first write; torch.zeros writes all of it at once, 1.2 s per GB."""
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(dims, f"i{dtype.itemsize}")).view(dtype)
