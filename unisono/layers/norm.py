"""RMSNorm and LayerNorm as modules. Built by ``models``, filled by its loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from unisono.distributed.gather import Ranks
from unisono.kernels import rms_norm
from unisono.kernels.norm import sandwich_norm
from unisono.kernels.norm.add_norm import add_rms_norm, add_rms_norm_fp8
from unisono.kernels.norm.rms_norm import rms_norm_fp8
from unisono.kernels.vision.norm import layer_norm
from unisono.layers.activations import Activations, Wish
from unisono.layers.formats.base import Place


class RMSNorm(nn.Module):
    """``x [M, size] -> [M, size]``; see :func:`unisono.kernels.rms_norm`.

    zero_centered: the checkpoint stores w, and the norm multiplies by 1 + w in fp32 and rounds once (Qwen3-Next,
    Qwen3.5, Gemma 2 and 3). ``weight`` is then an fp32 parameter that holds 1 + w. wide: it multiplies by w in fp32 and
    rounds once (Gemma 4). factor: of the stored weight, in fp32; another one than 1 makes the weight wide. wish: what
    the norm's readers want; the owner of the norm and its readers sets it.
    """

    wish: Wish | None = None
    stored_as = "weight"
    """The end of the weight's name in a checkpoint."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str, zero_centered: bool = False,
        wide: bool = False, factor: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        dtype = torch.float32 if zero_centered or wide or factor != 1 else dtype
        weight = torch.full((size,), factor, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.zero_centered, self.factor = eps, zero_centered, factor

    def forward(self, x: torch.Tensor) -> Activations:
        """[M, size] -> the norm, quantised where ``wish`` says so."""
        if self.wish is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm_fp8(x, self.weight, self.eps, self.wish.group, self.wish.keep)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, Activations]:
        """(x + residual [M, size], its norm as :meth:`forward` makes it), in one launch."""
        if self.wish is None:
            return add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm_fp8(x, residual, self.weight, self.eps, self.wish.group, self.wish.keep)

    def of_parts(
        self, x: torch.Tensor, residual: torch.Tensor, ranks: Ranks, summed: bool
    ) -> tuple[torch.Tensor, Activations]:
        """:meth:`of_sum` of what the ranks hold of x: columns each, or with ``summed`` terms of a sum."""
        if self.wish is None:
            return ranks.add_rms_norm(x, residual, self.weight, self.eps, summed)
        given = self.eps, self.wish.group, self.wish.keep, summed
        return ranks.add_rms_norm_fp8(x, residual, self.weight, *given)

    def places(self) -> Iterator[tuple[str, Place]]:
        """What a checkpoint stores of the norm: (name inside it, where it goes)."""
        shape = tuple(self.weight.shape)
        if self.zero_centered or self.factor != 1:
            yield self.stored_as, _ChangedWeight(self.weight, shape, plus=float(self.zero_centered), factor=self.factor)
        else:
            yield self.stored_as, Place(self.weight, shape)


class Factor(nn.Module):
    """Learnt numbers that something is multiplied by, 1 at first: ``weight`` [size]. A checkpoint stores them without a
    name inside the module."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def places(self) -> Iterator[tuple[str, Place]]:
        """See :meth:`RMSNorm.places`."""
        yield "", Place(self.weight, tuple(self.weight.shape))


class LayerNorm(nn.Module):
    """``x [M, size] -> [M, size]``, with a weight and a bias; see :func:`unisono.kernels.vision.norm.layer_norm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class _ChangedWeight(Place):
    """Place of w: the parameter holds factor · (plus + w), computed in fp32."""

    plus: float = 0.0
    factor: float = 1.0

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(self.factor * (self.plus + stored.float()))


def add_normed(
    x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None, norm: nn.Module | None,
    scale: Factor | None = None,
) -> tuple[torch.Tensor, Activations]:  # fmt: skip
    """(``total = scale * (residual + after(x))``, ``norm(total)``), each [M, H], in one launch.

    Without a norm the sum twice. scale: one number; None: there is none.
    """
    assert after is not None
    given = x, residual, after.weight, after.eps, None if scale is None else scale.weight
    if isinstance(norm, RMSNorm):
        if norm.wish is None:
            return sandwich_norm.add_normed(*given, norm.weight, norm.eps)
        return sandwich_norm.add_normed_fp8(*given, norm.weight, norm.eps, norm.wish.group, norm.wish.keep)
    total, _ = sandwich_norm.add_normed(*given, None, 0.0)
    return total, total if norm is None else norm(total)
