"""Norms and sums around a dense MLP and the experts beside it, in one launch before them and one after.

Owns the ops ``beside_norms`` and ``beside_sum``; called by ``layers``. The first norms the mixer's output, adds it and
norms the sum three times: for the MLP, the experts and the router. The second sums the experts' outputs, norms them and
the MLP's, adds both, norms the sum and adds it to the residual, and norms that. Bits are those of ``combine_experts``,
``rms_norm``, additions and products in turn. One program takes one row, so a row's bits do not depend on the batch.

Shapes: M rows, H features, P = M * top_k pairs of a row and an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import GROUP, padded_rows
from unisono.kernels.library import AotCase, empty_like, op
from unisono.kernels.moe.combine import combine_experts, weighted_rows
from unisono.kernels.norm.rms_norm import (
    SumNormed,
    columns_of,
    factor_of,
    rms_norm,
    rounded_norm,
    row_warps,
    store_norm,
    store_scaled,
    with_fp8_cpu,
    with_fp8_meta,
)
from unisono.kernels.norm.sandwich_norm import add_normed_op
from unisono.kernels.overlap import follow, overlapped, overlapping


class BesideNormed(NamedTuple):
    """The sum ``total`` [M, H] and its norms: for the MLP and for the experts, each plain [M, H], in e4m3 [M', H] and
    the scales [G, M'] of that, and ``routed`` [M, H] for the router. Outputs without a consumer are empty."""

    total: torch.Tensor
    dense: torch.Tensor
    dense8: torch.Tensor
    dense_scales: torch.Tensor
    sparse: torch.Tensor
    sparse8: torch.Tensor
    sparse_scales: torch.Tensor
    routed: torch.Tensor


@overlapping(reads_early=True, leads=True)
@triton.jit
def _beside_norms_kernel(x, residual, after, dense_weight, sparse_weight, router_weight, total, dense, dense8,
                         dense_scales, sparse, sparse8, sparse_scales, routed, after_eps, eps, H, M, PADDED,
                         BLOCK_H: tl.constexpr, DENSE_KEEP: tl.constexpr, DENSE_GROUP: tl.constexpr,
                         SPARSE_KEEP: tl.constexpr, SPARSE_GROUP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Norm, add and norm one row per program. KEEP, GROUP: of both norms that may be quantised, see
    ``rms_norm._rms_norm_kernel``."""
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    w_after = tl.load(after + cols, mask=inside, other=0.0)
    w_dense = tl.load(dense_weight + cols, mask=inside, other=0.0)
    follow(OVERLAP, DENSE_GROUP + SPARSE_GROUP > 0)
    row = tl.program_id(0).to(tl.int64) * H
    real = inside & (tl.program_id(0) < M)
    dtype = total.dtype.element_ty
    value = tl.load(x + row + cols, mask=real, other=0.0).to(tl.float32)
    r = tl.load(residual + row + cols, mask=real, other=0.0).to(tl.float32)
    w_sparse = tl.load(sparse_weight + cols, mask=inside, other=0.0)
    w_router = tl.load(router_weight + cols, mask=inside, other=0.0)
    summed = (rounded_norm(value, w_after, H, after_eps, dtype).to(tl.float32) + r).to(dtype)
    tl.store(total + row + cols, summed, mask=real)
    value = summed.to(tl.float32)
    value = value * factor_of(value, H, eps)
    store_scaled(value, w_dense, dense, dense8, dense_scales, cols, real, H, PADDED, DENSE_KEEP, DENSE_GROUP)
    store_scaled(value, w_sparse, sparse, sparse8, sparse_scales, cols, real, H, PADDED, SPARSE_KEEP, SPARSE_GROUP)
    store_scaled(value, w_router, routed, None, None, cols, real, H, PADDED, True, 0)


def launch_beside_norms(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: torch.Tensor,
    after_eps: float,
    dense_weight: torch.Tensor,
    sparse_weight: torch.Tensor,
    router_weight: torch.Tensor,
    eps: float,
    dense_group: int | None = None,
    dense_keep: bool = True,
    sparse_group: int | None = None,
    sparse_keep: bool = True,
) -> BesideNormed:
    """See :func:`beside_norms`."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    made = _norms_meta(x, dense_group, dense_keep, sparse_group, sparse_keep)
    padded = rows if dense_group is None and sparse_group is None else padded_rows(rows)
    _beside_norms_kernel[(padded,)](
        x, residual, after, dense_weight, sparse_weight, router_weight, *made, after_eps, eps, width, rows, padded,
        BLOCK_H=block, DENSE_KEEP=dense_keep, DENSE_GROUP=columns_of(dense_group, block), SPARSE_KEEP=sparse_keep,
        SPARSE_GROUP=columns_of(sparse_group, block), num_warps=row_warps(block), **overlapped(x.device),
    )  # fmt: skip
    return made


def _norms_meta(
    x: torch.Tensor, dense_group: int | None, dense_keep: bool, sparse_group: int | None, sparse_keep: bool
) -> BesideNormed:
    both = *with_fp8_meta(x, dense_group, dense_keep), *with_fp8_meta(x, sparse_group, sparse_keep)
    return BesideNormed(empty_like(x), *both, empty_like(x))


@op(cuda=launch_beside_norms, meta=_norms_meta)
def beside_norms(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: torch.Tensor,
    after_eps: float,
    dense_weight: torch.Tensor,
    sparse_weight: torch.Tensor,
    router_weight: torch.Tensor,
    eps: float,
    dense_group: int | None = None,
    dense_keep: bool = True,
    sparse_group: int | None = None,
    sparse_keep: bool = True,
) -> BesideNormed:
    """Compute ``total = residual + rms_norm(x, after, after_eps)`` and its norms with three weights.

    x, residual [M, H] of one dtype; weights [H] as in ``rms_norm``. group, keep: of the norms for the MLP and for the
    experts, as in ``rms_norm_fp8``; group None: not quantised. Each step is rounded to the dtype.
    """
    total = rms_norm.cpu(x, after, after_eps) + residual
    dense = with_fp8_cpu(rms_norm.cpu(total, dense_weight, eps), dense_group, dense_keep)
    sparse = with_fp8_cpu(rms_norm.cpu(total, sparse_weight, eps), sparse_group, sparse_keep)
    return BesideNormed(total, *dense, *sparse, rms_norm.cpu(total, router_weight, eps))


# ---- after both -------------------------------------------------------------------------------------


@overlapping(reads_early=True, leads=True)
@triton.jit
def _beside_sum_kernel(y, weights, dense, residual, dense_after, sparse_after, after, factor, weight, total, out, x8,
                       scales, eps, after_eps, norm_eps, H, M, PADDED, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
                       SCALED: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr,
                       OVERLAP: tl.constexpr):  # fmt: skip
    """Sum, norm and add one row per program. SCALED, NORM, KEEP, GROUP: see ``sandwich_norm._add_normed_kernel``."""
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    w_dense = tl.load(dense_after + cols, mask=inside, other=0.0)
    w_sparse = tl.load(sparse_after + cols, mask=inside, other=0.0)
    if SCALED:
        times = tl.load(factor).to(tl.float32)
    follow(OVERLAP, GROUP > 0)
    row = tl.program_id(0).to(tl.int64)
    here = row < M
    real, at = inside & here, row * H + cols
    dtype = total.dtype.element_ty
    d = tl.load(dense + at, mask=real, other=0.0).to(tl.float32)
    r = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    mixed = weighted_rows(y, weights, row, here, cols, real, H, TOP_K, BLOCK_H, True).to(dtype).to(tl.float32)
    w_after = tl.load(after + cols, mask=inside, other=0.0)
    if NORM:
        w = tl.load(weight + cols, mask=inside, other=0.0)
    mixed = rounded_norm(mixed, w_sparse, H, eps, dtype).to(tl.float32)
    both = (mixed + rounded_norm(d, w_dense, H, eps, dtype).to(tl.float32)).to(dtype).to(tl.float32)
    summed = (rounded_norm(both, w_after, H, after_eps, dtype).to(tl.float32) + r).to(dtype)
    if SCALED:
        summed = (summed.to(tl.float32) * times).to(dtype)
    tl.store(total + at, summed, mask=real)
    if NORM:
        store_norm(summed.to(tl.float32), w, out, x8, scales, cols, real, norm_eps, H, PADDED, KEEP, GROUP)


def launch_beside_sum(
    y: torch.Tensor,
    weights: torch.Tensor,
    dense: torch.Tensor,
    residual: torch.Tensor,
    dense_after: torch.Tensor,
    sparse_after: torch.Tensor,
    eps: float,
    after: torch.Tensor,
    after_eps: float,
    factor: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm_eps: float,
    group: int | None = None,
    keep: bool = True,
) -> SumNormed:
    """See :func:`beside_sum`."""
    y, dense, residual = y.contiguous(), dense.contiguous(), residual.contiguous()
    (rows, top_k), width = weights.shape, residual.shape[1]
    block = triton.next_power_of_2(width)
    out, x8, scales = with_fp8_meta(residual, group, keep and weight is not None)
    total, padded = torch.empty_like(residual), rows if group is None else len(x8)
    _beside_sum_kernel[(padded,)](
        y, weights, dense, residual, dense_after, sparse_after, after, factor, weight, total, out,
        *((None,) * 2 if group is None else (x8, scales)), eps, after_eps, norm_eps, width, rows, padded, TOP_K=top_k,
        BLOCK_H=block, SCALED=factor is not None, NORM=weight is not None, KEEP=keep, GROUP=columns_of(group, block),
        num_warps=row_warps(block), **overlapped(y.device),
    )  # fmt: skip
    return total, out, x8, scales


def _sum_meta(residual: torch.Tensor, weight: torch.Tensor | None, group: int | None, keep: bool) -> SumNormed:
    return empty_like(residual), *with_fp8_meta(residual, group, keep and weight is not None)


@op(cuda=launch_beside_sum, meta=_sum_meta)
def beside_sum(
    y: torch.Tensor,
    weights: torch.Tensor,
    dense: torch.Tensor,
    residual: torch.Tensor,
    dense_after: torch.Tensor,
    sparse_after: torch.Tensor,
    eps: float,
    after: torch.Tensor,
    after_eps: float,
    factor: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm_eps: float,
    group: int | None = None,
    keep: bool = True,
) -> SumNormed:
    """Compute ``total = factor * (residual + rms_norm(both, after, after_eps))`` and ``rms_norm(total, weight)``.

    ``both`` is ``rms_norm(dense, dense_after, eps) + rms_norm(sum of weights * y, sparse_after, eps)``. y [P, H] and
    weights [M, top_k] fp32 as in ``combine_experts``; dense, residual [M, H] of one dtype; factor [1], None: no factor.
    group, keep: as in ``add_normed_fp8``; group None: not quantised; weight None: no norm. Each step is rounded to the
    dtype. Returns (total [M, H], norm [M, H], its e4m3 values, their scales), those without a consumer empty.
    """
    mixed = combine_experts(y, weights, None, None, torch.zeros_like(residual))
    both = rms_norm.cpu(mixed, sparse_after, eps) + rms_norm.cpu(dense, dense_after, eps)
    return add_normed_op.cpu(both, residual, after, after_eps, factor, weight, norm_eps, group, keep)


def _aot_norms(dtype: str, kind: str, block: int, group: int | None, keep: bool) -> AotCase:
    plain = ["x", "residual", "total", "dense", "sparse", "routed"]
    weights = ["after", "dense_weight", "sparse_weight", "router_weight"]
    eights = {"dense8": "*fp8e4nv", "sparse8": "*fp8e4nv", "dense_scales": "*fp32", "sparse_scales": "*fp32"}
    return AotCase(
        _beside_norms_kernel,
        {
            **dict.fromkeys(plain, f"*{dtype}"), **dict.fromkeys(weights, f"*{kind}"), **eights,
            **dict.fromkeys(("after_eps", "eps"), "fp32"), **dict.fromkeys(("H", "M", "PADDED"), "i32"),
        },
        {
            "BLOCK_H": block, "DENSE_KEEP": keep, "SPARSE_KEEP": keep, "DENSE_GROUP": columns_of(group, block),
            "SPARSE_GROUP": columns_of(group, block), "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )  # fmt: skip


def _aot_sum(dtype: str, kind: str, block: int, top_k: int, scaled: bool, normed: bool, group: int | None) -> AotCase:
    plain = ["y", "dense", "residual", "total", "out"]
    weights = ["dense_after", "sparse_after", "after"]
    optional = {"factor": (scaled, f"*{dtype}"), "weight": (normed, f"*{kind}")}
    optional |= {"x8": (group is not None, "*fp8e4nv"), "scales": (group is not None, "*fp32")}
    return AotCase(
        _beside_sum_kernel,
        {
            **dict.fromkeys(plain, f"*{dtype}"), **dict.fromkeys(weights, f"*{kind}"), "weights": "*fp32",
            **{name: there for name, (used, there) in optional.items() if used},
            **dict.fromkeys(("eps", "after_eps", "norm_eps"), "fp32"), **dict.fromkeys(("H", "M", "PADDED"), "i32"),
        },
        {
            **{name: None for name, (used, _) in optional.items() if not used},
            "TOP_K": top_k, "BLOCK_H": block, "SCALED": scaled, "NORM": normed, "KEEP": group is None,
            "GROUP": columns_of(group, block), "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )  # fmt: skip


AOT: list[AotCase] = [
    _aot_norms("bf16", "fp32", 4096, None, True),
    _aot_norms("bf16", "fp32", 4096, GROUP, False),
    _aot_norms("fp16", "fp16", 256, GROUP, True),
    _aot_sum("bf16", "fp32", 4096, 8, True, True, None),
    _aot_sum("bf16", "fp32", 4096, 8, True, True, GROUP),
    _aot_sum("fp32", "fp32", 4096, 2, False, False, None),
]
