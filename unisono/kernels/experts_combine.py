"""The sum of what a token's experts said, the residual, and the norm of both. Owns the ``combine_experts`` op.

One program takes one row, in one launch at any number of rows. It adds in the order of the token's choices, the shared
expert last, so a row's bits do not depend on the batch. Called by ``layers``.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, register
from unisono.kernels.norm import rms_norm_cpu, row_warps
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _combine_kernel(y, weights, shared, gates, residual, norm_weight, total, normed, eps, H,
                    TOP_K: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
                    BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    follow(OVERLAP)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    inside = cols < H
    sum_ = tl.zeros([BLOCK_H], tl.float32)
    for slot in tl.static_range(TOP_K):
        w = tl.load(weights + row * TOP_K + slot) + tl.zeros([BLOCK_H], tl.float32)
        # A pair of weight 0 may have no expert, and then its row was never written.
        part = tl.load(y + (row * TOP_K + slot) * H + cols, mask=inside & (w != 0), other=0.0).to(tl.float32)
        sum_ += w * part
    if SHARED:
        part = tl.load(shared + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        sum_ += tl.load(gates + row) * part if GATE else part
    dtype = total.dtype.element_ty
    r = tl.load(residual + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = (sum_.to(dtype).to(tl.float32) + r).to(dtype)
    tl.store(total + row * H + cols, rounded, mask=inside)
    if NORM:
        value = rounded.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
        w_norm = tl.load(norm_weight + cols, mask=inside, other=0.0)
        if w_norm.dtype != tl.float32:  # as in rms_norm
            value = value.to(dtype).to(tl.float32)
        tl.store(normed + row * H + cols, (value * w_norm.to(tl.float32)).to(dtype), mask=inside)


def launch_combine(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, residual = y.contiguous(), residual.contiguous()
    shared = None if shared is None else shared.contiguous()
    (rows, top_k), hidden = weights.shape, residual.shape[1]
    total, normed = _combine_meta(y, weights, shared, gates, residual, norm_weight, eps)
    block = triton.next_power_of_2(hidden)
    _combine_kernel[(rows,)](
        y, weights, shared, gates, residual, norm_weight, total, normed, eps, hidden,
        TOP_K=top_k, SHARED=shared is not None, GATE=gates is not None, NORM=norm_weight is not None, BLOCK_H=block,
        num_warps=row_warps(block), **overlapped(y.device),
    )  # fmt: skip
    return total, normed


def combine_cpu(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, top_k = weights.shape
    total = torch.zeros(residual.shape, dtype=torch.float32)
    for slot, part in enumerate(y.view(rows, top_k, -1).unbind(1)):
        weight = weights[:, slot, None]
        total = total + weight * torch.where(weight != 0, part, 0).float()
    if shared is not None:
        total = total + (shared.float() if gates is None else gates[:, None] * shared.float())
    total = total.to(residual.dtype) + residual
    return total, residual.new_empty(0) if norm_weight is None else rms_norm_cpu(total, norm_weight, eps)


def _combine_meta(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = residual.new_empty(0) if norm_weight is None else residual.new_empty(residual.shape)
    return residual.new_empty(residual.shape), normed


define(
    "combine_experts(Tensor y, Tensor weights, Tensor? shared, Tensor? gates, Tensor residual, Tensor? norm_weight,"
    " float eps) -> (Tensor, Tensor)"
)
register("combine_experts", cuda=launch_combine, cpu=combine_cpu, meta=_combine_meta)


def combine_experts(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """``residual + sum of weights * y (+ gates * shared)`` -> [M, H] in residual's dtype.

    y [M * top_k, H]: a token's rows are neighbours, those of weight 0 are not read; weights [M, top_k] fp32; shared [M,
    H], whose gates [M] fp32 are 1 where None; residual [M, H]. The sum is fp32 in the order of the slots and rounded
    once, then the residual is added.
    """
    return torch.ops.unisono.combine_experts(y, weights, shared, gates, residual, None, 0.0)[0]


def combine_experts_norm(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, normed), each [M, H]: :func:`combine_experts`, and ``rms_norm(total, norm_weight, eps)``."""
    return torch.ops.unisono.combine_experts(y, weights, shared, gates, residual, norm_weight, eps)


AOT: list[AotCase] = [
    AotCase(
        _combine_kernel,
        {
            **dict.fromkeys(("y", "shared", "residual", "total", "normed"), f"*{dtype}"),
            **dict.fromkeys(("weights", "gates"), "*fp32"), "norm_weight": f"*{norm}", "eps": "fp32", "H": "i32",
        },
        {
            "TOP_K": top_k, "SHARED": shared, "GATE": shared, "NORM": True, "BLOCK_H": block, "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )
    for dtype, norm, top_k, shared, block in (
        ("bf16", "fp32", 8, True, 2048), ("bf16", "bf16", 8, False, 2048), ("bf16", "bf16", 2, False, 4096),
        ("fp16", "fp16", 2, False, 128), ("fp32", "fp32", 8, True, 128),
    )
]  # fmt: skip
