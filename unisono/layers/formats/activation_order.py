"""GPTQ's activation order (``desc_act``): groups of inputs in the order of their activations, not of their places.

A checkpoint stores a weight's inputs in their places, and the group of each in ``g_idx``. While loading, inputs are
sorted by group, so that each group is contiguous and the kernels of GPTQ serve. A product gathers the activations'
columns in the same order first. The values are those of the checkpoint; K is summed in the sorted order at every number
of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.layers.formats.base import WHOLE_PROJECTION, LinearLayer, NormsAfter, StoredTensor, TensorLayout
from unisono.layers.formats.int4 import GPTQ
from unisono.layers.formats.int8 import GPTQ8
from unisono.types import CheckpointError


@dataclass(frozen=True)
class ActivationOrder(NormsAfter):
    """Weights of GPTQ with permuted inputs. The parameter ``g_idx`` [projections, K] has the inputs in sorted order."""

    weights: GPTQ | GPTQ8

    joint = ("qweight", "g_idx")
    common = ("g_idx",)

    @property
    def name(self) -> str:
        return f"{self.weights.name} in activation order (desc_act)"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        inputs = TensorLayout(lambda outputs, inputs: ((inputs,),))
        order = StoredTensor(torch.int32, ("I32",), WHOLE_PROJECTION, layout=inputs, drawn=(0, 1))
        return {**self.weights.tensors(dtype), "g_idx": order}

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        return self.weights.read(kind, stored)

    def read_joint(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Sort the inputs of a weight by their groups. Raises CheckpointError unless all groups are full."""
        groups, group = stored["g_idx"], self.weights.group
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order].long(), torch.arange(groups.numel(), device=groups.device) // group):
            raise CheckpointError(f"g_idx: groups of {group} inputs are expected, numbered from 0; it has others.")
        numbers = self.weights.numbers(stored["qweight"])
        return {"qweight": self.weights.packed(numbers[:, order]), "g_idx": order[None]}

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        made: Any = layer
        return self.weights.linear(layer, x.index_select(1, made.g_idx[0]), residual)

    def prove(self, layer: LinearLayer) -> bool:
        """Proof of the weights; the order of inputs is the same in all kernels."""
        return self.weights.prove(layer)

    def rehearse(self, layer: LinearLayer) -> None:
        self.weights.rehearse(layer)
