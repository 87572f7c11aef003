"""RMSNorm as a module. Built by ``models``."""

from __future__ import annotations

import torch
from torch import nn

from unisono.kernels import rms_norm


class RMSNorm(nn.Module):
    """``x [M, size] -> [M, size]``; see :func:`unisono.kernels.rms_norm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)
