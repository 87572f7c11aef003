"""The gated MLP of the Llama family. Built by ``models``."""

from __future__ import annotations

import torch
from torch import nn

from unisono.kernels import silu_mul
from unisono.layers.linear import GateUpLinear, Linear


class GatedMLP(nn.Module):
    """``residual + down(silu(gate(x)) * up(x))`` in three launches."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(hidden_size, intermediate_size, bias, dtype, device)
        self.down = Linear(intermediate_size, hidden_size, bias, dtype, device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual [M, hidden] -> [M, hidden]."""
        return self.down(self.inner(x), residual)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What ``down`` reads: [M, hidden] -> [M, intermediate]."""
        return silu_mul(self.gate_up(x))
