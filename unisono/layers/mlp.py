"""The gated MLP of the Llama family. Built by ``models``."""

from __future__ import annotations

import torch
from torch import nn

from unisono.kernels.norm.activation import SILU, Gate
from unisono.layers.activations import Activations, OfAllRanks, gate_product
from unisono.layers.linear import Linear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``: a feed-forward (``models/blocks/layers.py``).

    gate_up: both projections as one product. down: the projection back. gate: what makes one of both, SILU or
    GELU_TANH.
    """

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate = SILU) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate = gate_up, down, gate

    @property
    def readers(self) -> tuple[object, ...]:
        """What reads the block's input."""
        return (self.gate_up,)

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> Activations:
        """What ``down`` reads: [M, hidden] -> [M, intermediate]. The same is done for every position."""
        y, low = self.gate_up.product(x)
        if self.gate == SILU:  # of which there are fused forms
            if low is not None:
                return low.silu(y)
            if self.down.split_inputs:
                return OfAllRanks(self.down.ranks.silu(y))
        return gate_product(y if low is None else low.added(y), self.gate, self.down.wish)

    def project(
        self, y: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """What ``forward`` returned -> (residual + down(y), ``norm`` of it); without a norm the sum twice."""
        return self.down.then_norm(y, residual, norm)

    def output(self, y: Activations) -> torch.Tensor:
        """``down(y)`` of what ``forward`` returned."""
        out: torch.Tensor = self.down(y)
        return out
