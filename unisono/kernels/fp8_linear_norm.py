"""An fp8 product, the addition of the residual and the norm of the sum. Owns the ``fp8_linear_norm`` op.

As ``kernels/linear_norm.py``: where a kernel of ours computes the product, it adds the residual; where torch does, the
norm adds it. Called by ``layers``.

Shapes: as in ``kernels/fp8.py``, with H outputs.
"""

from __future__ import annotations

import torch

from unisono.kernels.fp8 import fp8_linear_cpu, fp8_linear_cuda, runs_on_torch, torch_fp8_linear
from unisono.kernels.library import define, register
from unisono.kernels.norm import launch_add_rms_norm, launch_rms_norm, rms_norm_cpu


def fp8_linear_norm_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    operands = x, weight, w_scales, x_scale, bias
    if runs_on_torch(x, weight, w_scales):
        return launch_add_rms_norm(torch_fp8_linear(*operands, None), residual, norm_weight, eps)
    total = fp8_linear_cuda(*operands, residual)
    return total, launch_rms_norm(total, norm_weight, eps)


def fp8_linear_norm_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = fp8_linear_cpu(x, weight, w_scales, x_scale, bias, residual)
    return total, rms_norm_cpu(total, norm_weight, eps)


def _fp8_linear_norm_meta(
    x: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, x_scale: torch.Tensor | None,
    bias: torch.Tensor | None, residual: torch.Tensor, *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


define(
    "fp8_linear_norm(Tensor x, Tensor weight, Tensor w_scales, Tensor? x_scale, Tensor? bias, Tensor residual,"
    " Tensor norm_weight, float eps) -> (Tensor, Tensor)"
)
register("fp8_linear_norm", cuda=fp8_linear_norm_cuda, cpu=fp8_linear_norm_cpu, meta=_fp8_linear_norm_meta)


def fp8_linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = fp8_linear(x, weight, w_scales, x_scale, bias, residual [M, H])`` and its ``rms_norm``.

    norm_weight [H], eps: as ``rms_norm`` takes them. Returns (total, normed), each [M, H], with the bits of the two ops
    one after the other.
    """
    return torch.ops.unisono.fp8_linear_norm(x, weight, w_scales, x_scale, bias, residual, norm_weight, eps)
