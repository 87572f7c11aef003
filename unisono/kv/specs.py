"""Declarations of the state that a module keeps on the device.

A module's ``state_specs()`` returns a tree (dicts, lists, tuples) of specs. The store allocates it and returns the same
tree with tensors in place of the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

PAGE_SIZE = 16
"""Tokens per page. Fixed: recurrent state and attention splits lie on the same grid."""

PADDING_PAGE = 0
"""Page that receives the writes of padding tokens; never owned by a request."""

ALL = 0
"""Window group of pages that are kept as long as their request."""

SNAPSHOTS = -1
"""Kind used in place of a window group when parts of a cached prefix are named: a snapshot of all recurrent state."""


@dataclass(frozen=True)
class Paged:
    """State stored per page.

    shape: shape of one page.
    dtype: element type.
    window_group: ALL, or n > 0 if only the last n positions of a request are ever read.
    by_token: True if the page has a row per token, with PAGE_SIZE as its second to last dimension, so that a range of
        positions can be copied. False if it has one value for the whole page.
    ranks: N > 1 if the pages are divided among N ranks, each of which allocates 1 / N of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    window_group: int = ALL
    by_token: bool = True
    ranks: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on a rank, on average."""
        return -(-_bytes(self.shape, self.dtype) // self.ranks)


@dataclass(frozen=True)
class PerSlot:
    """State stored per slot: a tensor [slots, *shape], initialised with ``fill``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return _bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Remembered:
    """One input of a recurrence, buffered for the latest positions of each row.

    shape, dtype: of one position.
    last: number of positions read before a pass's first token; 0: all since the snapshot. With ``last`` > 0 a pass must
        read a row's buffered inputs before it writes them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    last: int = 0

    def ring(self, width: int) -> int:
        """Number of buffered positions per row, for rounds of up to ``width`` tokens per row.

        A snapshot is up to PAGE_SIZE - 1 committed tokens older than a round's first token, and another ``width`` older
        than the next round's. Inputs since the snapshot also leave room for the next round's own tokens, so these can
        be written while the earlier ones are still read.
        """
        return self.last + width - 1 if self.last else PAGE_SIZE - 1 + 2 * width


@dataclass(frozen=True)
class Recurrent:
    """Recurrent state: a snapshot at a multiple of PAGE_SIZE positions, and the raw inputs since then.

    snapshot: name -> shape and dtype of each tensor of a snapshot.
    inputs: name -> buffered input of each position.
    """

    snapshot: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    inputs: Mapping[str, Remembered]

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(_bytes(*each) for each in self.snapshot.values())

    def row_bytes(self, width: int) -> int:
        """Bytes of one row: its snapshot and its buffered inputs, for rounds of up to ``width`` tokens per row."""
        inputs = sum(each.ring(width) * _bytes(each.shape, each.dtype) for each in self.inputs.values())
        return self.snapshot_bytes + inputs


Spec = Paged | PerSlot | Recurrent
Tree = Any
"""Dicts, lists and tuples of specs, or of the values that replace them."""


def leaves(tree: Tree) -> Iterator[Spec]:
    """Yield every spec of a tree, in order."""
    found: list[Spec] = []
    map_tree(tree, found.append)
    return iter(found)


def has_recurrent_state(tree: Tree) -> bool:
    """Return True if the tree contains recurrent state."""
    return any(isinstance(spec, Recurrent) for spec in leaves(tree))


def map_tree(tree: Tree, change: Callable[[Spec], Any]) -> Tree:
    """Return the tree with ``change(spec)`` in place of each spec. Raises TypeError for any other leaf."""
    if isinstance(tree, (Paged, PerSlot, Recurrent)):
        return change(tree)
    if isinstance(tree, dict):
        return {name: map_tree(part, change) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(part, change) for part in tree)
    raise TypeError(
        f"{type(tree).__name__} is not a state spec; use Paged, PerSlot, Recurrent, or dicts, lists and tuples of them"
    )


def whole_requests(tree: Tree) -> Tree:
    """Return the specs with every page kept as long as its request: a drafter may read later than the target."""
    return map_tree(tree, lambda spec: replace(spec, window_group=ALL) if isinstance(spec, Paged) else spec)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
