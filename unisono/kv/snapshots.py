"""Snapshots of tails that the prefix tree keeps, so that a cached prefix can be continued by a recurrence.

A snapshot is an id: a row of the store's snapshot tensors. It hangs on the node whose last token it follows. Where all
ids are in use, the snapshot that was used least recently gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from unisono.kv.prefix_tree import Node


class SnapshotPool:
    """All snapshot ids, 0 … count - 1. on_evict: called with a node whose snapshot gives way, which still has it."""

    def __init__(self, count: int, on_evict: Callable[[Node], None] = lambda node: None) -> None:
        self.count, self._on_evict = count, on_evict
        self.free = list(range(count - 1, -1, -1))
        self._held: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.coming: set[Node] = set()  # nodes whose snapshot is being written by a transfer

    @property
    def has_spare(self) -> bool:
        """Whether :meth:`take` would give an id."""
        return bool(self.free or self._held)

    def take(self) -> int:
        """An id for a new snapshot, -1 where there are none at all."""
        if not self.free and self._held:
            node, _ = self._held.popitem(last=False)
            self._on_evict(node)
            self.free.append(node.snapshot)
            node.snapshot = -1
        return self.free.pop() if self.free else -1

    def attach(self, node: Node, snapshot: int) -> None:
        """Hang a snapshot on a node. One that is there already stays, and the new one is given back."""
        if node.snapshot >= 0:
            self.free.append(snapshot)
        else:
            node.snapshot = snapshot
        self.touch(node)

    def give_back(self, snapshot: int) -> None:
        """Return an id that was taken and not attached."""
        self.free.append(snapshot)

    def touch(self, node: Node) -> None:
        """The node's snapshot was used."""
        if node in self.coming:
            return
        self._held[node] = None
        self._held.move_to_end(node)

    def expect(self, node: Node) -> None:
        """Give a locked node an id whose snapshot a transfer is about to write; it is kept until :meth:`arrived`."""
        node.snapshot = self.take()
        self.coming.add(node)

    def arrived(self, node: Node) -> None:
        """The snapshot is written."""
        self.coming.discard(node)
        self.touch(node)

    def forget(self, node: Node) -> None:
        """The node left the tree: its snapshot's id is free."""
        if node.snapshot >= 0:
            self.free.append(node.snapshot)
            node.snapshot = -1
            del self._held[node]
