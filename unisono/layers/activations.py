"""What the consumers of activations want of them, and kernels that give it: bf16 rows, rows in e4m3, or both.

A layer with e4m3 weights reads its inputs quantised. Whatever makes them asks :func:`common_input_format` of its consumers once, when
the model is built, and then makes them so in its own launch. A input_format is no promise: where the maker has no such kernel
it gives plain rows, and the consumer quantises them itself, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from unisono.kernels import sigmoid_gate, silu_mul
from unisono.kernels.gemm.fp8_quantize import Quantised
from unisono.kernels.norm import gated_norm as gated
from unisono.kernels.norm.activation import sigmoid_gate_fp8, silu_mul_fp8


@dataclass(frozen=True)
class Projected:
    """Rows x [M, K] whose product [M, N] with one of their consumers, a linear layer, has been computed with them.

    x: None where nobody else reads them.
    """

    x: torch.Tensor | None
    consumer: object
    product: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.product.dtype


@dataclass(frozen=True)
class OfAllRanks:
    """Rows x [M, K] that were gathered where they were made: their consumer, whose inputs are divided, does not."""

    x: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


Operand = torch.Tensor | Quantised
"""[M, K], as a product reads them."""

Activations = Operand | Projected | OfAllRanks
"""[M, K], as layers hand them on."""


@dataclass(frozen=True)
class InputFormat:
    """Activations in e4m3: ``group`` columns share a scale, 0: all. keep: as plain rows, too."""

    group: int
    keep: bool = False


def input_format_of(consumer: object) -> InputFormat | None:
    """What a linear layer or a stack of experts wants of its inputs; None: plain rows, as everything else does."""
    return getattr(consumer, "input_format", None)


def common_input_format(consumers: Iterable[object]) -> InputFormat | None:
    """What all ``consumers`` of one result want together: the first input_format, and plain rows for those with another."""
    formats = [input_format_of(consumer) for consumer in consumers]
    first = next((input_format for input_format in formats if input_format is not None), None)
    return first and InputFormat(first.group, keep=first.keep or any(input_format != first for input_format in formats))


def consumers_of(block: object) -> tuple[object, ...]:
    """What reads the input of a mixer or a feed-forward; one that does not say takes plain rows."""
    return getattr(block, "consumers", (None,))


def plain(x: Activations) -> torch.Tensor:
    """The rows themselves. Raises ValueError where nobody was to read them."""
    if isinstance(x, torch.Tensor):
        return x
    if x.x is None:
        raise ValueError("these activations were made in e4m3 only: a consumer of plain rows was not asked")
    return x.x


def in_format(x: Activations, input_format: InputFormat | None) -> Operand:
    """x as a consumer with this input_format takes it."""
    return x if isinstance(x, Quantised) and input_format is not None and input_format.group == x.group else plain(x)


def silu_product(x: torch.Tensor, input_format: InputFormat | None) -> Activations:
    """``silu_mul(x)``, for a consumer with this input_format."""
    return silu_mul(x) if input_format is None or input_format.keep else silu_mul_fp8(x, input_format.group)


def sigmoid_gated(x: torch.Tensor, qkv: torch.Tensor, num_heads: int, input_format: InputFormat | None) -> Activations:
    """``sigmoid_gate(x, qkv, num_heads)``, for a consumer with this input_format."""
    if input_format is None or input_format.keep:
        return sigmoid_gate(x, qkv, num_heads)
    return sigmoid_gate_fp8(x, qkv, num_heads, input_format.group)


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, input_format: InputFormat | None
) -> Activations:
    """``gated_norm(o, z, weight, eps)``, for a consumer with this input_format."""
    if input_format is None or input_format.keep or not gated.quantises(weight.shape[0], input_format.group):
        return gated.gated_norm(o, z, weight, eps)
    return gated.gated_norm_fp8(o, z, weight, eps, input_format.group)
