"""MXFP4 weights of experts, as published for gpt-oss: e2m1 values, and a power of two per 32 inputs.

A checkpoint has ``<projection>_blocks`` uint8 [E, N, K / 32, 16], two inputs per byte, low bits first, and
``<projection>_scales`` uint8 [E, N, K / 32], the power plus 127. Weights keep this form in memory;
``kernels/moe/mxfp4.py`` multiplies with them. All other tensors of such a checkpoint are plain. Shapes: N outputs, K
inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.kernels import exact_blas, linear
from unisono.kernels.moe.mxfp4 import GROUP, decode
from unisono.layers.formats.base import PLAIN, LinearLayer, NormsAfter, StoredTensor, TensorLayout, WeightFormat
from unisono.layers.formats.experts_quantised import MXFP4Experts
from unisono.layers.formats.module_patterns import named
from unisono.types import CheckpointError

NOT_A_NUMBER = 255
"""Scale that encodes NaN."""

DUMMY_SCALES = (117, 121)
"""Range of dummy scales, so that dummy weights have a checkpoint's magnitude."""


def _groups(inputs: int) -> int:
    """Groups of inputs that share a scale. Raises CheckpointError for an incomplete group."""
    if inputs % GROUP:
        raise CheckpointError(f"MXFP4 experts with {inputs} inputs: they must be a multiple of {GROUP}.")
    return inputs // GROUP


@dataclass(frozen=True)
class MXFP4(NormsAfter):
    """Format of experts' projections; a linear layer decodes its weight in every call."""

    name: str = "MXFP4"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        blocks = TensorLayout(lambda n, k: ((n, _groups(k), GROUP // 2),), dim=0, stacked=True)
        scales = TensorLayout(lambda n, k: ((n, _groups(k)),), dim=0, stacked=True)
        return {
            "weight_blocks": StoredTensor(torch.uint8, ("U8",), inputs=2, layout=blocks),
            "weight_scales": StoredTensor(torch.uint8, ("U8",), inputs=GROUP, layout=scales, drawn=DUMMY_SCALES),
        }

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        if kind == "weight_blocks":
            return stored.flatten(-2)
        if bool((stored == NOT_A_NUMBER).any()):
            raise CheckpointError(f"MXFP4 weights have a scale that is NaN ({NOT_A_NUMBER}): download them again.")
        return stored

    @property
    def experts(self) -> MXFP4Experts:
        """Format of stacks of experts."""
        return MXFP4Experts(self)

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return linear(x, decode(*self.operands(layer), x.dtype), layer.bias, residual)

    def prove(self, layer: LinearLayer) -> bool:
        return exact_blas.prove(decode(*self.operands(layer), layer.dtype))

    def rehearse(self, layer: LinearLayer) -> None:
        exact_blas.rehearse(decode(*self.operands(layer), layer.dtype))

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a layer or of a stack."""
        return layer.weight_blocks, layer.weight_scales


FORMAT = MXFP4()


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from a ``quantization_config`` with quant_method "mxfp4": MXFP4 for experts."""
    kept = config.get("modules_to_not_convert") or ()
    return lambda module: FORMAT if ".experts" in module and not named(module, kept) else PLAIN
