"""The KV cache's tensors, and how many pages fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_SIZE = 16
"""Tokens per page."""

PADDING_PAGE = 0
"""Takes the writes of padding tokens; never owned by a request."""


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values take: layers, KV heads, head size, element type."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * PAGE_SIZE * self.head_dim * self.dtype.itemsize


class KVCache:
    """Per layer a pair (keys, values), each ``[pages, kv_heads, PAGE_SIZE, head_dim]``.

    A page of one head is contiguous: attention streams it, and a page is the unit of ownership. Of the pages the first
    ``num_pages`` are the pool's; ``path_pages`` behind them belong to the paths of a tree (``kernels/tree_paths.py``).
    """

    def __init__(self, shape: KVShape, num_pages: int, device: torch.device, path_pages: int = 0) -> None:
        self.shape, self.num_pages, self.path_pages = shape, num_pages, path_pages
        dims = (shape.num_layers, 2, num_pages + path_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        # Zeros, so that the padding page is finite before anything was written to it.
        self._storage = torch.zeros(dims, dtype=shape.dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self._storage]

    @property
    def flat(self) -> torch.Tensor:
        """Keys and values of all layers, [2 · layers, pages, kv_heads, PAGE_SIZE, head_dim]."""
        return self._storage.flatten(0, 1)

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes
