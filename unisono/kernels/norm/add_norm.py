"""The sum of two rows and its norm, for products whose parts were gathered first. Owns the ``add_rms_norm`` ops.

One launch of the norm's kernel (``kernels/norm/rms_norm.py``), which rounds the sum before it reads it, with the bits
of ``linear_norm``. Called by ``layers``.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch

from unisono.kernels.gemm.fp8_quantize import Quantised
from unisono.kernels.library import define, empty_like, register
from unisono.kernels.norm.rms_norm import (
    Normed,
    launch_add_rms_norm,
    launch_add_rms_norm_fp8,
    quantised_norm,
    rms_norm_cpu,
    with_fp8_cpu,
    with_fp8_meta,
)


def _cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, rms_norm_cpu(total, weight, eps)


def _meta(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_like(x), empty_like(x)


define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
register("add_rms_norm", cuda=launch_add_rms_norm, cpu=_cpu, meta=_meta)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``x + residual`` [M, H] rounded, ``rms_norm`` of it); weight [H] and eps as ``rms_norm`` takes them."""
    return torch.ops.unisono.add_rms_norm(x, residual, weight, eps)


def _fp8_cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool
) -> tuple[torch.Tensor, *Normed]:
    total, normed = _cpu(x, residual, weight, eps)
    return total, *with_fp8_cpu(normed, group, keep)


def _fp8_meta(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool
) -> tuple[torch.Tensor, *Normed]:
    return empty_like(x), *with_fp8_meta(x, group, keep)


define(
    "add_rms_norm_fp8(Tensor x, Tensor residual, Tensor weight, float eps, int group, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
register("add_rms_norm_fp8", cuda=launch_add_rms_norm_fp8, cpu=_fp8_cpu, meta=_fp8_meta)


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool
) -> tuple[torch.Tensor, Quantised]:
    """:func:`add_rms_norm` whose norm is quantised as ``rms_norm_fp8`` does it."""
    total, *normed = torch.ops.unisono.add_rms_norm_fp8(x, residual, weight, eps, group, keep)
    return total, quantised_norm(normed, total, group, keep)
