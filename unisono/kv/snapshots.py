"""Snapshots of recurrent state kept by the prefix tree, so that a recurrence can continue from a cached prefix.

A snapshot is an id: a row of the store's snapshot tensors. It belongs to the node whose last token it follows. If all
ids are in use, the least recently used snapshot is evicted. A request that starts behind a snapshot gets a copy of it:
``DeviceState.begin`` requests it, ``StateStore.load_snapshot`` copies it.

A *guess* is a snapshot inside a prompt, taken before any other prompt branched there. Guesses without a hit hold at
most GUESS_SHARE of the ids once all are in use, so that they cannot evict the snapshots of conversations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from unisono.kv.prefix_tree import Node

GUESS_SHARE = 0.25
"""Fraction of the ids that guesses without a hit may keep when the pool is full."""


class SnapshotPool:
    """All snapshot ids, 0 … count - 1. on_evict: called with the node of an evicted snapshot, before it is removed."""

    def __init__(self, count: int, on_evict: Callable[[Node], None] = lambda node: None) -> None:
        self.count, self._on_evict = count, on_evict
        self.free = list(range(count - 1, -1, -1))
        self._held: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._guesses: OrderedDict[Node, None] = OrderedDict()  # oldest first
        self.in_transfer: set[Node] = set()  # nodes whose snapshot is being written by a transfer

    @property
    def has_spare(self) -> bool:
        """True if :meth:`take` returns an id."""
        return bool(self.free or self._held or self._guesses)

    def take(self) -> int:
        """Return an id for a new snapshot; -1 if the pool has no ids."""
        if not self.free and (self._held or self._guesses):
            guesses = len(self._guesses) > self.count * GUESS_SHARE or not self._held
            node, _ = (self._guesses if guesses else self._held).popitem(last=False)
            self._on_evict(node)
            self.free.append(node.snapshot)
            node.snapshot = -1
        return self.free.pop() if self.free else -1

    def attach(self, node: Node, snapshot: int, guess: bool = False) -> None:
        """Give a node a snapshot. If it already has one, that stays and the new id is freed."""
        if node.snapshot >= 0:
            self.free.append(snapshot)
        else:
            node.snapshot = snapshot
            if guess:
                self._guesses[node] = None
                return
        self.touch(node)

    def give_back(self, snapshot: int) -> None:
        """Free an id that was taken and not attached."""
        self.free.append(snapshot)

    def touch(self, node: Node) -> None:
        """Mark the node's snapshot as most recently used."""
        if node in self.in_transfer:
            return
        self._guesses.pop(node, None)
        self._held[node] = None
        self._held.move_to_end(node)

    def expect(self, node: Node) -> None:
        """Give a locked node an id whose snapshot a transfer is about to write. It is kept until :meth:`arrived`."""
        node.snapshot = self.take()
        self.in_transfer.add(node)

    def arrived(self, node: Node) -> None:
        """Mark the node's snapshot as written."""
        self.in_transfer.discard(node)
        self.touch(node)

    def forget(self, node: Node) -> None:
        """Free the snapshot id of a node that left the tree."""
        if node.snapshot >= 0:
            self.free.append(node.snapshot)
            node.snapshot = -1
            self._guesses.pop(node, None)
            self._held.pop(node, None)
