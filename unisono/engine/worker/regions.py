"""Regions of memory that can be freed and got back at the same addresses, so that captured graphs stay valid.

A GPU's region is a reserved range of addresses (CUDA's virtual memory management, called through libcuda) with physical
memory mapped into it, a chunk at a time. A CPU's region is an anonymous mapping whose pages are given back.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Protocol

import torch

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


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _DEVICE, _READ_WRITE, _RECOMMENDED, _OUT_OF_MEMORY = 1, 1, 3, 1, 2
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CUDA_ERROR_OUT_OF_MEMORY."""

_u64, _size = ctypes.c_ulonglong, ctypes.c_size_t
_SIGNATURES = {
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_size), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_u64), _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemCreate": (ctypes.POINTER(_u64), _size, ctypes.POINTER(_Properties), _u64),
    "cuMemRelease": (_u64,),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemUnmap": (_u64, _size),
    "cuMemSetAccess": (_u64, _size, ctypes.POINTER(_Access), _size),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: object) -> None:
    """Call a function of the driver. Raises torch.OutOfMemoryError, and RuntimeError naming another error."""
    code = getattr(_driver(), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has no memory left for a region")
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class DeviceRegion:
    """Addresses of a GPU, and the physical memory mapped there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.synchronize(index)  # creates the context
        self._device = torch.device("cuda", index)
        self._properties = _Properties(_PINNED, 0, _Location(_DEVICE, index), None)
        granularity = _size()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), _RECOMMENDED)
        self.nbytes = max(1, -(-nbytes // granularity.value)) * granularity.value
        address = _u64()
        _call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, granularity.value, 0, 0)
        self._address = address.value
        self._chunks: list[tuple[int, int]] = []  # (start in the region, bytes), in order
        self._committed = 0

    def commit(self, end: int) -> None:
        """See :class:`Region`. A failure leaves the chunks that were mapped before."""
        while self._committed < min(end, self.nbytes):
            count = min(CHUNK, self.nbytes - self._committed)
            start, handle = self._address + self._committed, _u64()
            _call("cuMemCreate", ctypes.byref(handle), count, ctypes.byref(self._properties), 0)
            try:
                _call("cuMemMap", start, count, 0, handle, 0)
            finally:
                _call("cuMemRelease", handle)  # the mapping keeps the memory
            self._chunks.append((self._committed, count))
            self._committed += count
            access = _Access(_Location(_DEVICE, self._device.index), _READ_WRITE)
            _call("cuMemSetAccess", start, count, ctypes.byref(access), 1)

    def part(self, start: int, count: int) -> torch.Tensor:
        """See :class:`Region`."""
        storage = torch._C._construct_storage_from_data_pointer(self._address + start, self._device, count)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (count,), (1,))

    def free(self) -> None:
        """See :class:`Region`."""
        torch.cuda.synchronize(self._device)
        while self._chunks:
            start, count = self._chunks.pop()
            _call("cuMemUnmap", self._address + start, count)
        self._committed = 0

    def close(self) -> None:
        """See :class:`Region`."""
        self.free()
        if self._address:
            _call("cuMemAddressFree", self._address, self.nbytes)
        self._address = 0


def make_region(nbytes: int, device: torch.device) -> Region:
    """A region of at least ``nbytes`` bytes without memory."""
    return DeviceRegion(nbytes, device) if device.type == "cuda" else HostRegion(nbytes)
