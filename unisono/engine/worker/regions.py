"""Regions of memory that can be freed and got back at the same addresses, so that captured graphs stay valid.

A GPU's region is a reserved range of addresses (CUDA's virtual memory management, called through libcuda) with physical
memory mapped into it, a chunk at a time. A CPU's region is an anonymous mapping whose pages are given back.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import torch

from unisono.distributed.cuda_driver import (
    DEVICE,
    PINNED,
    READ_WRITE,
    RECOMMENDED,
    AccessDescription,
    Address,
    AllocationProperties,
    Location,
    Size,
    call,
    memory_at,
)

CHUNK = 1 << 30
"""Bytes of physical memory that are created and mapped in one step."""


class Region(Protocol):
    """``nbytes`` bytes of one device."""

    nbytes: int

    def commit(self, end: int) -> None:
        """Map memory for the first ``end`` bytes. Raises torch.OutOfMemoryError."""
        ...

    def part(self, start: int, count: int) -> torch.Tensor:
        """Bytes ``start`` … ``start + count`` - 1, uint8 [count], in a storage of their own."""
        ...

    def free(self) -> None:
        """Give all memory back; the addresses stay reserved. Nothing may run on the device."""
        ...

    def close(self) -> None:
        """Free the addresses, too. No tensor in the region may be used again."""
        ...


class HostRegion:
    """Pages of this process; those that are given back read as zeros."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self._pages = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def commit(self, end: int) -> None:
        """Do nothing: the kernel commits a page at its first write."""

    def part(self, start: int, count: int) -> torch.Tensor:
        """See :class:`Region`. The tensor keeps the pages alive."""
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=count, offset=start)

    def free(self) -> None:
        """See :class:`Region`."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Free the pages; the kernel frees the addresses with the last tensor."""
        self.free()


class DeviceRegion:
    """Addresses of a GPU, and the physical memory mapped there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.synchronize(index)  # creates the context
        self._device = torch.device("cuda", index)
        self._properties = AllocationProperties(PINNED, 0, Location(DEVICE, index), None)
        granularity = Size()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), RECOMMENDED)
        self.nbytes = max(1, -(-nbytes // granularity.value)) * granularity.value
        address = Address()
        call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, granularity.value, 0, 0)
        self._address = address.value
        self._chunks: list[tuple[int, int]] = []  # (start in the region, bytes), in order
        self._committed = 0

    def commit(self, end: int) -> None:
        """See :class:`Region`. A failure leaves the chunks that were mapped before."""
        while self._committed < min(end, self.nbytes):
            count = min(CHUNK, self.nbytes - self._committed)
            start, handle = self._address + self._committed, Address()
            call("cuMemCreate", ctypes.byref(handle), count, ctypes.byref(self._properties), 0)
            try:
                call("cuMemMap", start, count, 0, handle, 0)
            finally:
                call("cuMemRelease", handle)  # the mapping keeps the memory
            self._chunks.append((self._committed, count))
            self._committed += count
            access = AccessDescription(Location(DEVICE, self._device.index), READ_WRITE)
            call("cuMemSetAccess", start, count, ctypes.byref(access), 1)

    def part(self, start: int, count: int) -> torch.Tensor:
        """See :class:`Region`."""
        return memory_at(self._address + start, count, self._device.index)

    def free(self) -> None:
        """See :class:`Region`."""
        torch.cuda.synchronize(self._device)
        while self._chunks:
            start, count = self._chunks.pop()
            call("cuMemUnmap", self._address + start, count)
        self._committed = 0

    def close(self) -> None:
        """See :class:`Region`."""
        self.free()
        if self._address:
            call("cuMemAddressFree", self._address, self.nbytes)
        self._address = 0


def make_region(nbytes: int, device: torch.device) -> Region:
    """A region of at least ``nbytes`` bytes without memory."""
    return DeviceRegion(nbytes, device) if device.type == "cuda" else HostRegion(nbytes)
