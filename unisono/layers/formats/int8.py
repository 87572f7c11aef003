"""8-bit integer weight formats.

* :class:`Int8`: compressed-tensors' W8A8, a scale per output or projection, activations quantised to int8 by row, with
  or without a zero point, or with a fixed scale. ``kernels/gemm/int8.py`` has the arithmetic.
* :class:`PackedInt8`: compressed-tensors' W8A16, packed four to an int32 or stored as int8.
* :class:`GPTQ8`: GPTQ with 8 bits. Both store ``(q - zero) * scale``; activations are not quantised
  (``kernels/gemm/int8_weights.py``).

Experts have int8 activations by row, without a zero point; others are refused.

Shapes: N outputs, K inputs of a projection, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.kernels.gemm.fp8_quantize import INT8_ROWS
from unisono.kernels.gemm.int8 import exact_int8_rows, int8_linear
from unisono.kernels.gemm.int8_weights import int8_weight_linear, prove_int8_weight, rehearse_int8_weight
from unisono.kernels.norm.rms_norm import rms_norm_fp8
from unisono.layers.activations import Activations, InputFormat, Operand
from unisono.layers.formats.base import (
    FLOATS,
    ONE_VALUE,
    WHOLE_PROJECTION,
    LinearLayer,
    NormsAfter,
    StoredTensor,
    TensorLayout,
)
from unisono.layers.formats.experts_quantised import Int8Experts, IntegerExperts
from unisono.layers.formats.int4 import check_order

EACH = 4
"""Numbers in an int32."""

BY_OUTPUT = TensorLayout(lambda outputs, inputs: ((outputs, 1), (outputs,)), dim=0)


@dataclass(frozen=True)
class Int8(NormsAfter):
    """int8 weight [N, K] and a scale per output, int8 activations.

    by_projection: the checkpoint has one scale for all outputs of a projection. fixed: it has one for the activations,
    of merged projections the largest serves all. shifted: activations are quantised with a zero point.
    """

    by_projection: bool = False
    fixed: bool = False
    shifted: bool = False

    @property
    def name(self) -> str:
        """Name for messages."""
        kind = "with fixed scales" if self.fixed else "with zero points" if self.shifted else "too"
        return f"int8, activations {kind}"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        layout = ONE_VALUE if self.by_projection else BY_OUTPUT
        found = {
            "weight": StoredTensor(torch.int8, ("I8",), drawn=(-128, 128)),
            "weight_scale": StoredTensor(torch.float32, FLOATS, inputs=0, layout=layout),
        }
        if self.fixed:
            found["input_scale"] = StoredTensor(torch.float32, FLOATS, WHOLE_PROJECTION, inputs=0, layout=ONE_VALUE)
        if self.shifted:
            found["weight_sum"] = StoredTensor(torch.int32, (), inputs=0)
        return found

    @property
    def experts(self) -> Int8Experts | None:
        """Format of stacks of experts; None with fixed scales or zero points of activations."""
        return None if self.fixed or self.shifted else Int8Experts(self)

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales of a stack as the kernels take them."""
        return layer.weight, layer.weight_scale

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind != "weight":
            return stored.reshape(-1)
        return {kind: stored, "weight_sum": stored.sum(1, dtype=torch.int32)} if self.shifted else stored

    def input_format(self, layer: LinearLayer) -> InputFormat | None:
        """int8 rows, unless their scales are fixed or they have zero points."""
        return None if self.fixed or self.shifted else InputFormat(INT8_ROWS)

    def linear(self, layer: LinearLayer, x: Operand, residual: torch.Tensor | None) -> torch.Tensor:
        made: Any = layer
        sums = made.weight_sum if self.shifted else None
        fixed = made.input_scale.amax(0, keepdim=True) if self.fixed else None
        return int8_linear(x, layer.weight, made.weight_scale, sums, fixed, layer.bias, residual)

    def linear_norm_fp8(
        self, layer: LinearLayer, x: Operand, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        input_format: InputFormat,
    ) -> tuple[torch.Tensor, Activations]:  # fmt: skip
        """``linear_norm`` whose norm is emitted in ``input_format``."""
        total = self.linear(layer, x, residual)
        return total, rms_norm_fp8(total, weight, eps, input_format.group, input_format.keep)

    def prove(self, layer: LinearLayer) -> bool:
        """See :data:`unisono.kernels.gemm.int8.exact_int8_rows`; zero points keep the Triton kernel."""
        made: Any = layer
        return self.shifted or exact_int8_rows.prove(layer.weight, made.weight_scale, layer.dtype)

    def rehearse(self, layer: LinearLayer) -> None:
        made: Any = layer
        if not self.shifted:
            exact_int8_rows.rehearse(layer.weight, made.weight_scale, layer.dtype)


class _Weights8(NormsAfter):
    """W8A16. Subclasses name and read the tensors."""

    group: int
    weight_kind: str
    scale_kind: str
    zero_kind: str | None

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return int8_weight_linear(x, *self.operands(layer), layer.bias, residual)

    def prove(self, layer: LinearLayer) -> bool:
        """See :func:`unisono.kernels.gemm.int8_weights.prove_int8_weight`."""
        return prove_int8_weight(*self.operands(layer), layer.dtype)

    def rehearse(self, layer: LinearLayer) -> None:
        rehearse_int8_weight(*self.operands(layer), layer.dtype)

    @property
    def experts(self) -> IntegerExperts:
        """Format of stacks of experts."""
        return IntegerExperts(self)  # type: ignore[arg-type]

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """Weight, scales, zeros and group as the kernels take them."""
        weight: torch.Tensor = getattr(layer, self.weight_kind)
        zeros = getattr(layer, self.zero_kind) if self.zero_kind else None
        return weight, getattr(layer, self.scale_kind), zeros, weight.shape[-1] if self.group == -1 else self.group

    def _stored(
        self, words: str, weight: TensorLayout, scales: TensorLayout, zeros: TensorLayout
    ) -> dict[str, StoredTensor]:
        """The three tensors in these layouts. words: dtype of the stored weight."""
        inputs = 2**62 if self.group == -1 else self.group
        found = {
            self.weight_kind: StoredTensor(torch.uint8, (words,), layout=weight),
            self.scale_kind: StoredTensor(torch.float32, FLOATS, inputs=inputs, layout=scales),
        }
        if self.zero_kind:
            found[self.zero_kind] = StoredTensor(torch.int16, ("I32",), inputs=inputs, layout=zeros, drawn=(0, 256))
        return found

    def _groups(self, inputs: int) -> int:
        return 1 if self.group == -1 else -(-inputs // self.group)


@dataclass(frozen=True)
class GPTQ8(_Weights8):
    """GPTQ with 8 bits; ``formats/activation_order.py`` has activation order.

    zero_offset: added to stored zeros: 1 in version 1 of the format. listed: the group of each input is stored.
    """

    group: int = 128
    zero_offset: int = 1
    name: str = "GPTQ, 8 bits"
    listed: bool = True

    weight_kind, scale_kind, zero_kind = "qweight", "scales", "qzeros"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        weight = TensorLayout(lambda outputs, inputs: ((inputs // EACH, outputs),), dim=1)
        zeros = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs // EACH),), dim=1, packed=EACH)
        scales = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs),), dim=1)
        order = StoredTensor(None, ("I32",), layout=TensorLayout(lambda outputs, inputs: ((inputs,),)))
        return self._stored("I32", weight, scales, zeros) | ({"g_idx": order} if self.listed else {})

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind == "scales":
            return stored.t()
        if kind == "qweight":
            return self.numbers(stored)
        if kind == "qzeros":
            return _bytes_of(stored).t().to(torch.int16) + self.zero_offset
        check_order(stored, self.group)
        return {}

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Unpack the stored weight to numbers 0 … 255, uint8 [N, K]."""
        return _bytes_of(stored.t())

    def packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Value of the parameter from :meth:`numbers`."""
        return numbers


@dataclass(frozen=True)
class PackedInt8(_Weights8):
    """compressed-tensors' int8 weights without activations. packed: four to an int32, plus 128; else int8.

    symmetric: no zeros are stored.
    """

    group: int = -1
    symmetric: bool = True
    packed: bool = True
    name: str = "compressed-tensors, 8 bits"

    scale_kind = "weight_scale"

    @property
    def weight_kind(self) -> str:  # type: ignore[override]
        """Name of the weight's tensor."""
        return "weight_packed" if self.packed else "weight"

    @property
    def zero_kind(self) -> str | None:  # type: ignore[override]
        """Name of the zeros; None: there are none."""
        return None if self.symmetric else "weight_zero_point"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        each = EACH if self.packed else 1
        weight = TensorLayout(lambda outputs, inputs: ((outputs, inputs // each),), dim=0)
        zeros = TensorLayout(lambda outputs, inputs: ((outputs // EACH, self._groups(inputs)),), dim=0, packed=EACH)
        scales = TensorLayout(self._scale_shapes, dim=0)
        found = self._stored("I32" if self.packed else "I8", weight, scales, zeros)
        if self.packed:
            size = TensorLayout(lambda outputs, inputs: ((2,),))
            found["weight_shape"] = StoredTensor(None, ("I64", "I32"), layout=size)
        return found

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        groups = self._groups(inputs)
        return ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind == "weight_packed":
            return _bytes_of(stored)
        if kind == "weight":
            return (stored.to(torch.int16) + 128).to(torch.uint8)
        if kind == "weight_zero_point":
            return _bytes_of(stored.t()).t().to(torch.int16)
        if kind == "weight_scale":
            return stored.view(stored.shape[0], -1)
        return {}  # weight_shape repeats the packed weight's shape


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> the numbers 0 … 255 in them, low bits first, uint8 [rows, 4 n]."""
    return words.contiguous().view(torch.uint8)
