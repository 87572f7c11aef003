"""MXFP4 weights of experts, as gpt-oss is published: e2m1 values, and a power of two for each 32 inputs.

A checkpoint has ``<projection>_blocks`` uint8 [E, N, K / 32, 16], of which a byte holds two inputs, low bits first, and
``<projection>_scales`` uint8 [E, N, K / 32], the power plus 127. Weights stay so in memory; ``kernels/experts_mxfp4``
multiplies with them. Everything else of such a checkpoint is plain. Shapes: N outputs, K inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.kernels import linear, prove_exact, rehearse_proof, rms_norm
from unisono.kernels.moe.mxfp4 import GROUP, decode
from unisono.layers.formats.base import PLAIN, Layout, LinearLayer, Stored, WeightFormat
from unisono.layers.formats.experts_quantised import MXFP4Experts
from unisono.layers.formats.quantization_config import named
from unisono.types import CheckpointError

NOT_A_NUMBER = 255
"""The scale that stands for NaN."""

DUMMY_SCALES = (117, 121)
"""So that dummy weights are of a checkpoint's size."""


def _groups(inputs: int) -> int:
    """Groups of inputs that share a scale. Raises CheckpointError where some would be left over."""
    if inputs % GROUP:
        raise CheckpointError(f"MXFP4 experts with {inputs} inputs: they must be a multiple of {GROUP}.")
    return inputs // GROUP


@dataclass(frozen=True)
class MXFP4:
    """The format of experts' projections; a linear layer decodes its weight in every call."""

    name: str = "MXFP4"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Stored]:
        blocks = Layout(lambda n, k: ((n, _groups(k), GROUP // 2),), dim=0, stacked=True)
        scales = Layout(lambda n, k: ((n, _groups(k)),), dim=0, stacked=True)
        return {
            "weight_blocks": Stored(torch.uint8, ("U8",), inputs=2, layout=blocks),
            "weight_scales": Stored(torch.uint8, ("U8",), inputs=GROUP, layout=scales, drawn=DUMMY_SCALES),
        }

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        if kind == "weight_blocks":
            return stored.flatten(-2)
        if bool((stored == NOT_A_NUMBER).any()):
            raise CheckpointError(f"MXFP4 weights have a scale that is NaN ({NOT_A_NUMBER}): download them again.")
        return stored

    @property
    def experts(self) -> MXFP4Experts:
        """How stacks of experts are stored and applied."""
        return MXFP4Experts(self)

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return linear(x, decode(*self.operands(layer), x.dtype), layer.bias, residual)

    def linear_norm(
        self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(layer, x, residual)
        return total, rms_norm(total, weight, eps)

    def prove(self, layer: LinearLayer) -> bool:
        return prove_exact(decode(*self.operands(layer), layer.dtype))

    def rehearse(self, layer: LinearLayer) -> None:
        rehearse_proof(decode(*self.operands(layer), layer.dtype))

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a layer or of a stack."""
        return layer.weight_blocks, layer.weight_scales


FORMAT = MXFP4()


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """From a ``quantization_config`` with quant_method "mxfp4" to each module's format: experts have it."""
    kept = config.get("modules_to_not_convert") or ()
    return lambda module: FORMAT if ".experts" in module and not named(module, kept) else PLAIN
