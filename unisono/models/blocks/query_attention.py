"""Attention over keys and values of another layer: draft models over their target's, Gemma 4's last layers over earlier
ones.

Shapes: T tokens of a pass, Hq query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.attention.base import KV
from unisono.attention.context import ForwardContext
from unisono.kv.specs import ALL, Tree
from unisono.models.blocks.layers import Attention, AttentionSpec
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class QuerySpec(AttentionSpec):
    """Attention of new queries over keys and values written by another layer.

    num_kv_heads: of that layer. pages: window group of its pages. reads: number of that layer if it is an earlier one
    of the same model; None: the caller passes its pages.
    """

    pages: int = ALL
    reads: int | None = None

    @property
    def window_group(self) -> int:
        return self.pages

    def build(self, builder: Builder) -> QueryAttention:
        return QueryAttention(self, builder)


class QueryAttention(Attention):
    """Attention without keys of its own: its state is another layer's pages, which it only reads.

    passed_over: modules that checkpoints may store for such a layer, and that are not read.
    """

    passed_over = ("qkv.k", "qkv.v", "k_norm")

    @property
    def kv_heads(self) -> int:
        return 0

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Raise TypeError: the formula needs another layer's keys."""
        raise TypeError("attention over another layer's keys has no reference")

    def state_specs(self) -> Tree:
        """None of its own."""
        return ()

    def _rotate(self, qkv: torch.Tensor, context: ForwardContext, kv: KV) -> torch.Tensor:
        nothing = kv.k[:, :0]  # a cache of no heads
        return super()._rotate(qkv, context, KV(nothing, nothing))
