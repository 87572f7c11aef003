"""LayerNorm over the last dimension. Owns the ``layer_norm`` op; called by ``layers`` for vision towers.

One program takes one row, and the order of its sums depends on the row's length only, so a row's bits do not depend on
the batch.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import row_warps
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _layer_norm_kernel(x, weight, bias, out, eps, H, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    cols = tl.arange(0, BLOCK_H)
    row = tl.program_id(0).to(tl.int64) * H
    inside = cols < H
    value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / H, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / H + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + cols, (normed * w + b).to(out.dtype.element_ty), mask=inside)


def launch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(size)
    _layer_norm_kernel[(x.shape[0],)](
        x, weight, bias, out, eps, size, BLOCK_H=block, num_warps=row_warps(block), **overlapped(x.device)
    )
    return out


@op(cuda=launch_layer_norm)
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`` for x [M, H], weight and bias [H]: [M, H].

    Computed in fp32 and rounded once to x's dtype (Ba, Kiros and Hinton, arXiv 1607.06450). H up to 16384.
    """
    value = x.contiguous().float()
    centred = value - value.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _layer_norm_kernel,
        {**dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}"), "eps": "fp32", "H": "i32"},
        {"BLOCK_H": block, "OVERLAP": True},
        num_warps=row_warps(block),
    )
    for dtype, block in (("bf16", 256), ("bf16", 2048), ("bf16", 8192), ("fp16", 2048), ("fp32", 2048))
]
