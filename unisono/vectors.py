"""Tensors as bytes, for embeddings and hidden states that pass between rooms and processes.

``frontend`` packs embeddings and unpacks hidden states; the engine unpacks embeddings.
"""

from __future__ import annotations

import torch

from unisono.types import Vectors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pack(rows: torch.Tensor) -> Vectors:
    """Pack rows [n, size] of one of DTYPES, on any device."""
    rows = rows.detach().cpu().contiguous()
    data = rows.view(torch.uint8).numpy().tobytes() if rows.numel() else b""
    return Vectors(str(rows.dtype).removeprefix("torch."), rows.shape[1], data)


def unpack(vectors: Vectors) -> torch.Tensor:
    """Return the rows [n, size], on the CPU."""
    dtype = DTYPES[vectors.dtype]
    if not vectors.data:
        return torch.empty((0, vectors.size), dtype=dtype)
    return torch.frombuffer(bytearray(vectors.data), dtype=dtype).view(-1, vectors.size)
