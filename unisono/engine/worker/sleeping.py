"""Memory of one worker that sleep frees and wake gets back at the same addresses: weights, and pages of the KV cache.

Level 1 copies the weights to host memory. Level 2 drops those that a checkpoint has, and copies the others. On a CPU
level 1 leaves the weights where they are, which is host memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import nn

from unisono.engine.worker.regions import Region, make_region
from unisono.kernels.gemm.cpu import forget_copies

ALIGN = 256
"""Alignment of a tensor in a region, bytes."""

HOST_BYTES = 1 << 28
"""Bytes of a pinned buffer of saved weights; a power of two, since torch rounds up to one."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Free weights and pages. level: 1 saves the weights in host memory, 2 drops those of the checkpoint.

    No pass may be in flight.
    """

    level: int


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Get memory back: that of weights, filled if it was saved, and that of pages, zeroed. Answered."""

    weights: bool
    pages: bool


SleepCommand = Sleep | WakeUp


class SleepingMemory:
    """Regions of a worker's weights and pages.

    device: of the worker. freed: bytes that the last :meth:`sleep` freed, by tag.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: Region | None = None
        self._parts: dict[int, tuple[int, int]] = {}  # address of a storage -> its bytes in the region of weights
        self._parameters: list[torch.Tensor] = []
        self._pages: list[tuple[Region, int]] = []  # with the bytes of the tensor in each
        self._host: list[torch.Tensor] = []
        self._saved: list[tuple[int, int]] = []
        self.weights_asleep = self.pages_asleep = False
        self.freed: dict[str, int] = {}

    # ---- placing ------------------------------------------------------------------------------

    @torch.no_grad()
    def place(self, modules: Iterable[nn.Module]) -> None:
        """Move the parameters and buffers of modules into a region; every tensor that shares their memory follows.

        Called once, before addresses are captured. Raises torch.OutOfMemoryError if the device cannot hold the largest
        tensor twice.
        """
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        self._parameters = list({id(t): t for t in tensors if t.device.type == self._device.type}.values())
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self._parameters) if s.nbytes()}
        starts, total = {}, 0
        for address, storage in storages.items():
            starts[address] = total
            total += -(-storage.nbytes() // ALIGN) * ALIGN
        region = self._weights = make_region(total, self._device)
        aliases = _tensors_in(storages, self._device)
        since = 0
        for address in list(storages):
            storage, start = storages.pop(address), starts[address]
            count = storage.nbytes()
            if start - since >= HOST_BYTES and self._device.type == "cuda":
                torch.cuda.empty_cache()  # else moved weights would take their memory twice
                since = start
            region.commit(start + count)
            part = region.part(start, count)
            part.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (count,), (1,)))
            for tensor in aliases.pop(address):
                tensor.set_(part.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            self._parts[part.data_ptr()] = (start, count)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def zeros(self, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in a region of pages."""
        count = prod(dims) * dtype.itemsize
        region = make_region(count, self._device)
        region.commit(region.nbytes)
        self._pages.append((region, count))
        return region.part(0, count).zero_().view(dtype).view(dims) if count else torch.empty(dims, dtype=dtype)

    def free_pages(self) -> None:
        """Free all regions of pages. Their tensors may not be used again."""
        while self._pages:
            self._pages.pop()[0].close()

    # ---- sleeping -----------------------------------------------------------------------------

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all regions, by tag."""
        weights = 0 if self._weights is None else self._weights.nbytes
        return {"weights": weights, "kv_cache": sum(region.nbytes for region, _ in self._pages)}

    def sleep(self, level: int, loaded: Iterable[torch.Tensor]) -> None:
        """Free the memory. loaded: the weights that a checkpoint has, which level 2 does not save."""
        on_host = self._device.type == "cpu"
        if level == 2:
            dropped = {t.untyped_storage().data_ptr() for t in loaded}
            kept = sorted(span for address, span in self._parts.items() if address not in dropped)
        else:
            kept = [] if self._weights is None or on_host else [(0, self._weights.nbytes)]
        nbytes = self.nbytes
        if self._weights is not None and not (level == 1 and on_host):
            self._saved = kept
            self._copy(to_host=True)
            self._weights.free()
            for parameter in self._parameters:
                forget_copies(parameter)
            self.weights_asleep = True
        else:
            nbytes["weights"] = 0
        for region, _ in self._pages:
            region.free()
        self.pages_asleep = True
        self.freed = nbytes
        if not on_host:
            gc.collect()
            torch.cuda.empty_cache()

    def wake_weights(self) -> None:
        """Get the weights' memory back: saved ones with their values, the others zeroed. Raises
        torch.OutOfMemoryError."""
        if self._weights is None or not self.weights_asleep:
            return
        self._weights.commit(self._weights.nbytes)
        if self._saved != [(0, self._weights.nbytes)]:
            self._weights.part(0, self._weights.nbytes).zero_()
        self._copy(to_host=False)
        self.weights_asleep = False

    def wake_pages(self) -> None:
        """Get the pages' memory back, zeroed. Raises torch.OutOfMemoryError."""
        if not self.pages_asleep:
            return
        for region, count in self._pages:
            region.commit(region.nbytes)
            if self._device.type == "cuda" and count:
                region.part(0, count).zero_()
        self.pages_asleep = False

    def close(self) -> None:
        """Free all regions. No tensor in them may be used again."""
        self.free_pages()
        if self._weights is not None:
            self._weights.close()
        self._weights = None
        self._parameters, self._host = [], []

    def _copy(self, to_host: bool) -> None:
        """Copy the saved spans of the weights to pinned memory, or back. The buffers are kept for the next time."""
        for number, offset, start, count in _pieces(self._saved):
            while len(self._host) <= number:
                self._host.append(torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
            assert self._weights is not None
            host, part = self._host[number][offset : offset + count], self._weights.part(start, count)
            (host if to_host else part).copy_(part if to_host else host, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _pieces(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Cut spans (start, bytes) to buffers: (buffer, offset in it, start, bytes)."""
    filled = 0
    for start, count in spans:
        while count:
            number, offset = divmod(filled, HOST_BYTES)
            take = min(count, HOST_BYTES - offset)
            yield number, offset, start, take
            filled, start, count = filled + take, start + take, count - take


def _tensors_in(storages: Iterable[int], device: torch.device) -> dict[int, list[torch.Tensor]]:
    """Every tensor of this process in storages at these addresses: parameters, their slices, tied ones."""
    found: dict[int, list[torch.Tensor]] = {address: [] for address in storages}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided and each.device.type == device.type:
            with contextlib.suppress(RuntimeError):  # a fake tensor (torch.compile's) has no memory
                found.get(each.untyped_storage().data_ptr(), []).append(each)
    return found


def modules_of(owner: object) -> Iterator[nn.Module]:
    """The modules in the attributes of a drafter, and of its parts."""
    seen: set[int] = set()
    waiting: list[Any] = [owner]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            yield each
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
        elif type(each).__module__.startswith("unisono.drafters"):
            waiting += vars(each).values() if hasattr(each, "__dict__") else ()
