"""Tensors of the host on their way to a GPU: through pinned memory, many small ones in one copy.

Owns the pinned buffers. A copy from pages of a file is staged by the driver, one at a time whatever the threads, and
each waits for the device; here the reading thread fills pinned memory itself, and a tensor costs no wait.
``weights.read`` calls it in each of its threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

HALF = 1 << 23
"""Bytes of a pinned buffer: one is filled while the other is copied."""

BATCH = 1 << 25
"""Bytes of tensors that are copied together; a larger one goes alone."""

ALIGN = 256
"""Bytes at a multiple of which each tensor begins on the device."""


def staged(found: Iterable[tuple[str, torch.Tensor]], device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
    """The same names and tensors, in order, on ``device``."""
    staging = Staging(device)
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    held = 0
    for name, tensor in found:
        if tensors and held + tensor.nbytes > BATCH:
            yield from zip(names, staging.to_device(tensors), strict=True)
            names, tensors, held = [], [], 0
        names.append(name)
        tensors.append(tensor)
        held += tensor.nbytes
    if tensors:
        yield from zip(names, staging.to_device(tensors), strict=True)


class Staging:
    """Two pinned buffers of one thread, and what copies from them to ``device`` are under way."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pins = self._device.type == "cuda"
        self._halves = [torch.empty(HALF, dtype=torch.uint8, pin_memory=self._pins) for _ in range(2)]
        self._copied = [torch.cuda.Event() if self._pins else None for _ in range(2)]
        self._turn = 0

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the CPU -> the same on the device, parts of one allocation there."""
        starts, total = [], 0
        for tensor in tensors:
            starts.append(total)
            total += -(-tensor.nbytes // ALIGN) * ALIGN
        buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
        sent, into = 0, self._next()
        for start, tensor in zip(starts, tensors, strict=True):
            source = tensor.reshape(-1).view(torch.uint8).numpy()  # numpy copies without the interpreter's lock
            read = 0
            while read < len(source):
                at = start + read - sent
                if at >= HALF:
                    self._send(buffer, sent, HALF)
                    sent, into = sent + HALF, self._next()
                    continue
                count = min(HALF - at, len(source) - read)
                np.copyto(into[at : at + count], source[read : read + count])
                read += count
        self._send(buffer, sent, total - sent)
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

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
