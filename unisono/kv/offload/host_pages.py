"""One rank's copies of cached state in host memory, and the transfers between host and device.

A host slot holds one page of a window group or one snapshot of the recurrent state. Rank 0 decides the contents of
slots (``unisono/kv/offload/offloader.py``); this module executes its moves. On a GPU, pages leave through a staging
buffer: one gather on the pass stream, after which the pages may be overwritten, and one copy to pinned memory on a
second stream. They return on a third stream. Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unisono.kv.store import StateStore

Move = tuple[int, np.ndarray, np.ndarray]
"""Kind (a window group or SNAPSHOTS), device page or snapshot ids, and as many host slots; int32."""

STAGING_BYTES = 64 << 20
"""Bytes of each of the three staging buffers on a GPU, unless one snapshot is larger."""


def kind_bytes(store: StateStore, kind: int) -> int:
    """Bytes of one page of a window group, or of one snapshot for SNAPSHOTS."""
    return sum(part[0].numel() * part.element_size() for part in store.parts(kind))


def make_host_pages(store: StateStore, counts: Mapping[int, int]) -> HostPages:
    """Allocate host slots for this number of pages of each kind. Raises RuntimeError if the memory cannot be pinned."""
    return PinnedPages(store, counts) if store.device.type == "cuda" else HostPages(store, counts)


class HostPages:
    """Synchronous copies, for a device that shares the host's memory.

    counts: host slots of each kind. seconds: time spent copying, by direction.
    """

    def __init__(self, store: StateStore, counts: Mapping[int, int]) -> None:
        self._parts = {kind: store.parts(kind) for kind in counts}
        self.host = {
            kind: [torch.empty((count, *part.shape[1:]), dtype=part.dtype) for part in self._parts[kind]]
            for kind, count in counts.items()
        }
        self.seconds = {"out": 0.0, "in": 0.0}
        self._last = 0

    def move_out(self, moves: Sequence[Move]) -> None:
        """Copy pages to host slots, in the state left by the passes launched so far."""
        began = time.perf_counter()
        for kind, pages, slots in moves:
            source, target = _index(pages), _index(slots)
            for part, host in zip(self._parts[kind], self.host[kind], strict=True):
                host.index_copy_(0, target, part.index_select(0, source))
        self.seconds["out"] += time.perf_counter() - began

    def move_in(self, ticket: int, moves: Sequence[Move]) -> None:
        """Copy host slots to pages that no pass reads before :meth:`arrived`. Tickets ascend."""
        began = time.perf_counter()
        for kind, pages, slots in moves:
            source, target = _index(slots), _index(pages)
            for part, host in zip(self._parts[kind], self.host[kind], strict=True):
                part.index_copy_(0, target, host.index_select(0, source))
        self._last = ticket
        self.seconds["in"] += time.perf_counter() - began

    def poll(self) -> int:
        """Return the last ticket whose pages are all written on this rank."""
        return self._last

    def arrived(self, ticket: int) -> None:
        """Let passes launched from now on read the pages of all tickets up to this one."""

    def wait_for_copies(self, kind: int, slot: int) -> None:
        """Wait until no copy uses a host slot. Any thread may call it."""

    def close(self) -> None:
        """Free the memory."""
        self.host.clear()
        self._parts.clear()


@dataclass
class _Copy:
    """A copy on a stream: its (kind, slot) pairs, start and end events."""

    ticket: int
    slots: set[tuple[int, int]]
    began: torch.cuda.Event
    done: torch.cuda.Event


class PinnedPages(HostPages):
    """Asynchronous copies between a GPU and pinned memory, on their own streams."""

    def __init__(self, store: StateStore, counts: Mapping[int, int]) -> None:
        super().__init__(store, counts)
        self._device = store.device
        for tensors in self.host.values():
            for tensor in tensors:
                _pin(tensor)
        size = max(STAGING_BYTES, *(part[0].numel() * part.element_size() for p in self._parts.values() for part in p))
        self._staging = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(3)]
        self._free: list[torch.cuda.Event | None] = [None, None]  # after which each of the first two may be rewritten
        self._turn = 0
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._outs: deque[_Copy] = deque()
        self._ins: deque[_Copy] = deque()

    def move_out(self, moves: Sequence[Move]) -> None:
        main = torch.cuda.current_stream(self._device)
        self._after(self._out, self._ins, moves)
        began = _recorded(self._out)
        for kind, pages, slots in moves:
            for part, host in zip(self._parts[kind], self.host[kind], strict=True):
                for some in _chunks(len(pages), self._most(part)):
                    self._gather(main, part, host, pages[some], slots[some])
        self._outs.append(_Copy(0, _named(moves), began, _recorded(self._out)))

    def _gather(
        self, main: torch.cuda.Stream, part: torch.Tensor, host: torch.Tensor, pages: np.ndarray, slots: np.ndarray
    ) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        if (free := self._free[turn]) is not None:
            main.wait_event(free)
        staged = self._staged(turn, part, len(pages))
        torch.index_select(part, 0, _index(pages).to(self._device, non_blocking=True), out=staged)
        self._out.wait_event(_recorded(main))
        with torch.cuda.stream(self._out):
            for at, slot, count in _runs(slots):
                host[slot : slot + count].copy_(staged[at : at + count], non_blocking=True)
        self._free[turn] = _recorded(self._out)

    def move_in(self, ticket: int, moves: Sequence[Move]) -> None:
        self._after(self._in, self._outs, moves)
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # they may still write aborted requests' pages
        began = _recorded(self._in)
        with torch.cuda.stream(self._in):
            for kind, pages, slots in moves:
                for part, host in zip(self._parts[kind], self.host[kind], strict=True):
                    for some in _chunks(len(pages), self._most(part)):
                        staged = self._staged(2, part, len(pages[some]))
                        for at, slot, count in _runs(slots[some]):
                            staged[at : at + count].copy_(host[slot : slot + count], non_blocking=True)
                        part.index_copy_(0, _index(pages[some]).to(self._device, non_blocking=True), staged)
        self._ins.append(_Copy(ticket, _named(moves), began, _recorded(self._in)))

    def poll(self) -> int:
        for copy in self._ins:
            if not copy.done.query():
                break
            self._last = copy.ticket
        return self._last

    def arrived(self, ticket: int) -> None:
        main = torch.cuda.current_stream(self._device)
        while self._ins and self._ins[0].ticket <= ticket:
            copy = self._ins.popleft()
            main.wait_event(copy.done)
            if copy.done.query():  # always true on rank 0
                self.seconds["in"] += copy.began.elapsed_time(copy.done) / 1000

    def wait_for_copies(self, kind: int, slot: int) -> None:
        for copy in (*self._outs, *self._ins):
            if (kind, slot) in copy.slots:
                copy.done.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for tensors in self.host.values():
            for tensor in tensors:
                torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._staging.clear()
        super().close()

    def _after(self, stream: torch.cuda.Stream, copies: deque[_Copy], moves: Sequence[Move]) -> None:
        """Make a stream wait for the copies of the other direction that use the same host slots."""
        while self._outs and self._outs[0].done.query():
            copy = self._outs.popleft()
            self.seconds["out"] += copy.began.elapsed_time(copy.done) / 1000
        named = _named(moves)
        for copy in copies:
            if not named.isdisjoint(copy.slots):
                stream.wait_event(copy.done)

    def _most(self, part: torch.Tensor) -> int:
        """Pages that fit a staging buffer."""
        return self._staging[0].numel() // (part[0].numel() * part.element_size())

    def _staged(self, buffer: int, part: torch.Tensor, pages: int) -> torch.Tensor:
        """Start of a staging buffer as [pages, specs, words]."""
        size = pages * part[0].numel() * part.element_size()
        return self._staging[buffer][:size].view(part.dtype).view(pages, *part.shape[1:])


def _pin(tensor: torch.Tensor) -> None:
    """Page-lock a tensor's memory. PyTorch's own pinned allocator would round it up to a power of two."""
    size = tensor.numel() * tensor.element_size()
    if size and int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)) != 0:
        raise RuntimeError(
            f"{size >> 20} MiB of host memory cannot be pinned: lower --cpu-offload-gb, or raise the limit on locked "
            "memory (ulimit -l)"
        )


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _named(moves: Sequence[Move]) -> set[tuple[int, int]]:
    return {(kind, slot) for kind, _, slots in moves for slot in slots.tolist()}


def _index(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _chunks(count: int, most: int) -> Iterator[slice]:
    return (slice(at, at + most) for at in range(0, count, most))


def _runs(slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(index, first slot, count) of each run of consecutive slots."""
    edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for at, end in itertools.pairwise(edges):
        yield at, int(slots[at]), end - at
