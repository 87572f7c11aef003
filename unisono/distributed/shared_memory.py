"""Gathers between processes of one host through shared memory, with counters instead of locks.

Each rank has two places for its data and a counter of its gathers. A gather writes to one of the places in turn,
increments its counter, waits until every rank has counted as far, and reads. A place is written again two gathers
later: by then every rank has counted the gather between, so it has read this one. Only its owner writes a counter.

Layout of the memory: for each rank a line of COUNTERS int64, then for each rank two places of PLACE bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time

import numpy as np
import torch

from unisono.types import EngineDead

COUNTERS = 8
"""int64 counters of each rank, one cache line: gathers, executed commands, and a flag to give up."""

SAID, EXECUTED, GIVE_UP = 0, 1, 2

PLACE = 1 << 20
"""Bytes that a rank writes at once; larger data take several turns."""

SPINS = 50
"""Polls of the counters before a waiting rank sleeps between polls."""

NAP = 1e-6
"""Seconds of such a sleep; the system makes about 50 µs of it. With more processes than cores, ranks that sleep are far
faster than ranks that yield: 0.3 against 1.4 ms a gather with 10 processes on 2 cores.
"""


def make_memory(ranks: int) -> int:
    """Return a descriptor of new shared memory without a name, for other processes to inherit."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), _bytes(ranks))
        return os.dup(file.fileno())


def _bytes(ranks: int) -> int:
    return ranks * (8 * COUNTERS + 2 * PLACE)


class SharedMemory:
    """The memory as seen by one rank; on GPUs it carries counters only."""

    name, why = "shared memory", "the ranks are processes of one host"

    def __init__(self, descriptor: int, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._map = mmap.mmap(descriptor, _bytes(count))
        whole = np.frombuffer(self._map, np.uint8)
        self.counters = whole[: 8 * COUNTERS * count].view(np.int64).reshape(count, COUNTERS)
        places = whole[8 * COUNTERS * count :].reshape(count, 2, PLACE)
        self._places = torch.from_numpy(places)
        self._written = self.counters[:, SAID]
        self._fence = threading.Lock()

    def progress(self) -> list[tuple[int, int]]:
        """Return (commands executed, gathers done) of each rank."""
        return [(int(line[EXECUTED]), int(line[SAID])) for line in self.counters]

    def executed(self) -> None:
        """Count a command of this rank."""
        self.counters[self.index, EXECUTED] += 1

    def give_up(self) -> None:
        """Have every rank that waits in a gather raise."""
        self.counters[self.index, GIVE_UP] = 1

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`unisono.distributed.gather.Transport`."""
        rows, columns = x.shape
        if not x.numel():
            return x.new_empty(rows, self.count * columns)
        mine = x.view(torch.uint8).flatten()
        parts = torch.empty((self.count, mine.numel()), dtype=torch.uint8)
        for start in range(0, mine.numel(), PLACE):
            self._exchange(mine[start : start + PLACE], parts[:, start : start + PLACE])
        found = parts.view(x.dtype).view(self.count, rows, columns)
        return found.transpose(0, 1).reshape(rows, self.count * columns)

    def _exchange(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        """Write ``mine`` [bytes] and read all parts [N, bytes]."""
        number, size = int(self._written[self.index]) + 1, mine.numel()
        places = self._places[:, number % 2, :size]
        places[self.index].copy_(mine)
        self._order()
        self._written[self.index] = number
        self._wait(number)
        self._order()
        parts.copy_(places)

    def _order(self) -> None:
        """Order memory accesses before and after: a lock is a fence on processors that need one."""
        with self._fence:
            pass

    def _wait(self, number: int) -> None:
        written, looks = self._written, 0
        while int(written.min()) < number:
            looks += 1
            if looks < SPINS:
                continue
            if self.counters[:, GIVE_UP].any():
                raise EngineDead("a rank of the model has failed.")
            time.sleep(NAP)

    def close(self) -> None:
        """Forget the memory; it is freed with the last process that has it."""
        self._places = torch.empty(0)
        self._written = self.counters = np.zeros((self.count, COUNTERS), np.int64)
