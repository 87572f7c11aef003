"""Tensors in the GPU memory of another process of this host, opened by CUDA's IPC handles.

A trainer calls :func:`share` for its tensors and sends the descriptions, which are plain data: unlike the pickles of
``torch.multiprocessing`` they run no code where they are read. It keeps the tensors until the engine has answered.
"""

from __future__ import annotations

import ctypes
import logging
import math

import torch

from unisono.distributed.cuda_driver import Address, IpcHandle, Size, call, memory_at
from unisono.types import ConfigError
from unisono.types.shared_tensor import SharedTensor

logger = logging.getLogger(__name__)

LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)

HANDLE_BYTES = ctypes.sizeof(IpcHandle)


def share(tensor: torch.Tensor) -> SharedTensor:
    """Describe a tensor for another process, once the device has finished its work.

    Raises ConfigError for a tensor that is not contiguous on a GPU, and for memory that CUDA does not share, such as
    that of PyTorch's expandable segments.
    """
    if tensor.device.type != "cuda" or not tensor.is_contiguous():
        raise ConfigError(
            f"tensor {list(tensor.shape)} on {tensor.device}: only contiguous tensors on GPUs are shared."
        )
    torch.cuda.synchronize(tensor.device)
    handle, base, size = IpcHandle(), Address(), Size()
    with torch.cuda.device(tensor.device):
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), tensor.data_ptr())
        try:
            call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except RuntimeError as error:
            raise ConfigError(
                f"{error}: CUDA does not share this memory; turn PyTorch's expandable_segments off in the trainer."
            ) from None
    uuid, dtype = _uuid(tensor.device.index), str(tensor.dtype).removeprefix("torch.")
    return SharedTensor(uuid, bytes(handle.bytes).hex(), tensor.data_ptr() - base.value, tuple(tensor.shape), dtype)


class OpenedTensors:
    """Allocations of other processes that are open here, each once."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, str], int] = {}

    def open(self, shared: SharedTensor) -> torch.Tensor:
        """The tensor, readable until :meth:`close`. Raises ConfigError for a description that no memory here fits."""
        index = _index(shared.device)
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # creates the context
            address = self._address(index, shared.handle)
            base, size = Address(), Size()
            call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        dtype = _dtype(shared.dtype)
        count = math.prod(shared.shape) * dtype.itemsize
        inside = shared.offset >= 0 and min(shared.shape, default=1) >= 1 and shared.offset + count <= size.value
        if not inside or (address + shared.offset) % dtype.itemsize:
            raise ConfigError(
                f"offset {shared.offset} and shape {list(shared.shape)} do not fit an allocation of {size.value} bytes."
            )
        return memory_at(address + shared.offset, count, index).view(dtype).view(shared.shape)

    def close(self) -> None:
        """Close all allocations, once the device has finished its work. Their tensors may not be used again.

        One that cannot be closed, such as that of a process that has ended, is logged.
        """
        opened, self._opened = self._opened, {}
        for (index, _), address in opened.items():
            with torch.cuda.device(index):
                torch.cuda.synchronize()
                try:
                    call("cuIpcCloseMemHandle", address)
                except RuntimeError as error:
                    logger.warning("%s: memory of another process was not closed.", error)

    def _address(self, index: int, handle: str) -> int:
        if (known := self._opened.get((index, handle))) is not None:
            return known
        try:
            data = bytes.fromhex(handle)
        except ValueError:
            data = b""
        if len(data) != HANDLE_BYTES:
            raise ConfigError(
                f"handle {handle[:40]!r} is no CUDA IPC handle: give {HANDLE_BYTES} bytes in hexadecimal."
            )
        address = Address()
        try:
            call("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(data), LAZY_PEER_ACCESS)
        except RuntimeError as error:
            raise ConfigError(
                f"{error}: the handle's memory cannot be opened; its process must run and hold it."
            ) from None
        self._opened[index, handle] = address.value
        return address.value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found in INTEGERS):
        raise ConfigError(f"dtype {name!r} is unknown; give a name of torch, such as bfloat16.")
    return found


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int:
    """Index of a GPU that this process sees. Raises ConfigError."""
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid.removeprefix("GPU-"):
            return index
    raise ConfigError(f"GPU {uuid} is not visible to this process; it sees {torch.cuda.device_count()} GPUs.")
