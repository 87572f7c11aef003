"""Soft caps of logits. Owns the ``soft_cap`` op; called by ``models``.

Shapes: M rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.attention.split import tanh
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024


@triton.jit
def _soft_cap_kernel(x, out, total, CAP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (CAP * tanh(value / CAP)).to(out.dtype.element_ty), mask=inside)


def launch_soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _soft_cap_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x, out, x.numel(), CAP=cap, BLOCK=_BLOCK, **overlapped(x.device)
    )
    return out


@op(cuda=launch_soft_cap)
def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute ``cap * tanh(x / cap)`` of x [M, V] in fp32, rounded once to x's dtype (Gemma 2, arXiv 2408.00118)."""
    return (x.contiguous().float() / cap).tanh_().mul_(cap).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _soft_cap_kernel,
        {"x": f"*{dtype}", "out": f"*{dtype}", "total": "i32"},
        {"CAP": 30.0, "BLOCK": _BLOCK, "OVERLAP": True},
    )
    for dtype in ("bf16", "fp16", "fp32")
]
