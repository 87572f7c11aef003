"""What waits in host memory: which page or snapshot of which prefix lies in which host slot. Bookkeeping only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

Part = tuple[int, bytes]
"""Kind (a lifetime or TAILS), and the digest of the prefix that the page or snapshot ends."""


@dataclass(slots=True)
class Held:
    """A host slot with something in it. complete: as of :class:`unisono.kv.prefix_tree.Node`. pins: who needs it."""

    slot: int
    complete: bool = True
    pins: int = 0


class HostIndex:
    """The host slots of each kind; what was used least recently gives way.

    counts: slots by kind.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.counts = dict(counts)
        self._free = {kind: list(range(count - 1, -1, -1)) for kind, count in counts.items()}
        self._held: dict[int, OrderedDict[bytes, Held]] = {kind: OrderedDict() for kind in counts}
        self.dropped = 0  # parts that gave way

    def __contains__(self, part: Part) -> bool:
        return part[1] in self._held.get(part[0], ())

    def used(self, kind: int) -> int:
        """Slots that hold something."""
        return len(self._held[kind])

    def find(self, part: Part) -> Held | None:
        """Where a part lies; it counts as used now."""
        kind, digest = part
        held = self._held.get(kind)
        if held is None or digest not in held:
            return None
        held.move_to_end(digest)
        return held[digest]

    def take(self, kind: int) -> int:
        """A slot for :meth:`put` or :meth:`give_back`; -1 where every slot is pinned or there is none."""
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

    def put(self, part: Part, slot: int, complete: bool) -> Held:
        """A taken slot holds this part from now on; one that held it before is free."""
        kind, digest = part
        before = self._held[kind].pop(digest, None)
        if before is not None:
            self._free[kind].append(before.slot)
        held = self._held[kind][digest] = Held(slot, complete)
        return held

    def give_back(self, kind: int, slot: int) -> None:
        """Return a slot that was taken and not put."""
        self._free[kind].append(slot)

    def clear(self) -> int:
        """Forget everything that nobody needs; returns how many parts."""
        count = 0
        for kind, held in self._held.items():
            for digest in [digest for digest, one in held.items() if not one.pins]:
                self._free[kind].append(held.pop(digest).slot)
                count += 1
        return count
