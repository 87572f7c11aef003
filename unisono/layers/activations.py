"""What the readers of activations want of them, and kernels that give it: bf16 rows, rows in e4m3, or both.

A layer with e4m3 weights reads its inputs quantised. Whatever makes them asks :func:`wanted` of its readers once, when
the model is built, and then makes them so in its own launch. A wish is no promise: where the maker has no such kernel
it gives plain rows, and the reader quantises them itself, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from unisono.kernels import sigmoid_gate, silu_mul
from unisono.kernels.gemm.fp8_quantize import Quantised
from unisono.kernels.norm import gated_norm as gated
from unisono.kernels.norm.activation import SILU, Gate, gelu_mul, gelu_mul_fp8, sigmoid_gate_fp8, silu_mul_fp8


@dataclass(frozen=True)
class Projected:
    """Rows x [M, K] whose product [M, N] with one of their readers, a linear layer, has been computed with them.

    x: None where nobody else reads them.
    """

    x: torch.Tensor | None
    reader: object
    product: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.product.dtype


@dataclass(frozen=True)
class OfAllRanks:
    """Rows x [M, K] that were gathered where they were made: their reader, whose inputs are divided, does not."""

    x: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


Operand = torch.Tensor | Quantised
"""[M, K], as a product reads them."""

Activations = Operand | Projected | OfAllRanks
"""[M, K], as layers hand them on."""


@dataclass(frozen=True)
class Wish:
    """Activations in e4m3: ``group`` columns share a scale, 0: all. keep: as plain rows, too."""

    group: int
    keep: bool = False


def wish_of(reader: object) -> Wish | None:
    """What a linear layer or a stack of experts wants of its inputs; None: plain rows, as everything else does."""
    return getattr(reader, "wish", None)


def wanted(readers: Iterable[object]) -> Wish | None:
    """What all ``readers`` of one result want together: the first wish, and plain rows for those with another."""
    wishes = [wish_of(reader) for reader in readers]
    first = next((wish for wish in wishes if wish is not None), None)
    return first and Wish(first.group, keep=first.keep or any(wish != first for wish in wishes))


def readers_of(block: object) -> tuple[object, ...]:
    """What reads the input of a mixer or a feed-forward; one that does not say takes plain rows."""
    return getattr(block, "readers", (None,))


def plain(x: Activations) -> torch.Tensor:
    """The rows themselves. Raises ValueError where nobody was to read them."""
    if isinstance(x, torch.Tensor):
        return x
    if x.x is None:
        raise ValueError("these activations were made in e4m3 only: a reader of plain rows was not asked")
    return x.x


def fitting(x: Activations, wish: Wish | None) -> Operand:
    """x as a reader with this wish takes it."""
    return x if isinstance(x, Quantised) and wish is not None and wish.group == x.group else plain(x)


def gate_product(x: torch.Tensor, gate: Gate, wish: Wish | None) -> Activations:
    """``silu_mul(x)`` or ``gelu_mul(x)`` by ``gate``, SILU or GELU_TANH, for a reader with this wish."""
    plain, quantised = (silu_mul, silu_mul_fp8) if gate == SILU else (gelu_mul, gelu_mul_fp8)
    return plain(x) if wish is None or wish.keep else quantised(x, wish.group)


def sigmoid_gated(x: torch.Tensor, qkv: torch.Tensor, num_heads: int, wish: Wish | None) -> Activations:
    """``sigmoid_gate(x, qkv, num_heads)``, for a reader with this wish."""
    if wish is None or wish.keep:
        return sigmoid_gate(x, qkv, num_heads)
    return sigmoid_gate_fp8(x, qkv, num_heads, wish.group)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, wish: Wish | None) -> Activations:
    """``gated_norm(o, z, weight, eps)``, for a reader with this wish."""
    if wish is None or wish.keep or not gated.quantises(weight.shape[0], wish.group):
        return gated.gated_norm(o, z, weight, eps)
    return gated.gated_norm_fp8(o, z, weight, eps, wish.group)
