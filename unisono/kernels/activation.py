"""The gate of a gated MLP. Owns the ``silu_mul`` op; called by ``layers``.

Shapes: M rows, I intermediate features; the input holds gate and up side by side, [M, 2 I].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, differentiable, register
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x, out, I, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # noqa: E741
    follow(OVERLAP)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    inside = cols < I
    gate = tl.load(x + row * 2 * I + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * I + I + cols, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + cols, (silu * up).to(out.dtype.element_ty), mask=inside)


def launch_silu_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    rows, width = x.shape
    out = x.new_empty(rows, width // 2)
    grid = (rows, triton.cdiv(width // 2, _BLOCK))
    _silu_mul_kernel[grid](x, out, width // 2, BLOCK=_BLOCK, **overlapped(x.device))
    return out


def silu_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    # Not F.silu: its vectorised loop and its tail round differently, so bits would depend on the batch.
    gate32 = gate.float().contiguous()
    return (gate32 / (1.0 + torch.exp(-gate32))).to(x.dtype) * up


def _silu_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _silu_mul_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


define("silu_mul(Tensor x) -> Tensor")
register("silu_mul", cuda=launch_silu_mul, cpu=silu_mul_cpu, meta=_silu_mul_meta)
differentiable("silu_mul", _silu_mul_formula)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(x[:, :I]) * x[:, I:]`` for x [M, 2 I] -> [M, I], any float dtype (Shazeer, arXiv 2002.05202).

    SiLU in fp32, rounded to the dtype, then the product, rounded: the order of the unfused model.
    """
    return torch.ops.unisono.silu_mul(x)


AOT: list[AotCase] = [
    AotCase(_silu_mul_kernel, {"x": f"*{dtype}", "out": f"*{dtype}", "I": "i32"}, {"BLOCK": _BLOCK, "OVERLAP": True})
    for dtype in ("bf16", "fp16", "fp32")
]
