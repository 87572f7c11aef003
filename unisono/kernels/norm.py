"""RMSNorm over the last dimension. Owns the ``rms_norm`` op; called by ``layers`` and draft heads.

One program takes one row, and the shape of the row alone fixes the order of its sum, so a row's bits
do not depend on the batch.

The weight's dtype says how often the result is rounded. A weight of the activations' dtype multiplies the rounded
value, as in Llama. A weight in fp32 multiplies the value in fp32, and the product is rounded once: so do the
zero-centred norms of Qwen3-Next and Qwen3.5, whose weight is 1 + w in fp32. Where the activations are fp32 too, both
are the same.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, differentiable, register
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def rounded_before_weight(normed, weight, dtype: tl.constexpr):
    """The normalised value, in fp32, as a weight multiplies it: rounded to the dtype, unless the weight is fp32."""
    if weight.dtype.element_ty != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return normed


@triton.jit
def _rms_norm_kernel(x, residual, weight, total, out, eps, H,
                     BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    follow(OVERLAP)
    cols = tl.arange(0, BLOCK_H)
    row = tl.program_id(0).to(tl.int64) * H
    inside = cols < H
    value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + r).to(total.dtype.element_ty)
        tl.store(total + row + cols, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    normed = rounded_before_weight(value * scale, weight, out.dtype.element_ty)
    tl.store(out + row + cols, (normed * w).to(out.dtype.element_ty), mask=inside)


def row_warps(block: int) -> int:
    """Warps per row, from the row's length alone: their number is part of the summation order."""
    return min(max(block // 512, 1), 16)


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    return _launch(x, None, weight, x, eps)


def launch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual [M, H] rounded, its norm): the bits of an addition and :func:`launch_rms_norm`."""
    x = x.contiguous()
    total = torch.empty_like(x)
    return total, _launch(x, residual.contiguous(), weight, total, eps)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, total: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _rms_norm_kernel[(x.shape[0],)](
        x, residual, weight, total, out, eps, x.shape[1],
        BLOCK_H=block, HAS_RESIDUAL=residual is not None, num_warps=row_warps(block), **overlapped(x.device),
    )  # fmt: skip
    return out


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.contiguous().float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (weight * (normed if weight.dtype is torch.float32 else normed.to(x.dtype))).to(x.dtype)


def _rms_norm_meta(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm` with a gradient, in x's dtype. The value is rounded before the weight, whatever its dtype."""
    value = x.float()
    normed = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed).to(x.dtype)


define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
register("rms_norm", cuda=launch_rms_norm, cpu=rms_norm_cpu, meta=_rms_norm_meta)
differentiable("rms_norm", rms_norm_formula)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` for x [M, H], weight [H] -> [M, H] in x's dtype.

    Computed in fp32 (Zhang and Sennrich, arXiv 1910.07467). The weight is in x's dtype: the normalised value is then
    rounded before the multiplication, as in Llama. Or it is in fp32: the product alone is rounded. H up to 16384.
    """
    return torch.ops.unisono.rms_norm(x, weight, eps)


AOT: list[AotCase] = [
    AotCase(
        _rms_norm_kernel,
        {
            **dict.fromkeys(("x", "residual", "total", "out"), f"*{dtype}"),
            "weight": f"*{weight}",
            "eps": "fp32",
            "H": "i32",
        },
        {"BLOCK_H": block, "HAS_RESIDUAL": residual, "OVERLAP": True},
        num_warps=row_warps(block),
    )
    for residual in (False, True)
    for dtype, weight, block in (
        *(("bf16", "bf16", block) for block in (256, 4096, 16384)),
        *(("bf16", "fp32", block) for block in (2048, 4096, 8192)),
        *(("fp16", "fp16", 4096), ("fp16", "fp32", 4096), ("fp32", "fp32", 4096)),
    )
]
