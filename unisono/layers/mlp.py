"""The gated MLP of the Llama family. Built by ``models``."""

from __future__ import annotations

import torch
from torch import nn

from unisono.kernels.norm.activation import SILU, ExpertGate
from unisono.layers.activations import Activations, OfAllRanks, gate_product
from unisono.layers.linear import EndsInLinear, Linear


class GatedMLP(EndsInLinear):
    """``down(silu(gate(x)) * up(x))``: a feed-forward (``models/blocks/layers.py``).

    gate_up: both projections as one product. down: the projection back. gate: SILU or GELU_TANH.
    """

    last = "down"

    def __init__(self, gate_up: Linear, down: Linear, gate: ExpertGate = SILU) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate = gate_up, down, gate

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.gate_up,)

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> Activations:
        """[M, hidden] -> [M, intermediate], the input of ``down``. Positions are ignored."""
        y, low = self.gate_up.product(x)
        if self.gate == SILU:  # which has fused forms
            if low is not None:
                return low.silu(y)
            if self.down.split_inputs:
                return OfAllRanks(self.down.ranks.silu(y))
        return gate_product(y if low is None else low.added(y), self.gate, self.down.input_format)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [M, hidden] -> [M, hidden]: the tests' oracle."""
        gate, up = self.gate_up.reference(x).chunk(2, dim=-1)
        gated = nn.functional.silu(gate) if self.gate == SILU else nn.functional.gelu(gate, approximate="tanh")
        return self.down.reference(gated * up)
