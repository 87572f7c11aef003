"""Tail of a block whose output is normed before it is added. Owns the ``add_normed`` op; called by ``layers``.

One launch: the norm of the block's output, its sum with the residual, a factor, and the norm of that sum, which the
next block reads. Bits are those of ``rms_norm``, an addition, a product and ``rms_norm``. One program takes one row, so
a row's bits do not depend on the batch.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import GROUP, Quantised, empty_quantised
from unisono.kernels.library import AotCase, empty_like, op
from unisono.kernels.norm.rms_norm import (
    SumNormed,
    columns_of,
    quantised_norm,
    rms_norm,
    rms_norm_formula,
    rounded_norm,
    row_warps,
    store_norm,
    with_fp8_cpu,
    with_fp8_meta,
)
from unisono.kernels.overlap import follow, overlapped, overlapping


@overlapping(reads_early=True)
@triton.jit
def _add_normed_kernel(x, residual, after, factor, weight, total, out, x8, scales, after_eps, eps, H, M, PADDED,
                       BLOCK_H: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
                       GROUP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Norm, add and norm one row per program. SCALED: the sum is multiplied by ``factor`` [1]. NORM: the sum is normed
    with ``weight``. KEEP, GROUP: see ``rms_norm._rms_norm_kernel``."""
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    w_after = tl.load(after + cols, mask=inside, other=0.0)
    if NORM:
        w = tl.load(weight + cols, mask=inside, other=0.0)
    if SCALED:
        times = tl.load(factor).to(tl.float32)
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * H
    if GROUP > 0:
        inside = inside & (tl.program_id(0) < M)
    dtype = total.dtype.element_ty
    value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
    summed = (rounded_norm(value, w_after, H, after_eps, dtype) + r).to(dtype)
    if SCALED:
        summed = (summed.to(tl.float32) * times).to(dtype)
    tl.store(total + row + cols, summed, mask=inside)
    if NORM:
        store_norm(summed.to(tl.float32), w, out, x8, scales, cols, inside, eps, H, PADDED, KEEP, GROUP)


def launch_add_normed(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: torch.Tensor,
    after_eps: float,
    factor: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    group: int | None = None,
    keep: bool = True,
) -> SumNormed:
    """See :func:`add_normed`."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, width = x.shape
    total, block = torch.empty_like(x), triton.next_power_of_2(width)
    out, x8, scales = with_fp8_meta(x, group, keep and weight is not None)
    quantised = (None,) * 2 if group is None else (rows, scales.shape[1])
    _add_normed_kernel[(rows if group is None else len(x8),)](
        x, residual, after, factor, weight, total, out, *((None,) * 2 if group is None else (x8, scales)), after_eps,
        eps, width, *quantised, BLOCK_H=block, SCALED=factor is not None, NORM=weight is not None, KEEP=keep,
        GROUP=columns_of(group, block), num_warps=row_warps(block), **overlapped(x.device),
    )  # fmt: skip
    return total, out, x8, scales


def _meta(x: torch.Tensor, weight: torch.Tensor | None, group: int | None, keep: bool) -> SumNormed:
    return empty_like(x), *with_fp8_meta(x, group, keep and weight is not None)


def _formula(
    x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, after_eps: float, factor: torch.Tensor | None,
    weight: torch.Tensor | None, eps: float, group: int | None = None, keep: bool = True,
) -> SumNormed:  # fmt: skip
    """Compute :func:`add_normed` with a gradient. Raises NotImplementedError for a quantised norm."""
    if group is not None:
        raise NotImplementedError("norms that are quantised to fp8 have no gradient")
    total = rms_norm_formula(x, after, after_eps) + residual
    total = total if factor is None else (total * factor).to(x.dtype)
    normed = x.new_empty(0) if weight is None else rms_norm_formula(total, weight, eps)
    return total, normed, *empty_quantised(x, 0, 0, None)


@op(cuda=launch_add_normed, meta=_meta, gradient=_formula)
def add_normed_op(
    x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, after_eps: float, factor: torch.Tensor | None,
    weight: torch.Tensor | None, eps: float, group: int | None = None, keep: bool = True,
) -> SumNormed:  # fmt: skip
    total = rms_norm.cpu(x, after, after_eps) + residual
    total = total if factor is None else total * factor
    if weight is None:
        return total, x.new_empty(0), *empty_quantised(x, 0, 0, None)
    return total, *with_fp8_cpu(rms_norm.cpu(total, weight, eps), group, keep)


def add_normed(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: torch.Tensor,
    after_eps: float,
    factor: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``total = factor * (residual + rms_norm(x, after, after_eps))`` and ``rms_norm(total, weight, eps)``.

    x, residual [M, H] of one dtype; after, weight [H] as in ``rms_norm``; factor [1] of x's dtype, None: no factor.
    Each step is rounded to the dtype. Returns (total, normed), each [M, H]; with weight None the sum twice.
    """
    total, normed, *_ = add_normed_op(x, residual, after, after_eps, factor, weight, eps)
    return total, total if weight is None else normed


def add_normed_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: torch.Tensor,
    after_eps: float,
    factor: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: int,
    keep: bool,
) -> tuple[torch.Tensor, Quantised]:
    """Compute :func:`add_normed` and quantise its norm as ``rms_norm_fp8``."""
    total, *normed = add_normed_op(x, residual, after, after_eps, factor, weight, eps, group, keep)
    return total, quantised_norm(normed, total, group, keep)


AOT: list[AotCase] = [
    AotCase(
        _add_normed_kernel,
        {
            **dict.fromkeys(("x", "residual", "total", "out"), f"*{dtype}"),
            **({"factor": f"*{dtype}"} if scaled else {}),
            **dict.fromkeys(("after", "weight") if normed else ("after",), f"*{kind}"),
            **dict.fromkeys(("after_eps", "eps"), "fp32"),
            "H": "i32",
            **({} if group is None else {"x8": "*fp8e4nv", "scales": "*fp32", "M": "i32", "PADDED": "i32"}),
        },
        {
            **({} if scaled else {"factor": None}),
            **({} if normed else {"weight": None}),
            **({} if group is not None else dict.fromkeys(("x8", "scales", "M", "PADDED"))),
            "BLOCK_H": block, "SCALED": scaled, "NORM": normed, "KEEP": keep, "GROUP": columns_of(group, block),
            "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )
    for dtype, kind, block, scaled, normed, group, keep in (
        ("bf16", "fp32", 4096, False, True, None, True), ("bf16", "fp32", 8192, True, True, None, True),
        ("bf16", "fp32", 2048, True, True, None, True), ("bf16", "fp32", 2048, False, False, None, True),
        ("fp32", "fp32", 4096, True, True, None, True), ("fp16", "fp16", 256, True, True, None, True),
        ("bf16", "fp32", 4096, True, True, GROUP, True), ("bf16", "fp32", 4096, False, True, GROUP, False),
        ("bf16", "fp32", 4096, False, True, 0, False),
    )
]  # fmt: skip
