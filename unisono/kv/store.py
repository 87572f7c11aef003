"""The store: every tensor that requests leave on the device, for target and drafter alike.

Paged state of one lifetime forms a *group* with page ids and a page table of its own. Within a group, specs of the same
shape and dtype lie in one tensor [specs, pages, *shape], so "which bytes are page p?" has one answer, and what copies
pages, or makes bytes of them (``kv/transfer.py``), is written once. The engine makes the store; models and drafters
read views of it.

Shapes: S slots (the padding slot is the last), NR table rows (one for each slot, and one for each further tree path of
each slot), MP pages per row, NP pages of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    TAILS,
    Paged,
    PerSlot,
    Spec,
    Tail,
    Tree,
    leaves,
    map_tree,
)

PageKey = tuple[int, tuple[int, ...], torch.dtype]
"""Lifetime, shape and dtype of paged state."""


@dataclass(frozen=True)
class TailView:
    """What a recurrent layer sees of its state, tensors by the names of :class:`unisono.kv.specs.Tail`.

    NR rows as in page tables; ring: positions that a row remembers. snapshot [NR, *shape]: the state after
    ``store.tail_positions`` tokens of each row. inputs [NR, ring, *shape]: the raw inputs since, that of position p at
    p % ring.
    """

    snapshot: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them; the first dimension is the row."""
        return [*self.snapshot.values(), *self.inputs.values()]


class StateView:
    """One owner's state. ``tree`` is its specs' tree with tensors in place of specs; it changes when pages are
    allocated."""

    def __init__(self) -> None:
        self.tree: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.tree[name]


class StateStore:
    """Allocates state, and copies it.

    slots: S. paths: tree paths of each request, 1 for a chain. max_model_len: positions of a request; windows as long
    as that are lifetime ALL. width: tokens of a row in the widest round, which says how many positions' inputs a tail
    remembers.
    """

    def __init__(self, slots: int, paths: int, max_model_len: int, width: int, device: torch.device) -> None:
        self.slots, self.paths, self.max_model_len, self.width, self.device = slots, paths, max_model_len, width, device
        # A drafter's entries are a position ahead. After a prompt that fills the context, the last one goes to padding.
        self.max_pages = max_model_len // PAGE_SIZE + 1
        self.num_pages: dict[int, int] = {}  # by lifetime, those of tree paths included
        self.page_tables: dict[int, torch.Tensor] = {}  # by lifetime, [NR, MP] int32
        self.tail_positions = self._ints(slots * paths).zero_()  # [NR]: tokens that each row's snapshots have seen
        self.lifetimes: tuple[int, ...] = ()  # ALL first, then windows ascending
        self.tails = False  # whether anybody keeps a recurrence
        self._specs: dict[str, Tree] = {}
        self._views: dict[str, StateView] = defaultdict(StateView)
        self._slot_state: dict[str, Tree] = {}  # the owners' trees with None in place of paged specs
        self._pages: dict[PageKey, torch.Tensor] = {}  # [specs, NP, *shape]
        self._snapshots: list[torch.Tensor] = []  # of each tail and name, [ids, *shape]
        self._table(ALL)

    # ---- declaring and allocating --------------------------------------------------------------

    def view(self, owner: str) -> StateView:
        """The state of an owner, who may declare it later."""
        return self._views[owner]

    def declare(self, owner: str, specs: Tree) -> None:
        """Say what an owner keeps. Slot state and tails are allocated now, pages with :meth:`allocate`."""
        kept = map_tree(specs, self._clipped)
        self._specs[owner] = kept
        state = map_tree(kept, lambda spec: None if isinstance(spec, Paged) else self._of_slots(spec))
        self._views[owner].tree = self._slot_state[owner] = state
        for spec in leaves(kept):
            if isinstance(spec, Paged):
                self._table(spec.lifetime)
        self.tails = self.tails or any(isinstance(spec, Tail) for spec in leaves(kept))

    def page_bytes(self, lifetime: int, owner: str | None = None) -> int:
        """Bytes of one page of a lifetime, of all owners or of one."""
        return sum(
            spec.page_bytes
            for who, spec in self._every()
            if isinstance(spec, Paged) and spec.lifetime == lifetime and owner in (None, who)
        )

    def token_bytes(self, owner: str) -> int:
        """Bytes that a token takes in an owner's pages of all lifetimes."""
        return sum(self.page_bytes(lifetime, owner) for lifetime in self.lifetimes) // PAGE_SIZE

    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of all tails."""
        return sum(spec.snapshot_bytes for _, spec in self._every() if isinstance(spec, Tail))

    def allocate(self, num_pages: Mapping[int, int], snapshots: int = 0) -> None:
        """Allocate pages of each lifetime and room for snapshots; what was allocated before is freed.

        Zeros, so that the padding page is finite before anything was written to it.
        """
        for view in self._views.values():
            view.tree = None
        self._pages.clear()
        self._snapshots.clear()
        self.num_pages = dict(num_pages)
        count: dict[PageKey, int] = defaultdict(int)
        for _, spec in self._every():
            if isinstance(spec, Paged):
                count[spec.lifetime, spec.shape, spec.dtype] += 1
        for (lifetime, shape, dtype), specs in count.items():
            dims = (specs, num_pages[lifetime], *shape)
            self._pages[lifetime, shape, dtype] = _zeros(dims, dtype, self.device)
        taken: dict[PageKey, Iterator[torch.Tensor]] = {key: iter(pages) for key, pages in self._pages.items()}
        for owner, specs in self._specs.items():
            self._views[owner].tree = map_tree(
                specs, partial(self._filled, iter(_flat(self._slot_state[owner])), taken)
            )
        for live in self._live_snapshots():
            self._snapshots.append(_zeros((snapshots, *live.shape[1:]), live.dtype, self.device))

    def nbytes(self, owner: str | None = None) -> int:
        """Bytes of pages, of all owners or of one."""
        return sum(pages * self.page_bytes(lifetime, owner) for lifetime, pages in self.num_pages.items())

    # ---- copies on the device, inside passes ---------------------------------------------------

    def copy_span(
        self, lifetime: int, sources: torch.Tensor, tables: torch.Tensor, first: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Copy the state of positions first[m] … last[m] - 1 from page-table row sources[m] to tables[m]; all [M]
        int32."""
        table = self.page_tables[lifetime]
        by_token = {(s.lifetime, s.shape, s.dtype) for _, s in self._every() if isinstance(s, Paged) and s.by_token}
        for key in self._pages:
            if key[0] == lifetime and key in by_token:
                pages = self._pages[key]
                copy_span(
                    pages.view(torch.uint8) if key[2].itemsize == 1 else pages, table, sources, tables, first, last
                )

    def copy_tails(self, sources: torch.Tensor, rows: torch.Tensor) -> None:
        """Give rows [M] the snapshots and inputs of rows sources [M]; int32. A row may be its own source, not
        another's."""
        src, dst = sources.long(), rows.long()
        for tail in self._tail_views():
            for tensor in tail.tensors:
                tensor.index_copy_(0, dst, tensor.index_select(0, src))
        self.tail_positions.index_copy_(0, dst, self.tail_positions.index_select(0, src))

    # ---- commands between passes ---------------------------------------------------------------

    def reset_tail(self, slot: int) -> None:
        """Begin a slot's recurrences at position 0."""
        self.tail_positions[slot] = 0
        for live in _by_dtype(self._live_snapshots(), slot):
            torch._foreach_zero_(live)

    def save_tail(self, slot: int, snapshot: int) -> None:
        """Keep a slot's snapshots under an id."""
        self._copy(self._snapshots, snapshot, self._live_snapshots(), slot)

    def load_tail(self, slot: int, snapshot: int, position: int) -> None:
        """Go on from the snapshots of an id, which were taken after ``position`` tokens."""
        self.tail_positions[slot] = position
        self._copy(self._live_snapshots(), slot, self._snapshots, snapshot)

    def parts(self, kind: int) -> list[torch.Tensor]:
        """The bytes of every page of a lifetime, or with TAILS of every snapshot.

        Views [pages, specs, words] of what is allocated now, page first: int64 where a page's bytes allow it, else
        uint8.
        """
        if kind == TAILS:
            return [_words(saved.unsqueeze(0)) for saved in self._snapshots]
        return [_words(pages) for key, pages in self._pages.items() if key[0] == kind]

    # ---- pieces --------------------------------------------------------------------------------

    def _every(self) -> Iterator[tuple[str, Spec]]:
        for owner, specs in self._specs.items():
            yield from ((owner, spec) for spec in leaves(specs))

    def _clipped(self, spec: Spec) -> Spec:
        """A window that no request outgrows is lifetime ALL: nothing could be freed."""
        if isinstance(spec, Paged) and spec.lifetime >= self.max_model_len:
            return replace(spec, lifetime=ALL)
        return spec

    def _table(self, lifetime: int) -> None:
        if lifetime not in self.page_tables:
            table = self._ints(self.slots * self.paths, self.max_pages)
            self.page_tables[lifetime] = table.fill_(PADDING_PAGE)
            self.lifetimes = tuple(sorted(self.page_tables))

    def _of_slots(self, spec: Spec) -> Any:
        if isinstance(spec, Tail):
            rows = self.slots * self.paths
            shapes = {name: ((rows, *shape), dtype) for name, (shape, dtype) in spec.snapshot.items()}
            rings = {name: ((rows, r.ring(self.width), *r.shape), r.dtype) for name, r in spec.inputs.items()}
            return TailView(self._zeros(shapes), self._zeros(rings))
        assert isinstance(spec, PerSlot)
        return torch.full((self.slots, *spec.shape), spec.fill, dtype=spec.dtype, device=self.device)

    def _filled(self, slot_state: Iterator[Any], taken: Mapping[PageKey, Iterator[torch.Tensor]], spec: Spec) -> Any:
        held = next(slot_state)
        return next(taken[spec.lifetime, spec.shape, spec.dtype]) if isinstance(spec, Paged) else held

    def _tail_views(self) -> list[TailView]:
        return [held for state in self._slot_state.values() for held in _flat(state) if isinstance(held, TailView)]

    def _live_snapshots(self) -> list[torch.Tensor]:
        """[NR, *shape], of each tail and name."""
        return [tensor for tail in self._tail_views() for tensor in tail.snapshot.values()]

    @staticmethod
    def _copy(to: Sequence[torch.Tensor], row: int, source: Sequence[torch.Tensor], source_row: int) -> None:
        """Copy row ``source_row`` of each tensor to row ``row`` of the one in its place: a launch for each dtype."""
        for those, these in zip(_by_dtype(to, row), _by_dtype(source, source_row), strict=True):
            torch._foreach_copy_(those, these)

    def _zeros(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(dims, dtype=dtype, device=self.device) for name, (dims, dtype) in shapes.items()}

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)


def _by_dtype(tensors: Sequence[torch.Tensor], row: int) -> list[list[torch.Tensor]]:
    """A row of each tensor, those of one dtype together: torch then takes them in one launch."""
    found = defaultdict[torch.dtype, list[torch.Tensor]](list)
    for tensor in tensors:
        found[tensor.dtype].append(tensor[row])
    return list(found.values())


def _words(pages: torch.Tensor) -> torch.Tensor:
    """[specs, pages, *shape] as a view [pages, specs, words]."""
    rows = pages.reshape(*pages.shape[:2], -1)
    wide = rows.shape[-1] * rows.element_size() % 8 == 0
    return rows.view(torch.int64 if wide else torch.uint8).transpose(0, 1)


def _flat(tree: Any) -> Iterator[Any]:
    """What stands in place of specs, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _flat(part)
    else:
        yield tree


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, which take a CPU's memory where they are written first; torch.zeros writes all at once, 1 GB in 1.2 s."""
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(dims, f"i{dtype.itemsize}")).view(dtype)
