"""Activation formats: a consumer declares bf16, e4m3 or int8 inputs; the producer emits them.

A layer with e4m3 or int8 weights reads quantised inputs. When the model is built, the producer's format is set by
:func:`common_input_format` of its consumers, and the producer's own launch then emits it. A format is a request, not a
guarantee: where the kernel of the present pass cannot emit it (attention of mixed passes and of some prompts, a fused
layer tail, rows with adapters), the producer emits plain rows, and the consumer quantises them itself, with the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from unisono.kernels import sigmoid_gate, silu_mul
from unisono.kernels.gemm.fp8_quantize import Quantised
from unisono.kernels.norm import gated_norm as gated
from unisono.kernels.norm.activation import (
    SILU,
    ExpertGate,
    gate_rows,
    gate_rows_fp8,
    gelu_mul,
    gelu_mul_fp8,
    sigmoid_gate_fp8,
    silu_mul_fp8,
)


@dataclass(frozen=True)
class Projected:
    """Rows x [M, K] together with their product [M, N] with one of their consumers, a linear layer.

    x: None if no other consumer reads them.
    """

    x: torch.Tensor | None
    consumer: object
    product: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.product.dtype


@dataclass(frozen=True)
class OfAllRanks:
    """Rows x [M, K] gathered by their producer: a consumer with divided inputs does not gather them again."""

    x: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


Operand = torch.Tensor | Quantised
"""Input [M, K] of a GEMM."""

Activations = Operand | Projected | OfAllRanks
"""Activations [M, K] passed between layers."""


@dataclass(frozen=True)
class InputFormat:
    """e4m3 activations: ``group`` columns share a scale, 0: all columns; INT8_ROWS: int8. keep: emit plain rows too."""

    group: int
    keep: bool = False


def input_format_of(consumer: object) -> InputFormat | None:
    """Input format of a linear layer or a stack of experts; None: plain rows, as for any other consumer."""
    return getattr(consumer, "input_format", None)


def common_input_format(consumers: Iterable[object]) -> InputFormat | None:
    """Format that serves all ``consumers`` of one tensor: the first e4m3 format, plus plain rows for consumers with
    another."""
    formats = [input_format_of(consumer) for consumer in consumers]
    first = next((input_format for input_format in formats if input_format is not None), None)
    return first and InputFormat(first.group, keep=first.keep or any(input_format != first for input_format in formats))


def consumers_of(block: object) -> tuple[object, ...]:
    """Consumers of a mixer's or feed-forward's input; a block that does not declare any takes plain rows."""
    return getattr(block, "consumers", (None,))


def plain(x: Activations) -> torch.Tensor:
    """The plain rows. Raises ValueError if the producer did not emit them."""
    if isinstance(x, torch.Tensor):
        return x
    if x.x is None:
        raise ValueError("activations are e4m3 only, but a consumer read plain rows; set keep=True on the producer")
    return x.x


def in_format(x: Activations, input_format: InputFormat | None) -> Operand:
    """x as a consumer with this input format reads it."""
    return x if isinstance(x, Quantised) and input_format is not None and input_format.group == x.group else plain(x)


def gate_product(x: torch.Tensor, gate: ExpertGate, input_format: InputFormat | None) -> Activations:
    """``silu_mul(x)`` or ``gelu_mul(x)`` by ``gate``, SILU or GELU_TANH, emitted in ``input_format``."""
    plain, quantised = (silu_mul, silu_mul_fp8) if gate == SILU else (gelu_mul, gelu_mul_fp8)
    return plain(x) if input_format is None or input_format.keep else quantised(x, input_format.group)


def gated_rows(gate: torch.Tensor, up: torch.Tensor, kind: ExpertGate, input_format: InputFormat | None) -> Activations:
    """:func:`gate_product` of two tensors with rows of any stride."""
    if input_format is None or input_format.keep:
        return gate_rows(gate, up, kind.gelu)
    return gate_rows_fp8(gate, up, kind.gelu, input_format.group)


def sigmoid_gated(x: torch.Tensor, qkv: torch.Tensor, num_heads: int, input_format: InputFormat | None) -> Activations:
    """``sigmoid_gate(x, qkv, num_heads)``, emitted in ``input_format``."""
    if input_format is None or input_format.keep:
        return sigmoid_gate(x, qkv, num_heads)
    return sigmoid_gate_fp8(x, qkv, num_heads, input_format.group)


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, input_format: InputFormat | None,
    sigmoid: bool = False,
) -> Activations:  # fmt: skip
    """``gated_norm(o, z, weight, eps, sigmoid)``, emitted in ``input_format``."""
    if input_format is None or input_format.keep or not gated.quantises(weight.shape[0], input_format.group):
        return gated.gated_norm(o, z, weight, eps, sigmoid)
    return gated.gated_norm_fp8(o, z, weight, eps, input_format.group, sigmoid)
