"""The gated MLP of the Llama family. Built by ``models``."""

from __future__ import annotations

import torch
from torch import nn

from unisono.layers.activations import Activations, OfAllRanks, silu_product
from unisono.layers.linear import Linear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``: a feed-forward (``models/blocks/layers.py``).

    gate_up: both projections as one product. down: the projection back.
    """

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.gate_up,)

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> Activations:
        """[M, hidden] -> [M, intermediate], the input of ``down``. Positions are ignored."""
        y, low = self.gate_up.product(x)
        if low is not None:
            return low.silu(y)
        return (
            OfAllRanks(self.down.ranks.silu(y)) if self.down.split_inputs else silu_product(y, self.down.input_format)
        )

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [M, hidden] -> [M, hidden]: the tests' oracle."""
        gate, up = self.gate_up.reference(x).chunk(2, dim=-1)
        return self.down.reference(nn.functional.silu(gate) * up)

    def project(
        self, y: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """Result of ``forward`` -> (residual + down(y), ``norm`` of it); without a norm, the sum twice."""
        return self.down.then_norm(y, residual, norm)
