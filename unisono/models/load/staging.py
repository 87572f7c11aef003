"""Bytes of files and of the host on their way to a GPU: through pinned memory, many tensors in one copy.

Owns the pinned buffers. A copy from pages of a file is staged by the driver, one at a time whatever the threads, and
each waits for the device; here the reading thread fills pinned memory itself, and a tensor costs no wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

HALF = 1 << 23
"""Bytes of a pinned buffer: one is filled while the other is copied."""

ALIGN = 256
"""Bytes at a multiple of which a tensor begins on the device, if its bytes do not follow those of the one before it."""


class Source(Protocol):
    """Bytes that are copied as they are."""

    @property
    def nbytes(self) -> int: ...

    def copy(self, at: int, into: np.ndarray) -> None:
        """Bytes from ``at`` on, as many as ``into`` (uint8) has."""
        ...


@dataclass(frozen=True)
class FileBytes:
    """``nbytes`` bytes of an open file from ``start`` on."""

    opened: int
    start: int
    nbytes: int

    def ends_before(self, source: Source) -> bool:
        """Whether the source is what follows in the same file."""
        after = self.start + self.nbytes
        return isinstance(source, FileBytes) and (source.opened, source.start) == (self.opened, after)

    def copy(self, at: int, into: np.ndarray) -> None:
        """See :class:`Source`. Raises OSError where the file ends before them."""
        left, start = into.data, self.start + at
        while left:
            count = os.preadv(self.opened, [left], start)
            if not count:
                raise OSError(f"it ends at byte {start}, {len(left)} before it should")
            left, start = left[count:], start + count


@dataclass(frozen=True)
class HostBytes:
    """Bytes of the host's memory."""

    array: np.ndarray

    @property
    def nbytes(self) -> int:
        """See :class:`Source`."""
        return len(self.array)

    def copy(self, at: int, into: np.ndarray) -> None:
        """See :class:`Source`."""
        np.copyto(into, self.array[at : at + len(into)])  # without the interpreter's lock


@dataclass(frozen=True)
class Passing:
    """A tensor on its way: its bytes are those of the sources, one after the other."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: Sequence[Source]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Passing:
        """A tensor of the CPU."""
        array = tensor.reshape(-1).view(torch.uint8).numpy()
        return cls(tensor.dtype, tuple(tensor.shape), (HostBytes(array),))

    @property
    def nbytes(self) -> int:
        """Bytes of all sources."""
        return sum(source.nbytes for source in self.sources)


class Staging:
    """Two pinned buffers of one thread, and what copies from them to ``device`` are under way."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pins = self._device.type == "cuda"
        self._halves = [torch.empty(HALF, dtype=torch.uint8, pin_memory=self._pins) for _ in range(2)]
        self._copied = [torch.cuda.Event() if self._pins else None for _ in range(2)]
        self._turn = 0

    def to_device(self, tensors: Sequence[Passing]) -> list[torch.Tensor]:
        """Tensors -> the same on the device, parts of one allocation there."""
        placed: list[tuple[int, Source]] = []
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

    def _fill(self, buffer: torch.Tensor, sources: Iterable[tuple[int, Source]]) -> None:
        """Copy each source to its first byte in ``buffer``; they come in the order of these."""
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
        """The other buffer, once the device has what was in it."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._halves[self._turn].numpy()

    def _send(self, buffer: torch.Tensor, start: int, count: int) -> None:
        """Have the filled buffer copied to bytes ``start`` … ``start + count`` - 1."""
        buffer[start : start + count].copy_(self._halves[self._turn][:count], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))  # this thread's current device may be another


def _joined(sources: Iterable[tuple[int, Source]]) -> Iterator[tuple[int, Source]]:
    """The same bytes at the same places; those of a file that follow each other here and there are one source."""
    held: tuple[int, Source] | None = None
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
