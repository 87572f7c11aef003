"""RMSNorm and LayerNorm as modules. Built by ``models``, filled by its loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from unisono.distributed.gather import Ranks
from unisono.kernels import rms_norm
from unisono.kernels.norm import sandwich_norm
from unisono.kernels.norm.add_norm import add_rms_norm, add_rms_norm_fp8
from unisono.kernels.norm.rms_norm import rms_norm_fp8
from unisono.kernels.vision.norm import layer_norm
from unisono.layers.activations import Activations, InputFormat
from unisono.layers.formats.base import WeightTarget


class NormKind(NamedTuple):
    """Kind of a model's norms. centred: LayerNorm in place of RMSNorm. weight, bias: the checkpoint stores them."""

    centred: bool = False
    weight: bool = True
    bias: bool = False


RMS, LAYER = NormKind(), NormKind(True, True, True)


class RMSNorm(nn.Module):
    """``x [M, size] -> [M, size]``; see :func:`unisono.kernels.rms_norm`.

    zero_centered: the checkpoint stores w, and the norm multiplies by 1 + w in fp32 and rounds once (Qwen3-Next,
        Qwen3.5, Gemma 2 and 3). ``weight`` is then an fp32 parameter that holds 1 + w.
    wide: it multiplies by w in fp32 and rounds once (Gemma 4).
    factor: of the stored weight, in fp32; a factor other than 1 makes the weight wide.
    input_format: format of the norm's consumers; set by the owner of norm and consumers.
    stored: False if the checkpoint has no weight, which is then 1.
    """

    input_format: InputFormat | None = None
    stored = True
    stored_as = "weight"
    """Suffix of the weight's name in a checkpoint."""

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

    def of_normed(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm, scale: Factor | None
    ) -> tuple[torch.Tensor, Activations]:
        """See :class:`NormsSum`."""
        inputs = x, residual, after.weight, after.eps, None if scale is None else scale.weight
        if self.input_format is None:
            return sandwich_norm.add_normed(*inputs, self.weight, self.eps)
        options = self.input_format.group, self.input_format.keep
        return sandwich_norm.add_normed_fp8(*inputs, self.weight, self.eps, *options)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the norm, target) of each checkpoint tensor."""
        shape = tuple(self.weight.shape)
        if not self.stored:
            return
        if self.zero_centered or self.factor != 1:
            yield self.stored_as, _ChangedWeight(self.weight, shape, plus=float(self.zero_centered), factor=self.factor)
        else:
            yield self.stored_as, WeightTarget(self.weight, shape)


class Factor(nn.Module):
    """Learnt factors, 1 at first: ``weight`` [size]. A checkpoint stores them without a name inside the module."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """See :meth:`RMSNorm.weight_targets`."""
        yield "", WeightTarget(self.weight, tuple(self.weight.shape))


class LayerNorm(nn.Module):
    """``x [M, size] -> [M, size]``, with a weight and a bias; see :func:`unisono.kernels.vision.norm.layer_norm`.

    kind: which of them the checkpoint stores; the weight is otherwise 1, the bias 0.
    zero_centered: it stores w, and the norm multiplies by 1 + w.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str,
        kind: NormKind = LAYER, zero_centered: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind, self.zero_centered = kind, zero_centered
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`RMSNorm.reference`."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """See :meth:`RMSNorm.weight_targets`."""
        shape = tuple(self.weight.shape)
        if self.kind.weight and self.zero_centered:
            yield "weight", _ChangedWeight(self.weight, shape, plus=1.0)
        elif self.kind.weight:
            yield "weight", WeightTarget(self.weight, shape)
        if self.kind.bias:
            yield "bias", WeightTarget(self.bias, shape)


def scaled_sum(
    x: torch.Tensor, residual: torch.Tensor, times: float, norm: nn.Module | None
) -> tuple[torch.Tensor, Activations]:
    """(``total = residual + times * x``, ``norm(total)``), each [M, H]; the product is rounded. Without a norm the sum
    twice."""
    if isinstance(norm, RMSNorm):
        return norm.of_sum(x * times, residual)
    total = x * times + residual
    return total, total if norm is None else norm(total)


@dataclass(frozen=True)
class _ChangedWeight(WeightTarget):
    """Target of a stored w: the parameter holds factor · (plus + w), computed in fp32."""

    plus: float = 0.0
    factor: float = 1.0

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(self.factor * (self.plus + stored.float()))


class NormsSum(Protocol):
    """A norm, or several of the same rows, fused with the norm of a block's output and its sum with the residual."""

    def __call__(self, x: torch.Tensor) -> Any:
        """Norm x [M, H]."""
        ...

    def of_normed(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm, scale: Factor | None
    ) -> tuple[torch.Tensor, Any]:
        """Return (``total = scale * (residual + after(x))``, its norm), each [M, H], in one launch."""
        ...


class FusesNorms:
    """Base of a feed-forward that norms its output, adds it and norms the sum in a kernel of its own."""

    def normed_sum(
        self, y: Any, residual: torch.Tensor, after: RMSNorm, norm: nn.Module | None, scale: Factor | None
    ) -> tuple[torch.Tensor, Activations]:
        """``add_normed(self.output(y), residual, after, norm, scale)``."""
        raise NotImplementedError


def add_normed(
    x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None, norm: NormsSum | nn.Module | None,
    scale: Factor | None = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(``total = scale * (residual + after(x))``, ``norm(total)``), each [M, H], in one launch.

    Without a norm the sum twice. scale: one number; None: there is none.
    """
    assert after is not None
    of_normed = getattr(norm, "of_normed", None)
    if of_normed is not None:
        found: tuple[torch.Tensor, Any] = of_normed(x, residual, after, scale)
        return found
    factor = None if scale is None else scale.weight
    total, _ = sandwich_norm.add_normed(x, residual, after.weight, after.eps, factor, None, 0.0)
    return total, total if norm is None else norm(total)
