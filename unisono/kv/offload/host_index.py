"""Index of host memory: which page or snapshot of which prefix is in which host slot. Bookkeeping only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

Part = tuple[int, bytes]
"""Kind (a window group or SNAPSHOTS), and the digest of the prefix that ends with the page or snapshot."""


@dataclass(slots=True)
class HostEntry:
    """An occupied host slot. complete: as in :class:`unisono.kv.prefix_tree.Node`. pins: number of users that need
    it."""

    slot: int
    complete: bool = True
    pins: int = 0


class HostIndex:
    """Host slots of each kind, evicted in least-recently-used order. counts: slots by kind."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.counts = dict(counts)
        self._free = {kind: list(range(count - 1, -1, -1)) for kind, count in counts.items()}
        self._held: dict[int, OrderedDict[bytes, HostEntry]] = {kind: OrderedDict() for kind in counts}
        self.dropped = 0  # evicted parts

    def __contains__(self, part: Part) -> bool:
        return part[1] in self._held.get(part[0], ())

    def used(self, kind: int) -> int:
        """Number of occupied slots."""
        return len(self._held[kind])

    def find(self, part: Part) -> HostEntry | None:
        """Return a part's entry and mark it as most recently used; None if absent."""
        kind, digest = part
        held = self._held.get(kind)
        if held is None or digest not in held:
            return None
        held.move_to_end(digest)
        return held[digest]

    def take(self, kind: int) -> int:
        """Return a slot for :meth:`put` or :meth:`give_back`; -1 if every slot is pinned or there are none."""
        free = self._free.get(kind)
        if free is None:
            return -1
        if not free:
            first = next((digest for digest, held in self._held[kind].items() if not held.pins), None)
            if first is None:
                return -1
            self.dropped += 1
            free.append(self._held[kind].pop(first).slot)
        return free.pop()

    def put(self, part: Part, slot: int, complete: bool) -> HostEntry:
        """Store a part in a taken slot; free the slot that held it before."""
        kind, digest = part
        before = self._held[kind].pop(digest, None)
        if before is not None:
            self._free[kind].append(before.slot)
        held = self._held[kind][digest] = HostEntry(slot, complete)
        return held

    def give_back(self, kind: int, slot: int) -> None:
        """Return a slot that was taken but not filled."""
        self._free[kind].append(slot)

    def clear(self) -> int:
        """Forget every unpinned part and return their number."""
        count = 0
        for kind, held in self._held.items():
            for digest in [digest for digest, one in held.items() if not one.pins]:
                self._free[kind].append(held.pop(digest).slot)
                count += 1
        return count
