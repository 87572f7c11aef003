"""The sum of two rows and its norm, for products whose parts are gathered first. Owns the ``add_rms_norm`` ops.

One launch of the norm's kernel (``kernels/norm/rms_norm.py``), which rounds the sum first, with the bits of
``linear_norm``. Called by ``layers``.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch

from unisono.kernels.gemm.fp8_quantize import Quantised
from unisono.kernels.library import empty_like, op
from unisono.kernels.norm.rms_norm import (
    SumNormed,
    launch_add_rms_norm,
    launch_add_rms_norm_fp8,
    quantised_norm,
    rms_norm,
    with_fp8_cpu,
    with_fp8_meta,
)


@op(cuda=launch_add_rms_norm, meta=lambda x: (empty_like(x), empty_like(x)))
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (``x + residual`` [M, H] rounded, its ``rms_norm``). weight [H], eps: as in ``rms_norm``."""
    total = x + residual
    return total, rms_norm.cpu(total, weight, eps)


@op(cuda=launch_add_rms_norm_fp8, meta=lambda x, group, keep: (empty_like(x), *with_fp8_meta(x, group, keep)))
def add_rms_norm_fp8_op(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool
) -> SumNormed:
    total, normed = add_rms_norm.cpu(x, residual, weight, eps)
    return total, *with_fp8_cpu(normed, group, keep)


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool
) -> tuple[torch.Tensor, Quantised]:
    """Compute :func:`add_rms_norm` and quantise the norm as ``rms_norm_fp8``."""
    total, *normed = add_rms_norm_fp8_op(x, residual, weight, eps, group, keep)
    return total, quantised_norm(normed, total, group, keep)
