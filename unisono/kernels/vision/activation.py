"""GELU of vision towers' MLPs. Owns the ``gelu`` op; called by ``models/vision``.

Shapes: M rows, I features.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024
_TANH = 2 * math.sqrt(2 / math.pi)
"""Constants of gelu(x) by tanh, x · sigmoid(_TANH · (x + _CUBE · x³)): tanh(u) = 2 sigmoid(2 u) - 1."""
_CUBE = 0.044715


@triton.jit
def _gelu_kernel(x, out, total, EXACT: tl.constexpr, TANH: tl.constexpr, CUBE: tl.constexpr, BLOCK: tl.constexpr,
                 OVERLAP: tl.constexpr):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if EXACT:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        result = value / (1.0 + tl.exp(-TANH * (value + CUBE * value * value * value)))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def launch_gelu(x: torch.Tensor, exact: bool) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _gelu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x, out, x.numel(), EXACT=exact, TANH=_TANH, CUBE=_CUBE, BLOCK=_BLOCK, **overlapped(x.device)
    )
    return out


@op(cuda=launch_gelu)
def gelu(x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Compute GELU of x [M, I] in x's dtype, in fp32 (Hendrycks and Gimpel, arXiv 1606.08415).

    exact: with the error function; otherwise with tanh (``gelu_pytorch_tanh`` of config.json).
    """
    value = x.contiguous().float()
    if exact:
        return (0.5 * value * (1.0 + torch.erf(value * math.sqrt(0.5)))).to(x.dtype)
    # Not F.gelu: its vectorised loop and its tail round differently, so bits would depend on the batch.
    return (value / (1.0 + torch.exp(-_TANH * (value + _CUBE * value * value * value)))).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _gelu_kernel,
        {"x": f"*{dtype}", "out": f"*{dtype}", "total": "i32"},
        {"EXACT": exact, "TANH": _TANH, "CUBE": _CUBE, "BLOCK": _BLOCK, "OVERLAP": True},
    )
    for dtype in ("bf16", "fp16", "fp32")
    for exact in (False, True)
]
