"""Products of int8 activations and int8 weights (W8A8). Owns the ops ``quantize_int8`` and ``int8_linear``.

A row of activations is quantised by itself: ``scale`` is its largest magnitude / 127, or fixed by the checkpoint; with
a zero point (asymmetric) it is the row's range / 255, and zero lies in the range. Divisions are IEEE's in fp32, and
numbers are rounded to nearest even. Sums of products of integers are exact in int32, in any order and in any tile, so
that no bit depends on the kernel or on the batch: K up to 2 ** 17 cannot overflow. A result is
``(sum * scale of the row) * scale of the output`` in fp32, rounded to the activations' dtype; bias and residual follow,
each rounded.

Kernels ahead of a product quantise rows to the same numbers (``fp8_quantize.store_quantised``). Up to MOST_ROWS rows
the Gluon kernel of ``fp8_gluon.py`` runs on Hopper, where :data:`exact_int8_rows` found the same bits.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_gluon import MOST_ROWS, launch_fp8_rows, suits
from unisono.kernels.gemm.fp8_quantize import INT8_ROWS, Quantised, nearest
from unisono.kernels.gemm.linear import residual_tile, store_sums
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

SMALLEST = 1e-10
"""Lower bound of a row's magnitude, so that a row of zeros has a scale."""

PROOF_ROWS = (1, 3, 16, 17, 32, 33, 64)
"""Numbers of rows at which the Gluon kernel is compared with the Triton kernel."""

BLOCK_K = 128
_COLUMNS = 1024
"""Columns that a program quantises at a time."""

_TILES = {16: Tile(16, 64, BLOCK_K, 4, 4), 64: Tile(64, 64, BLOCK_K, 4, 3)}
_LARGE = Tile(128, 128, BLOCK_K, 8, 3)


def _tile(rows: int) -> Tile:
    return next((tile for most, tile in _TILES.items() if rows <= most), _LARGE)


@triton.jit
def _quantize_int8_kernel(x, fixed, x8, scales, shifts, K, COLUMNS: tl.constexpr, FIXED: tl.constexpr,
                          SHIFTED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Quantise one row per program."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLUMNS)
    shift = 0.0
    if FIXED:
        scale = tl.load(fixed)
    else:
        low = tl.zeros((COLUMNS,), tl.float32)
        high = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, K, COLUMNS):
            value = tl.load(x + row * K + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)
            low, high = tl.minimum(low, value), tl.maximum(high, value)
        least, most = tl.min(low, axis=0), tl.max(high, axis=0)
        if SHIFTED:
            scale = tl.div_rn(tl.maximum(most - least, 1e-10), 255.0)
            shift = nearest(tl.div_rn(-least, scale)) - 128.0
        else:
            scale = tl.div_rn(tl.maximum(tl.maximum(most, -least), 1e-10), 127.0)
    for start in range(0, K, COLUMNS):
        inside = start + cols < K
        value = tl.load(x + row * K + start + cols, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.div_rn(value, tl.broadcast_to(scale, value.shape)), -512.0), 512.0)
        number = tl.minimum(tl.maximum(nearest(scaled) + shift, -128.0), 127.0)
        tl.store(x8 + row * K + start + cols, number.to(tl.int8), mask=inside)
    tl.store(scales + row, scale)
    tl.store(shifts + row, shift.to(tl.int32) if SHIFTED else 0)  # type: ignore[attr-defined]


@triton.jit
def _int8_linear_kernel(x8, scales, shifts, weight, weight_scales, sums, bias, residual, out, M, N, K,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
                        SHIFTED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                        OVERLAP: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # The last tiles repeat the last row: that is cheaper than a mask, and the result is not stored.
    x_rows, w_rows = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
    x_ptrs = x8 + x_rows[:, None] * K + ks[None, :]
    w_ptrs = weight + w_rows[:, None] * K + ks[None, :]
    follow(OVERLAP)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x_tile, w_tile = tl.load(x_ptrs + k), tl.load(w_ptrs + k)
        else:
            x_tile = tl.load(x_ptrs + k, mask=(ks < K - k)[None, :], other=0)
            w_tile = tl.load(w_ptrs + k, mask=(ks < K - k)[None, :], other=0)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, out_dtype=tl.int32)
    total = tl.trans(acc)
    if SHIFTED:
        total -= tl.load(shifts + x_rows)[:, None] * tl.load(sums + w_rows)[None, :]
    y = total.to(tl.float32) * tl.load(scales + x_rows)[:, None]
    w_scale = tl.broadcast_to(tl.load(weight_scales + w_rows)[None, :], y.shape)
    y = tl.fma(y, w_scale, tl.zeros(y.shape, tl.float32))  # a plain product could be contracted with the bias
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)
    store_sums(y, out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


def launch_quantize_int8(
    x: torch.Tensor, fixed: torch.Tensor | None, shifted: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel of :func:`quantize_int8`."""
    x, (rows, k) = x.contiguous(), x.shape
    x8 = torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    shifts = torch.empty(rows, dtype=torch.int32, device=x.device)
    _quantize_int8_kernel[(rows,)](
        x, fixed, x8, scales, shifts, k,
        COLUMNS=_COLUMNS, FIXED=fixed is not None, SHIFTED=shifted, **overlapped(x.device),
    )  # fmt: skip
    return x8, scales, shifts


def _quantize_meta(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, dtype=torch.int8),
        x.new_empty(len(x), dtype=torch.float32),
        x.new_empty(len(x), dtype=torch.int32),
    )


@op(cuda=launch_quantize_int8, meta=_quantize_meta)
def quantize_int8_op(
    x: torch.Tensor, fixed: torch.Tensor | None, shifted: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = x.float()
    shifts = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    if fixed is not None:
        scales = fixed.float().reshape(1).expand(len(x)).contiguous()
    else:
        low, high = values.amin(1).clamp_max(0), values.amax(1).clamp_min(0)
        if shifted:
            scales = (high - low).clamp_min(SMALLEST) / 255
            shifts = (-low / scales).round() - 128
        else:
            scales = torch.maximum(high, -low).clamp_min(SMALLEST) / 127
    scaled = (values / scales[:, None]).clamp(-512, 512).round()
    x8 = (scaled + shifts[:, None]).clamp(-128, 127).to(torch.int8)
    return x8, scales, shifts.to(torch.int32)


def launch_int8_linear(
    x8: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None, weight: torch.Tensor,
    weight_scales: torch.Tensor, sums: torch.Tensor | None, like: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the Triton product. like: a tensor with the rows and the dtype of the result; x8 may have more rows,
    padding. tile: overrides the blocking (speed only)."""
    rows, (n, k), tile = len(like), weight.shape, tile or _tile(len(like))
    residual = None if residual is None else residual.contiguous()
    out = like.new_empty(rows, n)
    _int8_linear_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))](
        x8, scales, shifts, weight, weight_scales, sums, bias, residual, out, rows, n, k,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, EVEN_K=k % tile.k == 0, SHIFTED=sums is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(x8.device),
    )  # fmt: skip
    return out


def _key(weight: torch.Tensor, dtype: torch.dtype) -> Hashable:
    return weight.shape, dtype


def _same_bits(weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype) -> bool:
    """Compare both kernels with random inputs of each number of rows."""
    for rows in PROOF_ROWS:
        if not suits(rows, weight) or dtype is torch.float32:
            return False
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn(rows, weight.shape[1], device=weight.device, generator=generator).to(dtype)
        x8, scales, _ = launch_quantize_int8(x, None, False)
        expected = launch_int8_linear(x8, scales, None, weight, weight_scales, None, x, None, None)
        if not torch.equal(launch_fp8_rows(x8, scales, weight, weight_scales, None, None, rows, dtype), expected):
            return False
    return True


exact_int8_rows = ExactKernel(
    "int8 products of few rows",
    lambda weight, weight_scales, dtype: (_key(weight, dtype),) if weight.is_cuda else (),
    _same_bits,
)
"""The Gluon kernel, up to MOST_ROWS rows, by weight, its scales and dtype of activations."""


def _linear_cuda(x8, scales, shifts, weight, weight_scales, sums, like, bias, residual):
    few = sums is None and len(like) <= MOST_ROWS and exact_int8_rows.serves(_key(weight, like.dtype))
    if few and suits(len(like), weight):
        return launch_fp8_rows(x8, scales, weight, weight_scales, bias, residual, len(like), like.dtype)
    return launch_int8_linear(x8, scales, shifts, weight, weight_scales, sums, like, bias, residual)


@op(cuda=_linear_cuda, meta=lambda weight, like: like.new_empty(like.shape[0], weight.shape[0]))
def int8_linear_op(
    x8: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None, weight: torch.Tensor,
    weight_scales: torch.Tensor, sums: torch.Tensor | None, like: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    rows = len(like)
    total = (x8[:rows].double() @ weight.double().t()).to(torch.int32)  # exact
    if sums is not None and shifts is not None:
        total = total - shifts[:, None] * sums
    y = ((total.float() * scales[:rows, None]) * weight_scales).to(like.dtype)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def int8_linear(
    x: torch.Tensor | Quantised,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    sums: torch.Tensor | None = None,
    fixed: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``quantised(x [M, K]) @ (weight * scales)^T (+ bias [N]) (+ residual [M, N])``: [M, N] in x's dtype.

    weight int8 [N, K], weight_scales fp32 [N]. sums: int32 [N] of each output's weights; x is then quantised with a
    zero point. fixed: fp32 [1], the scale of x; None: each row's own. x may be quantised already, as INT8_ROWS, where
    both are None. A row's bits depend on that row, the weight, its bias and its residual only.
    """
    if isinstance(x, Quantised):
        if x.group != INT8_ROWS or sums is not None or fixed is not None:
            raise ValueError(f"rows quantised by groups of {x.group} are no operand of this int8 product")
        like = x.scales.new_empty(x.rows, 0, dtype=x.dtype)
        return int8_linear_op(x.x8, x.scales[0], None, weight, weight_scales, None, like, bias, residual)
    return int8_linear_op(*quantize_int8_op(x, fixed, sums is not None), weight, weight_scales, sums, x, bias, residual)


def _aot(dtype: str, tile: Tile, even_k: bool, shifted: bool) -> AotCase:
    tensors = {name: f"*{dtype}" for name in ("bias", "residual", "out")}
    quantised = {"x8": "*i8", "scales": "*fp32", "shifts": "*i32"}
    stored = {"weight": "*i8", "weight_scales": "*fp32", "sums": "*i32"}
    return AotCase(
        _int8_linear_kernel,
        {**quantised, **stored, **tensors, **dict.fromkeys(("M", "N", "K"), "i32")},
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "EVEN_K": even_k, "SHIFTED": shifted,
            "HAS_BIAS": True, "HAS_RESIDUAL": True, "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


AOT: list[AotCase] = [
    *(_aot("bf16", tile, True, shifted) for tile in (*_TILES.values(), _LARGE) for shifted in (False, True)),
    *(_aot(dtype, _TILES[16], False, True) for dtype in ("fp16", "fp32")),
    *(
        AotCase(
            _quantize_int8_kernel,
            {"x": f"*{dtype}", "fixed": "*fp32", "x8": "*i8", "scales": "*fp32", "shifts": "*i32", "K": "i32"},
            {"COLUMNS": _COLUMNS, "FIXED": fixed, "SHIFTED": shifted, "OVERLAP": True},
        )
        for dtype, fixed, shifted in (("bf16", False, False), ("bf16", True, False), ("fp32", False, True))
    ),
]
