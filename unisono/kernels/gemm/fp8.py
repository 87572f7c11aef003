"""Products of activations and e4m3 weights whose bits do not depend on the batch.

Owns the ops ``fp8_linear`` and ``fp8_product``, which takes activations that are quantised already.

Activations are quantised first (``kernels/gemm/fp8_quantize.py``): by row and 128 columns where the weight has a scale
for each block of 128 × 128, by row where it has one for each output. The product walks K in steps of 128. Each step is
a product of e4m3 values with fresh fp32 accumulators, and steps are added in order, so a row's bits depend on the
row and the weight alone.

The Triton kernel has the weight as the tile's rows and the tokens as its columns, so that it is e4m3 ``wgmma`` at any
number of tokens. With swapped operands Triton would widen tiles of 16 rows to fp16 ``mma``, with other bits (measured
on an H200). Faster kernels run where :func:`prove_fp8` found equal bits on the present GPU: up to FEW_ROWS rows the
Gluon kernel of ``kernels/gemm/fp8_gluon.py``, above them torch's ``scaled_mm``.

Shapes: M rows, K inputs, N outputs, G = ceil(K / 128).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.config.hardware import E4M3_CAPABILITY
from unisono.kernels.gemm.cpu import row_exact_product
from unisono.kernels.gemm.fp8_gluon import launch_fp8_rows, suits
from unisono.kernels.gemm.fp8_quantize import GROUP, Quantised, launch_quantize, quantize_cpu, widened_activations
from unisono.kernels.gemm.linear import launch_add, residual_tile, store_sums
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

FEW_ROWS = 64
"""Up to this number of rows the Gluon kernel runs, above it ``scaled_mm``, if they are proven exact."""

PROOF_ROWS = (65, 96, 128, 192, 256, 512, 1024, 2048)
"""Numbers of rows at which ``scaled_mm`` is compared with the Triton kernel."""
FEW_PROOF_ROWS = (1, 3, 16, 17, 32, 33, 64)
"""Numbers of rows at which the Gluon kernel is compared with it."""


SLICE = 64
"""Outputs of a tile of few rows, in both kernels of ours: none may lie in two projections."""

_TILES = {16: Tile(16, SLICE, 128, 4, 3, ahead=True), 64: Tile(32, SLICE, 128, 4, 3, ahead=True)}
_LARGE = Tile(128, 128, 128, 8, 4)


def _tile(rows: int) -> Tile:
    return next((tile for most, tile in _TILES.items() if rows <= most), _LARGE)


def multiplies_e4m3(device: torch.device) -> bool:
    """Return True if the device is a GPU with e4m3 products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY


@triton.jit
def _scales(x_scales, x_ok, w_scales, step, last, PADDED):
    """Load a step's scales: of activations [tokens] and of the weight, [outputs] or one. Steps are clamped to
    ``last``.
    """
    at = tl.minimum(step, last)
    return tl.load(x_scales + at * PADDED, mask=x_ok, other=0.0), tl.load(w_scales + at)


@triton.jit
def _four_scales(x_scales, x_ok, w_scales, step, last, PADDED):
    """Load the scales of four steps from ``step`` on: the activations' four, then the weight's."""
    x0, w0 = _scales(x_scales, x_ok, w_scales, step, last, PADDED)
    x1, w1 = _scales(x_scales, x_ok, w_scales, step + 1, last, PADDED)
    x2, w2 = _scales(x_scales, x_ok, w_scales, step + 2, last, PADDED)
    x3, w3 = _scales(x_scales, x_ok, w_scales, step + 3, last, PADDED)
    return x0, x1, x2, x3, w0, w1, w2, w3


@triton.jit
def _scaled(product, xs, ws, BY_OUTPUT: tl.constexpr):
    """Multiply a step's product [outputs, tokens] by its scales."""
    if BY_OUTPUT:
        return product * (xs[None, :] * ws[:, None])
    else:
        return product * (xs * ws)[None, :]


@triton.jit
def _step_product(x_ptrs, w_ptrs, step, x_ok, K, EVEN_K: tl.constexpr):
    """Compute the product over the 128 inputs of a step, [outputs, tokens]."""
    if EVEN_K:
        x_tile = tl.load(x_ptrs + step * 128, mask=x_ok[:, None], other=0.0)
        w_tile = tl.load(w_ptrs + step * 128)
    else:
        inside = tl.arange(0, 128) < K - step * 128
        x_tile = tl.load(x_ptrs + step * 128, mask=x_ok[:, None] & inside[None, :], other=0.0)
        w_tile = tl.load(w_ptrs + step * 128, mask=inside[None, :], other=0.0)
    return tl.dot(w_tile, tl.trans(x_tile))


@triton.jit
def e4m3_product(x_ptrs, x_ok, x_scales, w_ptrs, w_scales, K, PADDED,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                 BY_OUTPUT: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Compute the product of e4m3 tiles over K, with their scales: fp32 [outputs, tokens].

    x_ptrs [BLOCK_M, 128], w_ptrs [BLOCK_N, 128]: the first step's values; rows of x that are not ``x_ok`` count as 0.
    x_scales [BLOCK_M]: scales of the first step; those of the next lie PADDED further. w_scales: with BY_BLOCK of the
    first step, [BLOCK_N] with BY_OUTPUT, otherwise one for all outputs, followed by the next ones; without BY_BLOCK of
    the outputs, [BLOCK_N].
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    steps = tl.cdiv(K, 128)
    last = steps - 1
    STEPS: tl.constexpr = 4 if AHEAD else 1
    if BY_BLOCK and AHEAD:
        s = _four_scales(x_scales, x_ok, w_scales, 0, last, PADDED)
        for first in range(0, steps, STEPS):
            ahead = _four_scales(x_scales, x_ok, w_scales, first + STEPS, last, PADDED)
            for j in tl.static_range(STEPS):
                acc += _scaled(_step_product(x_ptrs, w_ptrs, first + j, x_ok, K, EVEN_K), s[j], s[4 + j], BY_OUTPUT)
            s = ahead
    elif BY_BLOCK:
        for step in range(0, steps):
            xs, ws = _scales(x_scales, x_ok, w_scales, step, last, PADDED)
            acc += _scaled(_step_product(x_ptrs, w_ptrs, step, x_ok, K, EVEN_K), xs, ws, BY_OUTPUT)
    else:
        for first in range(0, steps, STEPS):
            for j in tl.static_range(STEPS):
                acc += _step_product(x_ptrs, w_ptrs, first + j, x_ok, K, EVEN_K)
        acc = acc * tl.load(x_scales, mask=x_ok, other=0.0)[None, :] * tl.load(w_scales)[:, None]
    return acc


@triton.jit
def block_of(first, PART):
    """Block of scales of the outputs from ``first`` on. PART: outputs of a projection, whose blocks begin anew."""
    return first // PART * tl.cdiv(PART, 128) + first % PART // 128


@triton.jit
def _fp8_linear_kernel(x8, x_scales, w8, w_scales, bias, residual, out, M, N, K, PADDED, PART,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                       EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                       OVERLAP: tl.constexpr):  # fmt: skip
    # Row tiles of one weight tile are neighbours in the grid, so that the weight is read from memory once.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    row_ok = rows < M
    x_ptrs = x8 + rows.to(tl.int64)[:, None] * K + ks[None, :]
    # The last weight tile repeats the last row: that is cheaper than a mask, and the result is not stored.
    weight_rows = tl.minimum(cols, N - 1)
    w_ptrs = w8 + weight_rows.to(tl.int64)[:, None] * K + ks[None, :]
    block = block_of(tl.program_id(1) * BLOCK_N, PART)
    ws_ptrs = w_scales + block * tl.cdiv(K, 128) if BY_BLOCK else w_scales + weight_rows
    follow(OVERLAP)
    acc = e4m3_product(x_ptrs, row_ok, x_scales + rows, w_ptrs, ws_ptrs, K, PADDED,
                       BLOCK_M, BLOCK_N, AHEAD, BY_BLOCK, False, EVEN_K)  # fmt: skip
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)
    store_sums(tl.trans(acc), out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


def launch_fp8_product(
    x8: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: int,
    dtype: torch.dtype,
    tile: Tile | None = None,
    part: int = 0,
) -> Tensor:
    """Launch the Triton product of outputs of :func:`launch_quantize` for ``rows`` rows. tile: speed only; its outputs
    must divide ``part`` (:func:`fp8_product`)."""
    residual = None if residual is None else residual.contiguous()
    (n, k), tile = weight.shape, tile or _tile(rows)
    out = x8.new_empty(rows, n, dtype=dtype)
    grid = (triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))
    _fp8_linear_kernel[grid](
        x8, x_scales, weight, w_scales, bias, residual, out, rows, n, k, x8.shape[0], part or n,
        BLOCK_M=tile.m, BLOCK_N=tile.n, AHEAD=tile.ahead, BY_BLOCK=w_scales.dim() == 2,
        EVEN_K=k % (512 if tile.ahead else 128) == 0,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(x8.device),
    )  # fmt: skip
    return out


def _scaled_mm(x8: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute torch's product of all rows of ``x8``, padding included: [M', N].

    Scales by block are in the layout of torch.nn.functional.scaled_mm: those of x [M', G] with adjacent rows, those of
    the weight [G, N / 128] with adjacent G, in strides of a multiple of four.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    if w_scales.dim() == 1:
        recipe, of_x, of_w = (ScalingType.RowWise,) * 2, x_scales.view(-1, 1), w_scales.view(1, -1)
    else:
        recipe = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        groups = w_scales.shape[1]
        if groups % 4:
            w_scales = torch.nn.functional.pad(w_scales, (0, -groups % 4))
        of_x, of_w = x_scales.t(), w_scales.t()[:groups]
    return scaled_mm(x8, weight.t(), of_x, recipe[0], of_w, recipe[1], output_dtype=dtype)


def _group(w_scales: Tensor) -> int | None:
    """Columns of activations that share a scale, by the kind of the weight's scales. None: all."""
    return GROUP if w_scales.dim() == 2 else None


def _by_torch(
    x8: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    rows: int,
    dtype: torch.dtype,
    part: int,
) -> Tensor | None:
    try:
        return _scaled_mm(x8, x_scales, weight, w_scales, dtype)[:rows]
    except (RuntimeError, ValueError, ImportError, NotImplementedError):  # this torch or GPU has no such product
        return None


def _by_gluon(
    x8: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    rows: int,
    dtype: torch.dtype,
    part: int,
) -> Tensor | None:
    operands = x8, x_scales, weight, w_scales, None, None, rows, dtype
    return launch_fp8_rows(*operands, part=part) if suits(rows, weight) else None


def _keys(weight: Tensor, w_scales: Tensor, dtype: torch.dtype, part: int = 0) -> tuple[Hashable, ...]:
    return (_key(weight, w_scales, dtype, part),) if weight.device.type == "cuda" else ()


def _key(weight: Tensor, w_scales: Tensor, dtype: torch.dtype, part: int = 0) -> Hashable:
    """(N, K, dtype of activations, True for scales by block, outputs of a part or 0)."""
    return *weight.shape, dtype, w_scales.dim() == 2, part


def _compared(product: Callable[..., Tensor | None], counts: tuple[int, ...]) -> Callable[..., bool]:
    """Make a comparison of ``product`` with the Triton kernel, on random inputs of each number of rows."""

    def same_bits(weight: Tensor, w_scales: Tensor, dtype: torch.dtype, part: int = 0) -> bool:
        for rows in counts:
            generator = torch.Generator(weight.device).manual_seed(rows)
            x = torch.randn(rows, weight.shape[1], device=weight.device, generator=generator).to(dtype)
            x8, x_scales = launch_quantize(x, _group(w_scales))
            expected = launch_fp8_product(x8, x_scales, weight, w_scales, None, None, rows, dtype, _tile(1), part)
            out = product(x8, x_scales, weight, w_scales, rows, dtype, part)
            if out is None or not torch.equal(out, expected):
                return False
        return True

    return same_bits


exact_scaled_mm = ExactKernel("scaled_mm", _keys, _compared(_by_torch, PROOF_ROWS))
"""Torch's product, above FEW_ROWS rows."""

exact_fp8_rows = ExactKernel("fp8 products of few rows", _keys, _compared(_by_gluon, FEW_PROOF_ROWS))
"""The Gluon kernel, up to FEW_ROWS rows."""


def parts_of(weight: Tensor, w_scales: Tensor, part: int) -> list[tuple[Tensor, Tensor]]:
    """(weight, scales) of each part of :func:`fp8_product`; both whole for part 0."""
    if part == 0:
        return [(weight, w_scales)]
    return list(zip(weight.split(part), w_scales.split(-(-part // GROUP)), strict=True))


def prove_fp8(weight: Tensor, w_scales: Tensor, dtype: torch.dtype, part: int = 0) -> bool:
    """Prove both kernels for this weight. Returns the result for ``scaled_mm``, which computes parts one by one."""
    exact_fp8_rows.prove(weight, w_scales, dtype, part)
    return exact_scaled_mm.prove(*parts_of(weight, w_scales, part)[0], dtype)


def rehearse_fp8(weight: Tensor, w_scales: Tensor, dtype: torch.dtype, part: int = 0) -> None:
    """Launch the kernels of :func:`prove_fp8` and ignore the results: this compiles them ahead of time."""
    exact_scaled_mm.rehearse(*parts_of(weight, w_scales, part)[0], dtype)
    exact_fp8_rows.rehearse(weight, w_scales, dtype, part)


def runs_on_torch(rows: int, dtype: torch.dtype, weight: Tensor, w_scales: Tensor) -> bool:
    """Return True if torch computes this product, False if a kernel of ours does."""
    return rows > FEW_ROWS and exact_scaled_mm.serves(_key(weight, w_scales, dtype))


def fp8_product_cuda(
    x8: Tensor, x_scales: Tensor, rows: int, dtype: torch.dtype, weight: Tensor, w_scales: Tensor,
    bias: Tensor | None, residual: Tensor | None, part: int = 0,
) -> Tensor:  # fmt: skip
    """Compute the product of outputs of :func:`launch_quantize` for ``rows`` rows."""
    if part and rows > FEW_ROWS:
        each = parts_of(weight, w_scales, part)
        y = torch.cat([fp8_product_cuda(x8, x_scales, rows, dtype, *pair, None, None) for pair in each], 1)
        return y if bias is None and residual is None else launch_add(y, bias, residual)
    if runs_on_torch(rows, dtype, weight, w_scales):
        y = _scaled_mm(x8, x_scales, weight, w_scales, dtype)[:rows]
        return y if bias is None and residual is None else launch_add(y, bias, residual)
    few = rows <= FEW_ROWS and exact_fp8_rows.serves(_key(weight, w_scales, dtype, part)) and suits(rows, weight)
    launch = launch_fp8_rows if few else launch_fp8_product
    return launch(x8, x_scales, weight, w_scales, bias, residual, rows, dtype, part=part)


def fp8_linear_cuda(
    x: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    quantised = launch_quantize(x, _group(w_scales), x_scale)
    return fp8_product_cuda(*quantised, len(x), x.dtype, weight, w_scales, bias, residual)


def widened_weight(weight: Tensor, w_scales: Tensor) -> Tensor:
    """Dequantise an e4m3 weight [N, K] with scales [ceil(N / 128), G] or [N] to fp32."""
    if w_scales.dim() == 1:
        return weight.float() * w_scales[:, None]
    n, k = weight.shape
    return weight.float() * w_scales.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]


@op(cuda=fp8_linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]))
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``x [M, K] @ (e4m3 weight [N, K] · scales)^T (+ bias [N]) (+ residual [M, N])`` -> [M, N] in x's dtype.

    w_scales: fp32 [ceil(N / 128), G], one for each block of 128 × 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3), and
    x is quantised by row and 128 columns; or [N], one for each output, and x is quantised by row. x_scale [n] fp32: the
    activations' scales that n merged projections were calibrated with, of which the largest is taken in place of
    computed ones; for scales by output. The product is rounded, then the bias is added and rounded, then the residual.
    A row's bits depend on that row, the weight, its bias and its residual only.
    """
    quantised = quantize_cpu(x, _group(w_scales), x_scale)
    return fp8_product_op.cpu(*quantised, len(x), x.dtype, weight, w_scales, bias, residual)


@op(cuda=fp8_product_cuda, meta=lambda x8, rows, dtype, weight: x8.new_empty(rows, weight.shape[0], dtype=dtype))
def fp8_product_op(
    x8: Tensor, x_scales: Tensor, rows: int, dtype: torch.dtype, weight: Tensor, w_scales: Tensor,
    bias: Tensor | None, residual: Tensor | None, part: int = 0,
) -> Tensor:  # fmt: skip
    values = widened_activations(x8, x_scales)[:rows]
    first, *others = (widened_weight(*pair) for pair in parts_of(weight, w_scales, part))
    y = row_exact_product(values, torch.cat((first, *others)) if others else first).to(dtype)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def fp8_product(
    x: Quantised, weight: Tensor, w_scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    part: int = 0,
) -> Tensor:  # fmt: skip
    """Compute :func:`fp8_linear` of activations already quantised for the weight's scales: the same bits.

    part: outputs of each of several equal projections in the weight, whose blocks of scales begin anew: w_scales has
    ceil(part / 128) rows for each. A multiple of SLICE; 0: the blocks are those of one weight.
    """
    return fp8_product_op(x.x8, x.scales, x.rows, x.dtype, weight, w_scales, bias, residual, part)


def _aot_fp8(dtype: str, tile: Tile, by_block: bool, even_k: bool, bias: bool) -> AotCase:
    others = {name: f"*{dtype}" for name in ("bias", "residual", "out")}
    others |= dict.fromkeys(("M", "N", "K", "PADDED", "PART"), "i32")
    scales = dict.fromkeys(("x_scales", "w_scales"), "*fp32")
    return AotCase(
        _fp8_linear_kernel,
        {"x8": "*fp8e4nv", "w8": "*fp8e4nv", **scales, **others},
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "AHEAD": tile.ahead, "BY_BLOCK": by_block,
            "EVEN_K": even_k, "HAS_BIAS": bias, "HAS_RESIDUAL": True, "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


AOT: list[AotCase] = [
    *(_aot_fp8("bf16", tile, kind, True, False) for tile in (*_TILES.values(), _LARGE) for kind in (True, False)),
    *(_aot_fp8("fp16", tile, by_block, False, True) for tile in (_TILES[16], _LARGE) for by_block in (True, False)),
]
