"""Description of a tensor in GPU memory of another process; ``distributed/cuda_ipc.py`` makes and opens them."""

from __future__ import annotations

import msgspec


class SharedTensor(msgspec.Struct, frozen=True):
    """A contiguous tensor in an allocation of another process.

    device: UUID of the GPU. handle: CUDA's IPC handle of the allocation, hexadecimal. offset: of the tensor in it,
    bytes. dtype: torch's name without ``torch.``.
    """

    device: str
    handle: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
