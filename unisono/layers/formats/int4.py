"""4-bit weight formats: AWQ, GPTQ and compressed-tensors' packed integers, repacked to one layout while loading.

All store weights as ``(q - zero) * scale`` with a scale per output and ``group`` inputs; activations are not quantised.
They differ in how a checkpoint packs eight numbers into an int32:

=====================  ==========================  =============================  =============================
format                 weight                      zeros                          scales
=====================  ==========================  =============================  =============================
AWQ                    qweight [K, N / 8],         qzeros [G, N / 8], same order  scales [G, N]
                       outputs 0 2 4 6 1 3 5 7
GPTQ                   qweight [K / 8, N],         qzeros [G, N / 8] in order,    scales [G, N]
                       inputs in order             less 1 in version 1
compressed-tensors     weight_packed [N, K / 8],   weight_zero_point [N / 8, G]   weight_scale [N, G]
                       inputs in order, plus 8     in order, plus 8; or none
=====================  ==========================  =============================  =============================

:func:`read_awq` reads AWQ's ``quantization_config``, ``formats/gptq.py`` those of GPTQ and AutoRound,
``formats/compressed_tensors.py`` that of compressed-tensors. Shapes: N outputs, K inputs of a projection, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.config.preflight.quantization import check_awq
from unisono.kernels.gemm.int4 import int4_linear, prove_int4, rehearse_int4
from unisono.layers.formats.base import FLOATS, PLAIN, LinearLayer, NormsAfter, StoredTensor, TensorLayout, WeightFormat
from unisono.layers.formats.experts_quantised import Int4Experts
from unisono.layers.formats.module_patterns import named
from unisono.types import CheckpointError

EACH = 8
"""Numbers in an int32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output index (of eight) stored in bits 0 … 3, 4 … 7, and so on."""

IN_ORDER = tuple(range(EACH))


def unpacked(words: torch.Tensor, dim: int, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Unpack eight numbers 0 … 15 from each int32 along ``dim``: uint8, that dimension eight times as long.

    order: place among the eight of the number in bits 0 … 3, 4 … 7, and so on.
    """
    shifts = torch.tensor([4 * order.index(place) for place in IN_ORDER], dtype=torch.int32, device=words.device)
    numbers = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & 15
    return numbers.flatten(-2).to(torch.uint8).movedim(-1, dim)


def check_order(groups: torch.Tensor, group: int) -> None:
    """Raise CheckpointError unless the group of each input [K] is that of its place. group: inputs of one; -1: all."""
    in_order = torch.arange(groups.numel(), device=groups.device) // (group if group > 0 else 2**31)
    if not torch.equal(groups.long(), in_order):
        raise CheckpointError(
            "g_idx: the inputs are grouped in the order of their activations, and quantization_config has "
            "desc_act=false. Set desc_act to true in config.json."
        )


def packed_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 … 15 [N, K] -> the layout of ``kernels/gemm/int4.py`` [N, K / 2]."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


@dataclass(frozen=True)
class Int4(NormsAfter):
    """Shared part of the 4-bit formats. group: inputs that share a scale, -1 for all. Subclasses name and read the
    tensors."""

    group: int = 128
    name: str = ""

    weight_kind = "qweight"
    scale_kind = "scales"

    def zero_kind(self) -> str | None:
        """Name of the zeros; None: there are none."""
        return "qzeros"

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return int4_linear(x, *self.operands(layer), layer.bias, residual)

    def prove(self, layer: LinearLayer) -> bool:
        """See :func:`unisono.kernels.gemm.int4.prove_int4`."""
        return prove_int4(*self.operands(layer), layer.dtype)

    def rehearse(self, layer: LinearLayer) -> None:
        rehearse_int4(*self.operands(layer), layer.dtype)

    @property
    def experts(self) -> Int4Experts:
        """Format of stacks of experts."""
        return Int4Experts(self)  # type: ignore[arg-type]

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """Weight, scales, zeros and group as the kernels take them."""
        packed: torch.Tensor = getattr(layer, self.weight_kind)
        kind = self.zero_kind()
        zeros = getattr(layer, kind) if kind else None
        inputs = 2 * packed.shape[-1]
        return packed, getattr(layer, self.scale_kind), zeros, inputs if self.group == -1 else self.group

    def _stored(self, weight: TensorLayout, scales: TensorLayout, zeros: TensorLayout) -> dict[str, StoredTensor]:
        """The three tensors in these layouts."""
        inputs = 2**62 if self.group == -1 else self.group
        found = {
            self.weight_kind: StoredTensor(torch.uint8, ("I32",), inputs=2, layout=weight),
            self.scale_kind: StoredTensor(torch.float32, FLOATS, inputs=inputs, layout=scales),
        }
        if kind := self.zero_kind():
            found[kind] = StoredTensor(torch.int8, ("I32",), inputs=inputs, layout=zeros)
        return found

    def _groups(self, inputs: int) -> int:
        return 1 if self.group == -1 else -(-inputs // self.group)


@dataclass(frozen=True)
class AWQ(Int4):
    """AWQ's ``gemm`` version (Lin and others, arXiv 2306.00978)."""

    name: str = "AWQ, 4 bits"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        weight = TensorLayout(lambda outputs, inputs: ((inputs, outputs // EACH),), dim=1, packed=EACH)
        zeros = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs // EACH),), dim=1, packed=EACH)
        scales = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs),), dim=1)
        return self._stored(weight, scales, zeros)

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        if kind == "scales":
            return stored.t()
        numbers = unpacked(stored, 1, AWQ_ORDER).t()
        return packed_pairs(numbers) if kind == "qweight" else numbers


@dataclass(frozen=True)
class GPTQ(Int4):
    """GPTQ's format (Frantar and others, arXiv 2210.17323); ``formats/activation_order.py`` has activation order.

    zero_offset: added to stored zeros: 1 in version 1 of the format. listed: the group of each input is stored.
    """

    name: str = "GPTQ, 4 bits"
    zero_offset: int = 1
    listed: bool = True

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        weight = TensorLayout(lambda outputs, inputs: ((inputs // EACH, outputs),), dim=1)
        zeros = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs // EACH),), dim=1, packed=EACH)
        scales = TensorLayout(lambda outputs, inputs: ((self._groups(inputs), outputs),), dim=1)
        order = TensorLayout(lambda outputs, inputs: ((inputs,),))
        found = self._stored(weight, scales, zeros)
        return found | ({"g_idx": StoredTensor(None, ("I32",), layout=order)} if self.listed else {})

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind == "scales":
            return stored.t()
        if kind == "qweight":
            return self.packed(self.numbers(stored))
        if kind == "qzeros":
            return unpacked(stored, 1).t() + self.zero_offset
        check_order(stored, self.group)
        return {}

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Unpack the stored weight to numbers 0 … 15, uint8 [N, K]."""
        return unpacked(stored, 0).t()

    def packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Value of the parameter from :meth:`numbers`."""
        return packed_pairs(numbers)


@dataclass(frozen=True)
class PackedInt4(Int4):
    """compressed-tensors' ``pack-quantized`` with 4 bits. symmetric: no zeros are stored."""

    name: str = "compressed-tensors, 4 bits"
    symmetric: bool = True

    weight_kind = "weight_packed"
    scale_kind = "weight_scale"

    def zero_kind(self) -> str | None:
        return None if self.symmetric else "weight_zero_point"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        weight = TensorLayout(lambda outputs, inputs: ((outputs, inputs // EACH),), dim=0)
        zeros = TensorLayout(lambda outputs, inputs: ((outputs // EACH, self._groups(inputs)),), dim=0, packed=EACH)
        scales = TensorLayout(self._scale_shapes, dim=0)
        size = TensorLayout(lambda outputs, inputs: ((2,),))
        return {**self._stored(weight, scales, zeros), "weight_shape": StoredTensor(None, ("I64", "I32"), layout=size)}

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        groups = self._groups(inputs)
        return ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind == "weight_packed":
            return packed_pairs(unpacked(stored, 1))
        if kind == "weight_zero_point":
            return unpacked(stored, 0)
        if kind == "weight_scale":
            return stored.view(stored.shape[0], -1)
        return {}  # weight_shape repeats the packed weight's shape


def read_awq(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from a ``quantization_config`` with quant_method "awq". Raises CheckpointError."""
    check_awq(config)
    kept, format = (*(config.get("modules_to_not_convert") or ()), "lm_head"), AWQ(config.get("group_size", 128))
    return lambda module: PLAIN if named(module, kept) else format
