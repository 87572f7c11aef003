"""Tensors as bytes, for embeddings and hidden states that pass between rooms and processes.

``frontend`` packs embeddings and unpacks hidden states; the engine unpacks embeddings; ``http`` reads hidden states as
numbers. Torch and NumPy are imported inside functions: an API process needs neither before it starts its engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.types.outputs import Vectors

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of vectors."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name, one of DTYPES."""
    import torch

    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def pack(rows: torch.Tensor) -> Vectors:
    """Pack rows [n, size] of one of DTYPES, on any device."""
    import torch

    rows = rows.detach().cpu().contiguous()
    data = rows.view(torch.uint8).numpy().tobytes() if rows.numel() else b""
    return Vectors(str(rows.dtype).removeprefix("torch."), rows.shape[1], data)


def unpack(vectors: Vectors) -> torch.Tensor:
    """Return the rows [n, size], on the CPU."""
    import torch

    dtype = dtype_of(vectors.dtype)
    if not vectors.data:
        return torch.empty((0, vectors.size), dtype=dtype)
    return torch.frombuffer(bytearray(vectors.data), dtype=dtype).view(-1, vectors.size)


def numbers(vectors: Vectors) -> np.ndarray:
    """Return the rows [n, size] in float32, without torch. It holds each number of every dtype exactly."""
    import numpy as np

    if not vectors.data:
        return np.empty((0, vectors.size), np.float32)
    if vectors.dtype == "bfloat16":  # the upper half of a float32
        rows = (np.frombuffer(vectors.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        rows = np.frombuffer(vectors.data, vectors.dtype).astype(np.float32)
    return rows.reshape(-1, vectors.size)
