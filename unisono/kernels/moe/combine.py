"""Weighted sum of a token's expert outputs, plus the residual, and its norm. Owns the ``combine_experts`` op.

One program takes one row, in one launch at any number of rows. It adds in the order of the token's experts, the shared
expert last, so a row's bits do not depend on the batch. Called by ``layers``.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import GROUP, Quantised, empty_quantised
from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import (
    columns_of,
    quantised_norm,
    rms_norm,
    row_warps,
    store_norm,
    with_fp8_cpu,
    with_fp8_meta,
)
from unisono.kernels.overlap import follow, overlapped, overlapping


@triton.jit
def _weight(pointer, real, SOME: tl.constexpr):
    """Load a number per row; 0 in rows of padding. SOME: there are such rows."""
    if SOME:
        return tl.load(pointer, mask=real, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def weighted_rows(y, weights, row, real, cols, inside, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
                  SOME: tl.constexpr):  # fmt: skip
    """Sum a token's expert outputs by weight, by choice: fp32 [BLOCK_H]. SOME: see :func:`_weight`."""
    sum_ = tl.zeros([BLOCK_H], tl.float32)
    for slot in tl.static_range(TOP_K):
        w = _weight(weights + row * TOP_K + slot, real, SOME) + tl.zeros([BLOCK_H], tl.float32)
        # A pair of weight 0 may have no expert, and then its row was never written.
        part = tl.load(y + (row * TOP_K + slot) * H + cols, mask=inside & (w != 0), other=0.0).to(tl.float32)
        sum_ = tl.fma(w, part, sum_)
    return sum_


@overlapping(reads_early=True, leads=True)
@triton.jit
def _combine_kernel(y, weights, shared, gates, residual, norm_weight, total, normed, x8, scales, eps, H, M, PADDED,
                    TOP_K: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
                    BLOCK_H: tl.constexpr, KEEP: tl.constexpr, COLUMNS: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Combine one row per program. KEEP: the norm is stored. COLUMNS: columns that share a scale in x8; 0: not
    quantised.
    """
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    inside = cols < H
    if NORM:
        w_norm = tl.load(norm_weight + cols, mask=inside, other=0.0)
    follow(OVERLAP, COLUMNS > 0)
    real = row >= 0
    if COLUMNS > 0:
        real = row < M
        inside = inside & real
    sum_ = weighted_rows(y, weights, row, real, cols, inside, H, TOP_K, BLOCK_H, COLUMNS > 0)
    if SHARED:
        part = tl.load(shared + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            gate = _weight(gates + row, real, COLUMNS > 0) + tl.zeros([BLOCK_H], tl.float32)
            sum_ = tl.fma(gate, part, sum_)
        else:
            sum_ += part
    dtype = total.dtype.element_ty
    r = tl.load(residual + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = (sum_.to(dtype).to(tl.float32) + r).to(dtype)
    tl.store(total + row * H + cols, rounded, mask=inside)
    if NORM:
        store_norm(rounded.to(tl.float32), w_norm, normed, x8, scales, cols, inside, eps, H, PADDED, KEEP, COLUMNS)


Combined = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(total, norm, its e4m3 values, their scales); outputs without a consumer are empty."""


def launch_combine(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    group: int | None = None,
    keep: bool = True,
) -> Combined:
    y, residual = y.contiguous(), residual.contiguous()
    shared = None if shared is None else shared.contiguous()
    (rows, top_k), hidden = weights.shape, residual.shape[1]
    total, normed, x8, scales = _combine_meta(residual, norm_weight, group, keep)
    block = triton.next_power_of_2(hidden)
    quantised, sizes = ((None,) * 2,) * 2 if group is None else ((x8, scales), (rows, len(x8)))
    _combine_kernel[(rows if group is None else len(x8),)](
        y, weights, shared, gates, residual, norm_weight, total, normed, *quantised, eps, hidden, *sizes,
        TOP_K=top_k, SHARED=shared is not None, GATE=gates is not None, NORM=norm_weight is not None, BLOCK_H=block,
        KEEP=keep, COLUMNS=columns_of(group, block), num_warps=row_warps(block), **overlapped(y.device),
    )  # fmt: skip
    return total, normed, x8, scales


def _combine_meta(residual: torch.Tensor, norm_weight: torch.Tensor | None, group: int | None, keep: bool) -> Combined:
    return residual.new_empty(residual.shape), *with_fp8_meta(residual, group, keep and norm_weight is not None)


@op(cuda=launch_combine, meta=_combine_meta)
def combine_experts_op(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    group: int | None = None,
    keep: bool = True,
) -> Combined:
    rows, top_k = weights.shape
    total = torch.zeros(residual.shape, dtype=torch.float32)
    for slot, part in enumerate(y.view(rows, top_k, -1).unbind(1)):
        weight = weights[:, slot, None]
        total = total + weight * torch.where(weight != 0, part, 0).float()
    if shared is not None:
        total = total + (shared.float() if gates is None else gates[:, None] * shared.float())
    total = total.to(residual.dtype) + residual
    if norm_weight is None:
        return total, residual.new_empty(0), *empty_quantised(residual, 0, 0, None)
    return total, *with_fp8_cpu(rms_norm.cpu(total, norm_weight, eps), group, keep)


def combine_experts(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Compute ``residual + sum of weights * y (+ gates * shared)``: [M, H] in residual's dtype.

    y [M * top_k, H]: adjacent rows of a token; those of weight 0 are not read. weights [M, top_k] fp32. shared [M, H].
    gates [M] fp32; None: 1. residual [M, H]. The sum is fp32 in the order of the slots and rounded once, then the
    residual is added.
    """
    return combine_experts_op(y, weights, shared, gates, residual, None, 0.0)[0]


def combine_experts_norm(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`combine_experts` and ``rms_norm(total, norm_weight, eps)``: (total, normed), each [M, H]."""
    return combine_experts_op(y, weights, shared, gates, residual, norm_weight, eps)[:2]


def combine_experts_norm_fp8(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group: int,
    keep: bool,
) -> tuple[torch.Tensor, Quantised]:
    """Compute :func:`combine_experts_norm` and quantise the norm as
    :func:`unisono.kernels.norm.rms_norm.rms_norm_fp8`.
    """
    total, *normed = combine_experts_op(y, weights, shared, gates, residual, norm_weight, eps, group, keep)
    return total, quantised_norm(normed, residual, group, keep)


AOT: list[AotCase] = [
    AotCase(
        _combine_kernel,
        {
            **dict.fromkeys(("y", "shared", "residual", "total", "normed"), f"*{dtype}"),
            **dict.fromkeys(("weights", "gates"), "*fp32"), "norm_weight": f"*{norm}", "eps": "fp32", "H": "i32",
            **({} if group is None else {"x8": "*fp8e4nv", "scales": "*fp32", "M": "i32", "PADDED": "i32"}),
        },
        {
            "TOP_K": top_k, "SHARED": shared, "GATE": shared, "NORM": True, "BLOCK_H": block, "KEEP": shared,
            "COLUMNS": columns_of(group, block), "OVERLAP": True,
            **({} if group is not None else {**dict.fromkeys(("x8", "scales", "M", "PADDED")), "KEEP": True}),
        },
        num_warps=row_warps(block),
    )
    for dtype, norm, top_k, shared, block, group in (
        ("bf16", "fp32", 8, True, 2048, None), ("bf16", "bf16", 8, False, 2048, None),
        ("bf16", "bf16", 2, False, 4096, None), ("fp16", "fp16", 2, False, 128, None),
        ("fp32", "fp32", 8, True, 128, None), ("bf16", "fp32", 8, True, 2048, GROUP),
        ("bf16", "bf16", 8, False, 4096, GROUP), ("bf16", "bf16", 2, False, 4096, 0),
    )
]  # fmt: skip
