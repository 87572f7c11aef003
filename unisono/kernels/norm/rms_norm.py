"""RMSNorm over the last dimension. Owns the ``rms_norm`` op; called by ``layers`` and draft heads.

One program takes one row, and the order of its sum depends on the row's length only, so a row's bits do not depend on
the batch.

The weight's dtype determines how often the result is rounded. A weight of the activations' dtype multiplies the rounded
value, as in Llama. A weight in fp32 multiplies the value in fp32, and the product is rounded once: so do the
zero-centred norms of Qwen3-Next and Qwen3.5, whose weight is 1 + w in fp32. Where the activations are fp32 too, both
are the same.

For consumers with e4m3 or int8 weights the kernel quantises the result too (``kernels/gemm/fp8_quantize.py``).

Shapes: M rows, H features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import (
    GROUP,
    INT8_ROWS,
    Quantised,
    element_of,
    empty_quantised,
    handed_on,
    quantised_cpu,
    store_quantised,
)
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped, overlapping


@triton.jit
def square(x):
    """Compute x², rounded. The fma keeps the compiler from fusing a square into the sum, differently in each kernel."""
    return tl.fma(x, x, 0.0)


@triton.jit
def rounded_before_weight(normed, kind: tl.constexpr, dtype: tl.constexpr):
    """Round the normalised value to ``dtype`` before the weight is applied, unless the weight's ``kind`` is fp32."""
    if kind != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return normed


@triton.jit
def factor_of(value, H, eps):
    """Factor of a row's elements in its norm. value: fp32, with zeros beyond H."""
    return tl.rsqrt(tl.sum(square(value), axis=0) / H + eps)


@triton.jit
def rounded_norm(value, w, H, eps, dtype: tl.constexpr):
    """Norm this program's row in ``dtype``. value: fp32, with zeros beyond H. w: the weight."""
    normed = rounded_before_weight(value * factor_of(value, H, eps), w.dtype, dtype)
    return tl.fma(normed, w.to(tl.float32), 0.0).to(dtype)  # see square


@triton.jit
def store_norm(value, w, out, x8, scales, cols, inside, eps, H, PADDED, KEEP: tl.constexpr, GROUP: tl.constexpr):
    """Store the norm of this program's row. value: fp32, with zeros beyond H. w: the weight, loaded before.

    See :func:`_rms_norm_kernel`.
    """
    store_scaled(value * factor_of(value, H, eps), w, out, x8, scales, cols, inside, H, PADDED, KEEP, GROUP)


@triton.jit
def store_scaled(scaled, w, out, x8, scales, cols, inside, H, PADDED, KEEP: tl.constexpr, GROUP: tl.constexpr):
    """:func:`store_norm` of elements that are multiplied by :func:`factor_of` their row already."""
    row = tl.program_id(0).to(tl.int64) * H
    normed = rounded_before_weight(scaled, w.dtype, out.dtype.element_ty)
    w = w.to(tl.float32)
    if KEEP:
        tl.store(out + row + cols, (normed * w).to(out.dtype.element_ty), mask=inside)
    if GROUP > 0:
        value = tl.where(inside, normed * w, 0.0).to(out.dtype.element_ty)  # padding becomes 0, not -0
        store_quantised(value, x8, scales, tl.program_id(0), 0, H, PADDED, GROUP)


@overlapping(reads_early=True, leads=True)
@triton.jit
def _rms_norm_kernel(x, residual, weight, total, out, x8, scales, eps, H, M, PADDED,
                     BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    """Norm one row per program. KEEP: the norm is stored. GROUP: columns that share a scale in x8; 0: not quantised."""
    cols = tl.arange(0, BLOCK_H)
    w = tl.load(weight + cols, mask=cols < H, other=0.0)
    follow(OVERLAP, GROUP > 0)
    row = tl.program_id(0).to(tl.int64) * H
    inside = cols < H
    if GROUP > 0:
        inside = inside & (tl.program_id(0) < M)
    value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + r).to(total.dtype.element_ty)
        tl.store(total + row + cols, rounded, mask=inside)
        value = rounded.to(tl.float32)
    store_norm(value, w, out, x8, scales, cols, inside, eps, H, PADDED, KEEP, GROUP)


def row_warps(block: int) -> int:
    """Warps per row, from the row's length alone: their number is part of the summation order.

    At most four, as in the kernel that computes a norm between two products (``kernels/gemm/layer_tail.py``).
    """
    return min(max(block // 512, 1), 4)


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    return _launch(x, None, weight, x, eps)[0]


def launch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (x + residual [M, H] rounded, its norm): the bits of an addition and :func:`launch_rms_norm`."""
    x = x.contiguous()
    total = torch.empty_like(x)
    return total, _launch(x, residual.contiguous(), weight, total, eps)[0]


Normed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(norm [M, H], x8 [M', H], scales [G, M']); outputs without a consumer are empty."""


SumNormed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(sum of x and the residual [M, H], then as ``Normed``)."""


def launch_rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool) -> Normed:
    """See :func:`rms_norm_fp8`."""
    x = x.contiguous()
    return _launch(x, None, weight, x, eps, group, keep)


def launch_add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool
) -> SumNormed:
    """Compute :func:`launch_add_rms_norm` and quantise the norm as :func:`rms_norm_fp8`, unless group is None."""
    x = x.contiguous()
    total = torch.empty_like(x)
    return total, *_launch(x, residual.contiguous(), weight, total, eps, group, keep)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, total: torch.Tensor, eps: float,
    group: int | None = None, keep: bool = True,
) -> Normed:  # fmt: skip
    out = torch.empty_like(x) if keep else x.new_empty(0)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    x8, scales = empty_quantised(x, rows, width, group)
    quantised = (None,) * 2 if group is None else (rows, scales.shape[1])
    _rms_norm_kernel[(rows if group is None else len(x8),)](
        x, residual, weight, total, out, *((None,) * 2 if group is None else (x8, scales)), eps, width, *quantised,
        BLOCK_H=block, HAS_RESIDUAL=residual is not None, KEEP=keep, GROUP=columns_of(group, block),
        num_warps=row_warps(block), **overlapped(x.device),
    )  # fmt: skip
    return out, x8, scales


def columns_of(group: int | None, block: int) -> int:
    """GROUP of a kernel with ``block`` columns of a row: all of them for group 0 and INT8_ROWS; 0 for None."""
    return 0 if group is None else min(group if group > 0 else block, block)


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute :func:`rms_norm` with a gradient, in x's dtype. The value is rounded before the weight, for any weight
    dtype.
    """
    value = x.float()
    normed = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed).to(x.dtype)


def with_fp8_cpu(normed: torch.Tensor, group: int | None, keep: bool) -> Normed:
    """Quantise a norm [M, H], for CPU twins: ``Normed``."""
    return normed if keep else normed.new_empty(0), *quantised_cpu(normed, group)


def with_fp8_meta(x: torch.Tensor, group: int | None, keep: bool) -> Normed:
    """Allocate ``Normed`` for the norm of x [M, H]."""
    return x.new_empty(x.shape if keep else 0), *empty_quantised(x, x.shape[0], x.shape[1], group)


@op(cuda=launch_rms_norm_fp8, meta=with_fp8_meta)
def rms_norm_fp8_op(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool) -> Normed:
    return with_fp8_cpu(rms_norm.cpu(x, weight, eps), group, keep)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool) -> Quantised:
    """Compute :func:`rms_norm` in e4m3, with the bits of ``quantize(rms_norm(x, weight, eps), group)``, in one launch.

    keep: keep the norm itself, too.
    """
    return quantised_norm(rms_norm_fp8_op(x, weight, eps, group, keep), x, group, keep)


def quantised_norm(made: Sequence[torch.Tensor], x: torch.Tensor, group: int, keep: bool) -> Quantised:
    """Wrap an op's (norm, x8, scales) of x [M, H] as an operand."""
    return handed_on(made[1:], x, group, made[0] if keep else None)


@op(cuda=launch_rms_norm, gradient=rms_norm_formula)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x * rsqrt(mean(x^2) + eps) * weight`` for x [M, H], weight [H]: [M, H] in x's dtype.

    Computed in fp32 (Zhang and Sennrich, arXiv 1910.07467). With a weight in x's dtype the normalised value is
    rounded before the multiplication, as in Llama; with one in fp32 only the product is rounded. H up to 16384.
    """
    value = x.contiguous().float()
    squares = (value * value).sum(-1, keepdim=True)
    normed = squares.div_(value.shape[-1]).add_(eps).rsqrt_().mul(value)
    return normed.to(weight.dtype).mul_(weight).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _rms_norm_kernel,
        {
            **dict.fromkeys(("x", "residual", "total", "out"), f"*{dtype}"),
            "weight": f"*{weight}",
            "eps": "fp32",
            "H": "i32",
            **({} if group is None else {"x8": element_of(group), "scales": "*fp32", "M": "i32", "PADDED": "i32"}),
        },
        {
            **({} if group is not None else dict.fromkeys(("x8", "scales", "M", "PADDED"))),
            "BLOCK_H": block, "HAS_RESIDUAL": residual, "KEEP": keep, "GROUP": columns_of(group, block),
            "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )
    for residual in (False, True)
    for dtype, weight, block, group, keep in (
        *(("bf16", "bf16", block, None, True) for block in (256, 4096, 16384)),
        *(("bf16", "fp32", block, None, True) for block in (2048, 4096, 8192)),
        *(("fp16", "fp16", 4096, None, True), ("fp16", "fp32", 4096, None, True), ("fp32", "fp32", 4096, None, True)),
        *(("bf16", "bf16", 4096, group, False) for group in (GROUP, 0, INT8_ROWS)),
        *(("bf16", "fp32", block, GROUP, True) for block in (2048, 4096)),
        ("fp16", "fp16", 256, GROUP, True),
    )
]  # fmt: skip
