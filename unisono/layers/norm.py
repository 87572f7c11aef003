"""RMSNorm and LayerNorm as modules. Built by ``models``, filled by its loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unisono.distributed.gather import Ranks
from unisono.kernels import rms_norm
from unisono.kernels.norm.add_norm import add_rms_norm, add_rms_norm_fp8
from unisono.kernels.norm.rms_norm import rms_norm_fp8
from unisono.kernels.vision.norm import layer_norm
from unisono.layers.activations import Activations, InputFormat
from unisono.layers.formats.base import WeightTarget


class RMSNorm(nn.Module):
    """``x [M, size] -> [M, size]``; see :func:`unisono.kernels.rms_norm`.

    zero_centered: the checkpoint stores w, and the norm multiplies by 1 + w in fp32 and rounds once (Qwen3-Next,
        Qwen3.5). ``weight`` is then an fp32 parameter that holds 1 + w.
    input_format: format of the norm's consumers; set by the owner of norm and consumers.
    """

    input_format: InputFormat | None = None

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str, zero_centered: bool = False
    ) -> None:
        super().__init__()
        dtype = torch.float32 if zero_centered else dtype
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: torch.Tensor) -> Activations:
        """[M, size] -> the norm, quantised according to ``input_format``."""
        if self.input_format is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm_fp8(x, self.weight, self.eps, self.input_format.group, self.input_format.keep)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [..., size] -> [..., size]: the tests' oracle."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, Activations]:
        """(x + residual [M, size], its norm as from :meth:`forward`), in one launch."""
        if self.input_format is None:
            return add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm_fp8(x, residual, self.weight, self.eps, self.input_format.group, self.input_format.keep)

    def of_parts(
        self, x: torch.Tensor, residual: torch.Tensor, ranks: Ranks, summed: bool
    ) -> tuple[torch.Tensor, Activations]:
        """:meth:`of_sum` with x divided among ranks: columns each, or terms of a sum with ``summed``."""
        if self.input_format is None:
            return ranks.add_rms_norm(x, residual, self.weight, self.eps, summed)
        options = self.eps, self.input_format.group, self.input_format.keep, summed
        return ranks.add_rms_norm_fp8(x, residual, self.weight, *options)

    def places(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the norm, target) of each checkpoint tensor."""
        kind = _ZeroCenteredWeight if self.zero_centered else WeightTarget
        yield "weight", kind(self.weight, tuple(self.weight.shape))


class LayerNorm(nn.Module):
    """``x [M, size] -> [M, size]``, with a weight and a bias; see :func:`unisono.kernels.vision.norm.layer_norm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class _ZeroCenteredWeight(WeightTarget):
    """Target of a stored w: the parameter holds 1 + w, computed in fp32."""

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(1 + stored.float())
