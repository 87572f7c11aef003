"""Learned positions of patches, interpolated between the points of a table. Owns the ``add_positions`` op.

One program takes one patch and adds its four points in order. Called by ``models/vision``.

Shapes: P patches, W features, S points of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024


@triton.jit
def _add_positions_kernel(x, table, sources, weights, out, W, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < W
    total = tl.zeros([BLOCK], tl.float32)
    for point in tl.static_range(4):
        source = tl.load(sources + row * 4 + point).to(tl.int64)
        value = tl.load(table + source * W + cols, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * 4 + point)
    dtype = out.dtype.element_ty
    value = tl.load(x + row * W + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * W + cols, (value + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)


def launch_add_positions(
    x: torch.Tensor, table: torch.Tensor, sources: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[1]
    grid = (x.shape[0], triton.cdiv(width, _BLOCK))
    _add_positions_kernel[grid](
        x, table, sources.contiguous(), weights.contiguous(), out, width, BLOCK=_BLOCK, **overlapped(x.device)
    )
    return out


@op(cuda=launch_add_positions)
def add_positions(x: torch.Tensor, table: torch.Tensor, sources: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute ``x + sum of weights[:, j] * table[sources[:, j]]`` over four points: [P, W] in x's dtype.

    x [P, W], table [S, W] of x's dtype; sources [P, 4] i32, in range; weights [P, 4] fp32. The sum is computed in fp32
    and rounded before it is added.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for point in range(4):
        total = total + table[sources[:, point].long()].float() * weights[:, point : point + 1]
    return (x.float() + total.to(x.dtype).float()).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _add_positions_kernel,
        {**dict.fromkeys(("x", "table", "out"), f"*{dtype}"), "sources": "*i32", "weights": "*fp32", "W": "i32"},
        {"BLOCK": _BLOCK, "OVERLAP": True},
    )
    for dtype in ("bf16", "fp16", "fp32")
]
