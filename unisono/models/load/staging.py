"""Transfer of file and host bytes to a GPU through pinned memory, many tensors in one copy.

Owns the pinned buffers. The driver stages a copy from file pages itself, one at a time whatever the number of threads,
and each waits for the device. Here the reading thread fills pinned memory, and a tensor causes no wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

HALF = 1 << 21
"""Bytes of a pinned buffer: one is filled while the other is copied.

The buffers of eight threads fit in the processor's cache: reading the page cache into 2 MiB takes 0.11 s of CPU time
per GB, into 8 MiB 0.18 s (lab/2026-11-27-start-imports.md).
"""

ALIGN = 256
"""Alignment of a tensor on the device in bytes, unless its bytes follow those of the tensor before it."""


class ByteSource(Protocol):
    """Bytes to copy unchanged."""

    @property
    def nbytes(self) -> int: ...

    def copy(self, at: int, into: np.ndarray) -> None:
        """Copy bytes from ``at`` on into all of ``into`` (uint8)."""
        ...


@dataclass(frozen=True)
class FileBytes:
    """``nbytes`` bytes of an open file from ``start`` on."""

    opened: int
    start: int
    nbytes: int

    def ends_before(self, source: ByteSource) -> bool:
        """True if the source follows directly in the same file."""
        after = self.start + self.nbytes
        return isinstance(source, FileBytes) and (source.opened, source.start) == (self.opened, after)

    def copy(self, at: int, into: np.ndarray) -> None:
        """See :class:`ByteSource`. Raises OSError if the file ends early."""
        left, start = into.data, self.start + at
        while left:
            count = os.preadv(self.opened, [left], start)
            if not count:
                raise OSError(f"it ends at byte {start}, {len(left)} before it should")
            left, start = left[count:], start + count


@dataclass(frozen=True)
class HostBytes:
    """Bytes in host memory."""

    array: np.ndarray

    @property
    def nbytes(self) -> int:
        """See :class:`ByteSource`."""
        return len(self.array)

    def copy(self, at: int, into: np.ndarray) -> None:
        """See :class:`ByteSource`."""
        np.copyto(into, self.array[at : at + len(into)])  # releases the interpreter's lock


@dataclass(frozen=True)
class Passing:
    """A tensor in transfer: its bytes are those of the sources, concatenated."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: Sequence[ByteSource]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Passing:
        """A tensor on the CPU."""
        array = tensor.reshape(-1).view(torch.uint8).numpy()
        return cls(tensor.dtype, tuple(tensor.shape), (HostBytes(array),))

    @property
    def nbytes(self) -> int:
        """Bytes of all sources."""
        return sum(source.nbytes for source in self.sources)


class Staging:
    """Two pinned buffers of one thread, and their copies in flight to ``device``."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pins = self._device.type == "cuda"
        self._halves = [torch.empty(HALF, dtype=torch.uint8, pin_memory=self._pins) for _ in range(2)]
        self._copied = [torch.cuda.Event() if self._pins else None for _ in range(2)]
        self._turn = 0

    def to_device(self, tensors: Sequence[Passing]) -> list[torch.Tensor]:
        """Copy tensors to the device, into one allocation."""
        placed: list[tuple[int, ByteSource]] = []
        starts, total, before = [], 0, None
        for tensor in tensors:
            follows = isinstance(before, FileBytes) and bool(tensor.sources) and before.ends_before(tensor.sources[0])
            if not follows or total % tensor.dtype.itemsize:
                total = -(-total // ALIGN) * ALIGN
            starts.append(total)
            for source in tensor.sources:
                placed.append((total, source))
                total, before = total + source.nbytes, source
        buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
        self._fill(buffer, _joined(placed))
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _fill(self, buffer: torch.Tensor, sources: Iterable[tuple[int, ByteSource]]) -> None:
        """Copy each source to its offset in ``buffer``; offsets ascend."""
        sent, into = 0, self._next()
        for start, source in sources:
            read = 0
            while read < source.nbytes:
                at = start + read - sent
                if at >= HALF:
                    self._send(buffer, sent, HALF)
                    sent, into = sent + HALF, self._next()
                    continue
                count = min(HALF - at, source.nbytes - read)
                source.copy(read, into[at : at + count])
                read += count
        self._send(buffer, sent, len(buffer) - sent)

    def _next(self) -> np.ndarray:
        """The other buffer, after its last copy has finished."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._halves[self._turn].numpy()

    def _send(self, buffer: torch.Tensor, start: int, count: int) -> None:
        """Copy the filled buffer to bytes ``start`` … ``start + count`` - 1."""
        buffer[start : start + count].copy_(self._halves[self._turn][:count], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))  # this thread's current device may differ


def _joined(sources: Iterable[tuple[int, ByteSource]]) -> Iterator[tuple[int, ByteSource]]:
    """The same bytes at the same offsets, with adjacent parts of one file merged into one source."""
    held: tuple[int, ByteSource] | None = None
    for start, source in sources:
        if held is not None:
            at, last = held
            if start == at + last.nbytes and isinstance(last, FileBytes) and last.ends_before(source):
                held = at, FileBytes(last.opened, last.start, last.nbytes + source.nbytes)
                continue
            yield held
        held = start, source
    if held is not None:
        yield held
