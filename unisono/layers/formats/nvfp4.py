"""NVFP4 weights: e2m1 values, an e4m3 scale per 16 inputs, and an fp32 number per projection. W4A16.

compressed-tensors (``nvfp4-pack-quantized``) and ModelOpt (``NVFP4``) store the same numbers under other names:

==================  ========================================  =============================================
format              weight and scales                         of a projection
==================  ========================================  =============================================
compressed-tensors  weight_packed [N, K / 2], weight_scale    weight_global_scale, by which values are divided
ModelOpt            weight [N, K / 2], weight_scale           weight_scale_2, by which they are multiplied
==================  ========================================  =============================================

``kernels/gemm/nvfp4.py`` has the rule of rounding. Activations stay in the model's dtype: tensor cores that multiply
e2m1 exist on Blackwell only, so scales with which a tool calibrated activations are checked and not used.

Shapes: N outputs, K inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.kernels.gemm.nvfp4 import GROUP, nvfp4_linear, prove_nvfp4, rehearse_nvfp4
from unisono.layers.formats.base import FLOATS, ONE_VALUE, LinearLayer, NormsAfter, StoredTensor, TensorLayout
from unisono.layers.formats.experts_quantised import NVFP4Experts
from unisono.types import CheckpointError

NOT_A_NUMBER = 0x7F
"""Bits of an e4m3 scale that encode NaN, without the sign."""

LARGEST = 2.0
"""Largest number by which a projection's values are multiplied: kernels keep ``448 * LARGEST`` within bf16's range."""

DUMMY_SCALES = (56, 64)
"""Range of the bits of dummy scales: from 1 to below 2."""


def _groups(inputs: int) -> int:
    """Groups of inputs that share a scale. Raises CheckpointError for an incomplete group."""
    if inputs % GROUP:
        raise CheckpointError(f"NVFP4 weights with {inputs} inputs: they must be a multiple of {GROUP}.")
    return inputs // GROUP


@dataclass(frozen=True)
class NVFP4(NormsAfter):
    """Weights of a linear layer or of experts. input_kind: name of a calibrated scale of activations, if there is one.

    divides: the projection's number divides values.
    """

    weight_kind: str = "weight_packed"
    global_kind: str = "weight_global_scale"
    input_kind: str | None = None
    divides: bool = True
    name: str = "NVFP4"

    scale_kind = "weight_scale"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        scales = TensorLayout(lambda outputs, inputs: ((outputs, _groups(inputs)),), dim=0)
        packed = TensorLayout(lambda outputs, inputs: ((outputs, inputs // 2),), dim=0)
        found = {
            self.weight_kind: StoredTensor(torch.uint8, ("U8",), inputs=2, layout=packed),
            self.scale_kind: StoredTensor(torch.uint8, ("F8_E4M3",), inputs=GROUP, layout=scales, drawn=DUMMY_SCALES),
            self.global_kind: StoredTensor(torch.float32, FLOATS, inputs=0, layout=ONE_VALUE),
        }
        if self.input_kind:
            found[self.input_kind] = StoredTensor(None, FLOATS, layout=ONE_VALUE)
        return found

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if kind == self.input_kind:
            return {}
        if kind == self.global_kind:
            number = stored.float().reshape(-1)
            if not bool(((number > 0) & number.isfinite()).all()):
                raise CheckpointError(f"{kind}={number.tolist()}: the number of an NVFP4 projection must be above 0.")
            factor = 1 / number if self.divides else number
            if bool((factor > LARGEST).any()):
                raise CheckpointError(
                    f"{kind}={number.tolist()}: NVFP4 weights of up to {factor.max().item() * 448 * 6:.0f}; numbers "
                    f"that multiply by more than {LARGEST:g} are not supported."
                )
            return factor
        if kind == self.scale_kind:
            bits = stored.view(torch.uint8)
            if bool(((bits & 0x7F) == NOT_A_NUMBER).any()):
                raise CheckpointError("NVFP4 weights have a scale that is NaN: download them again.")
            return bits
        return stored

    @property
    def experts(self) -> NVFP4Experts:
        """Format of stacks of experts."""
        return NVFP4Experts(self)

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return nvfp4_linear(x, *self.operands(layer), layer.bias, residual)

    def prove(self, layer: LinearLayer) -> bool:
        """See :func:`unisono.kernels.gemm.nvfp4.prove_nvfp4`."""
        return prove_nvfp4(*self.operands(layer), layer.dtype)

    def rehearse(self, layer: LinearLayer) -> None:
        rehearse_nvfp4(*self.operands(layer), layer.dtype)

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, scales and multipliers, from the parameters of a layer or of a stack."""
        return getattr(layer, self.weight_kind), getattr(layer, self.scale_kind), getattr(layer, self.global_kind)
