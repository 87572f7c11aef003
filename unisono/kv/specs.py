"""What state a module keeps on the device, as data.

A module's ``state_specs()`` returns a tree (dicts, lists, tuples) of specs. The store allocates it and gives back the
same tree with tensors in place of the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

PAGE_SIZE = 16
"""Tokens per page."""

PADDING_PAGE = 0
"""Takes the writes of padding tokens; never owned by a request."""

ALL = 0
"""Lifetime of a page that lives as long as its request."""

TAILS = -1
"""In place of a lifetime, where parts of a cached prefix are named: a snapshot of all tails."""


@dataclass(frozen=True)
class Paged:
    """State of every page.

    shape: of one page. dtype: of its elements. lifetime: ALL, or n > 0 where only the last n positions of a request are
    ever read. by_token: the page holds something for each token, with PAGE_SIZE as the second to last dimension, so
    that a range of positions can be copied. Otherwise it holds one thing for the whole page.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    lifetime: int = ALL
    by_token: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return _bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class PerSlot:
    """State of every slot: a tensor [slots, *shape], filled with ``fill`` at the start."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return _bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Remembered:
    """One input of a recurrence, of which a row remembers the latest positions.

    shape, dtype: of one position. last: how many positions before a pass's first token are read; 0: all since the
    snapshot. With ``last`` > 0 a pass must read a row's remembered inputs before it writes them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    last: int = 0

    def ring(self, width: int) -> int:
        """Positions that a row remembers where a round has up to ``width`` tokens of a row.

        A snapshot is up to PAGE_SIZE - 1 committed tokens older than a round's first one, and another ``width`` older
        than the next round's. Inputs since the snapshot have room for the next round's own tokens as well, so
        these may be written while the earlier ones are still read.
        """
        return self.last + width - 1 if self.last else PAGE_SIZE - 1 + 2 * width


@dataclass(frozen=True)
class Tail:
    """State of a recurrence: a snapshot at a multiple of PAGE_SIZE positions, and the raw inputs since.

    snapshot: shape and dtype of each tensor of a snapshot, by name. inputs: what a row remembers of each position.
    """

    snapshot: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    inputs: Mapping[str, Remembered]

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(_bytes(*each) for each in self.snapshot.values())

    def row_bytes(self, width: int) -> int:
        """Bytes of one row: its snapshot, and its inputs where a round has up to ``width`` tokens of a row."""
        inputs = sum(each.ring(width) * _bytes(each.shape, each.dtype) for each in self.inputs.values())
        return self.snapshot_bytes + inputs


Spec = Paged | PerSlot | Tail
Tree = Any
"""Dicts, lists and tuples of specs, or of what stands in their place."""


def leaves(tree: Tree) -> Iterator[Spec]:
    """Every spec of a tree, in order."""
    found: list[Spec] = []
    map_tree(tree, found.append)
    return iter(found)


def has_tails(tree: Tree) -> bool:
    """True if some state of the tree is a recurrence's."""
    return any(isinstance(spec, Tail) for spec in leaves(tree))


def map_tree(tree: Tree, change: Callable[[Spec], Any]) -> Tree:
    """The same tree with ``change(spec)`` in place of each spec. Raises TypeError for anything else."""
    if isinstance(tree, (Paged, PerSlot, Tail)):
        return change(tree)
    if isinstance(tree, dict):
        return {name: map_tree(part, change) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(part, change) for part in tree)
    raise TypeError(
        f"{type(tree).__name__} is no state spec: give Paged, PerSlot, Tail, or dicts, lists and tuples of them"
    )


def whole_requests(tree: Tree) -> Tree:
    """The same specs with every page kept as long as its request: a drafter may read later than the target."""
    return map_tree(tree, lambda spec: replace(spec, lifetime=ALL) if isinstance(spec, Paged) else spec)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
