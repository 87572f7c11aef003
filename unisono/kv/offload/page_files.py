"""KV offload to a directory: parts in host memory are also written to files, which outlive the engine.

This is rank 0's bookkeeping: which parts of prefixes have files, pending writes and reads, and the disk budget. Each
rank has its own files (``part_files.py``) of the same parts. A file that does not match its digest or engine on any
rank is removed on all. Files of other engines lie in other folders and are left alone. The engine polls the threads
between its steps. A part stays pinned in host memory while it is written, and a host slot being read into belongs to no
part.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from unisono.kv.offload.host_index import HostEntry, HostIndex, Part
from unisono.kv.offload.part_files import BAD, PENDING, PartResult

MOST_WRITES = 64
"""Pending writes, at most; further parts are not written."""

ASK_SECONDS = 0.005
"""Interval between requests to the other ranks, which block."""


class Files(Protocol):
    """The files of all ranks. folder: rank 0's folder. ranks: number of ranks."""

    folder: Path
    ranks: int

    def write(self, part: Part, slot: int, complete: bool) -> None: ...
    def read(self, part: Part, slot: int) -> None: ...
    def remove(self, parts: Sequence[Part]) -> None: ...

    def poll(self) -> Iterable[PartResult]:
        """Results of rank 0's threads since the last call."""

    def outcomes(self, requests: Sequence[tuple[Part, bool]]) -> list[list[int]]:
        """Outcomes by rank: see :meth:`unisono.kv.offload.part_files.PartFiles.outcomes`."""


class PageFiles:
    """Index of the files of all ranks.

    sizes: bytes of each rank's file for the parts present on all ranks, least recently used first.
    budget: bytes of all ranks' files, at most.

    Only one engine at a time should use a directory; two with the same identity would each apply the budget on their
    own.
    """

    def __init__(self, files: Files, sizes: Mapping[Part, int], budget: int, index: HostIndex) -> None:
        self._files, self._budget, self._index = files, budget, index
        self._sizes: OrderedDict[Part, int] = OrderedDict(sizes)
        self._own_bytes = sum(sizes.values())
        self.written = self.read = self.bad = self.skipped = 0
        self.seconds = {"out": 0.0, "in": 0.0}
        self._writing: dict[Part, HostEntry] = {}
        self._reading: dict[Part, tuple[int, list[Read]]] = {}
        self._own: dict[tuple[Part, bool], PartResult] = {}  # results of this rank, not yet requested from the others
        self._ask_from = 0.0
        self._shrink()

    def __contains__(self, part: Part) -> bool:
        return part in self._sizes

    @property
    def sizes(self) -> Mapping[Part, int]:
        """Bytes of rank 0's file of each part, least recently used first."""
        return self._sizes

    @property
    def folder(self) -> Path:
        """Rank 0's folder."""
        return self._files.folder

    @property
    def bytes(self) -> int:
        """Bytes of the files of all ranks, whose shares of a part have the same size."""
        return self._own_bytes * self._files.ranks

    def keep(self, part: Part, held: HostEntry) -> None:
        """Write a part that has come to host memory to a file, unless it has one. Returns at once."""
        if part in self._sizes:
            self._sizes.move_to_end(part)
        elif part in self._writing or len(self._writing) >= MOST_WRITES:
            self.skipped += 1
        else:
            held.pins += 1
            self._writing[part] = held
            self._files.write(part, held.slot, held.complete)

    def fetch(self, part: Part, waiting: Read) -> bool:
        """Start reading a file into a host slot. Returns at once: True if ``waiting`` has to wait for it."""
        if part in self._reading:
            self._reading[part][1].append(waiting)
            return True
        if part not in self._sizes or (slot := self._index.take(part[0])) < 0:
            return False
        self._sizes.move_to_end(part)
        self._reading[part] = slot, [waiting]
        self._files.read(part, slot)
        return True

    def poll(self) -> None:
        """Process the results of all ranks' threads."""
        for done in self._files.poll():
            self.seconds["out" if done.written else "in"] += done.seconds
            self._own[done.part, done.written] = done
        if not self._own or (self._files.ranks > 1 and time.monotonic() < self._ask_from):
            return
        requests = list(self._own)
        by_rank = self._files.outcomes(requests)
        self._ask_from = time.monotonic() + ASK_SECONDS
        for each, outcomes in zip(requests, zip(*by_rank, strict=True), strict=True):
            if PENDING in outcomes:
                continue
            outcome = BAD if BAD in outcomes else self._own[each].outcome
            del self._own[each]
            (self._written if each[1] else self._was_read)(each[0], outcome)

    def _written(self, part: Part, size: int) -> None:
        self._writing.pop(part).pins -= 1
        if size != BAD:
            self.written += 1
            self._own_bytes += size - self._sizes.pop(part, 0)
            self._sizes[part] = size
            self._shrink()
        elif self._files.ranks > 1:
            self._files.remove([part])  # on the ranks that have written it

    def _was_read(self, part: Part, outcome: int) -> None:
        slot, waiters = self._reading.pop(part)
        if outcome == BAD:
            self.bad += 1
            self._index.give_back(part[0], slot)
            self._remove([part])
        elif part in self._index:  # it came from the device in the meantime
            self._index.give_back(part[0], slot)
        else:
            self.read += 1
            self._index.put(part, slot, bool(outcome))
        for waiting in waiters:
            waiting.parts.discard(part)

    @property
    def busy(self) -> bool:
        """True if a request waits for a file."""
        return bool(self._reading)

    def clear(self) -> None:
        """Remove every file."""
        self._remove(list(self._sizes))

    def close(self) -> None:
        """Wait for pending writes and reads."""
        while self._writing or self._reading:
            time.sleep(ASK_SECONDS)
            self.poll()

    def _shrink(self) -> None:
        gone, left = [], self.bytes
        for part, size in self._sizes.items():
            if left <= self._budget:
                break
            gone.append(part)
            left -= size * self._files.ranks
        self._remove(gone)

    def _remove(self, parts: Sequence[Part]) -> None:
        self._own_bytes -= sum(self._sizes.pop(part, 0) for part in parts)
        if parts:
            self._files.remove(parts)


@dataclass(eq=False)
class Read:
    """Parts being read from files for one waiting request."""

    parts: set[Part] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """True once every part was read or has failed."""
        return not self.parts
