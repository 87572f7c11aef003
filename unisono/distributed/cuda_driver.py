"""Calls of CUDA's driver through libcuda: reserved addresses, physical memory, and memory of other processes."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


PINNED, DEVICE, READ_WRITE, RECOMMENDED, OUT_OF_MEMORY = 1, 1, 3, 1, 2
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CUDA_ERROR_OUT_OF_MEMORY."""

Address, Size = ctypes.c_ulonglong, ctypes.c_size_t
"""CUdeviceptr (a handle of physical memory is as wide) and size_t."""

SIGNATURES = {
    "cuMemGetAllocationGranularity": (ctypes.POINTER(Size), ctypes.POINTER(AllocationProperties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(Address), Size, Size, Address, Address),
    "cuMemAddressFree": (Address, Size),
    "cuMemCreate": (ctypes.POINTER(Address), Size, ctypes.POINTER(AllocationProperties), Address),
    "cuMemRelease": (Address,),
    "cuMemMap": (Address, Size, Size, Address, Address),
    "cuMemUnmap": (Address, Size),
    "cuMemSetAccess": (Address, Size, ctypes.POINTER(AccessDescription), Size),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(Address), ctypes.POINTER(Size), Address),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(Address), IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (Address,),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@cache
def driver() -> ctypes.CDLL:
    """The library, with the types of arguments. Raises OSError without one."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver. Raises torch.OutOfMemoryError, and RuntimeError naming another error."""
    code = getattr(driver(), name)(*arguments)
    if code == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def driver_version() -> int:
    """Version of CUDA that the driver supports, as 1000 · major + 10 · minor."""
    found = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(found))
    return found.value


def memory_at(address: int, count: int, index: int) -> torch.Tensor:
    """``count`` bytes of a GPU from an address on, uint8; the caller keeps the memory."""
    device = torch.device("cuda", index)
    storage = torch._C._construct_storage_from_data_pointer(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,))
