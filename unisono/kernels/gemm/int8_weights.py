"""Products of activations and 8-bit integer weights whose bits do not depend on the batch. Owns ``int8_weight_linear``.

A weight is ``(q - zero) * scale``, computed in fp32 and rounded to the activations' dtype; activations are not
quantised (W8A16). Everything else is as in ``kernels/gemm/int4.py``, for numbers of 8 bits: up to FEW_ROWS rows one
Triton kernel decodes weights in registers; above, the weight is decoded into a buffer for the plain product, if
:func:`prove_int8_weight` found the same bits on the present GPU.

Shapes: M rows, K inputs, N outputs, G = ceil(K / group) groups. Weights uint8 [N, K], 0 … 255.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, shared_memory
from unisono.kernels.gemm.decoded import (
    DECODING_TILES,
    FEW_ROWS,
    DecodedProduct,
    decoding_cases,
    decoding_tile,
    integer_case,
    integer_product,
    launch_integer_linear,
)
from unisono.kernels.gemm.linear import linear, linear_cuda, residual_tile, store_sums
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

MIDDLE = 128
"""Zero point of a weight without stored zeros."""

DECODED = 1024
"""Inputs that a program of the decoding kernel writes."""

_LARGE = Tile(128, 64, 0, 4, 2)
"""At least 64 outputs, for wgmma."""

_THREE_STAGES = 113 * 1024
"""Bytes of shared memory that a tile of 64 rows takes with three stages."""


def int8_weight_tile(rows: int, dtype: torch.dtype, shared: int = HOPPER) -> Tile:
    """Choose the blocking for a number of rows. shared: bytes of shared memory of a block; few take a stage less."""
    tile = decoding_tile(rows, dtype, _LARGE)
    return tile._replace(stages=2) if tile.m >= 64 and shared < _THREE_STAGES else tile


@triton.jit
def _int8_weight_kernel(x, weight, scales, zeros, bias, residual, out, M, N, K, group,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                        EVEN_K: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
                        HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    # Row tiles of one weight tile are neighbours in the grid, so that the weight is read from memory once.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < M
    # The last weight tile repeats the last row: that is cheaper than a mask, and the result is not stored.
    weight_rows = tl.minimum(cols, N - 1).to(tl.int64)
    G = tl.cdiv(K, group)
    x_ptrs = x + rows.to(tl.int64)[:, None] * K + tl.arange(0, WIDTH)[None, :]
    w_ptrs = weight + weight_rows[:, None] * K + tl.arange(0, WIDTH)[None, :]
    z_ptrs = zeros + weight_rows * G if HAS_ZEROS else zeros
    follow(OVERLAP)
    acc = integer_product(x_ptrs, row_ok, w_ptrs, scales + weight_rows * G, z_ptrs, K, group,
                          BLOCK_M, BLOCK_N, WIDTH, STEPS, EVEN_K, HAS_ZEROS, 1)  # fmt: skip
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)
    store_sums(acc, out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _int8_decode_kernel(weight, scales, zeros, out, K, group, WIDTH: tl.constexpr, HAS_ZEROS: tl.constexpr,
                        OVERLAP: tl.constexpr):  # fmt: skip
    """Decode WIDTH inputs of one output per program."""
    follow(OVERLAP)
    row, ks = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(weight + row * K + ks, mask=ks < K, other=0).to(tl.float32)
    at = row * tl.cdiv(K, group) + ks // group
    scale = tl.load(scales + at, mask=ks < K, other=0.0)
    if HAS_ZEROS:
        values -= tl.load(zeros + at, mask=ks < K, other=0).to(tl.float32)
    else:
        values -= 128.0
    tl.store(out + row * K + ks, (values * scale).to(out.dtype.element_ty), mask=ks < K)


def launch_int8_weight_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    bias: torch.Tensor | None, residual: torch.Tensor | None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the Triton product of 8-bit weights at any M. tile: overrides the blocking (speed only)."""
    tile = tile or int8_weight_tile(x.shape[0], x.dtype, shared_memory(x.device))
    return launch_integer_linear(_int8_weight_kernel, x, weight, scales, zeros, group, bias, residual, tile)


def launch_int8_decode(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode the weight to [N, K] in ``dtype``."""
    (n, k), has_zeros = weight.shape, zeros is not None
    out = scales.new_empty(n, k, dtype=dtype)
    _int8_decode_kernel[(n, triton.cdiv(k, DECODED))](
        weight, scales, zeros, out, k, group, WIDTH=DECODED, HAS_ZEROS=has_zeros, **overlapped(weight.device)
    )
    return out


def int8_decode(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode the weight in plain torch; CPU twin of :func:`launch_int8_decode`."""
    of = torch.arange(weight.shape[1], device=weight.device) // group
    values = weight.float() - (MIDDLE if zeros is None else zeros.float()[:, of])
    return (values * scales[:, of]).to(dtype)


def _keys(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> tuple[Hashable, ...]:
    """(N, K, group, dtype of activations)."""
    return ((*weight.shape, group, dtype),) if weight.device.type == "cuda" else ()


exact_int8 = DecodedProduct("products of decoded int8 weights", _keys, launch_int8_decode, launch_int8_weight_linear)
prove_int8_weight, rehearse_int8_weight = exact_int8.prove, exact_int8.rehearse


def int8_weight_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if x.shape[0] > FEW_ROWS and exact_int8.serves((*weight.shape, group, x.dtype)):
        return linear_cuda(x, launch_int8_decode(weight, scales, zeros, group, x.dtype), bias, residual)
    return launch_int8_weight_linear(x, weight, scales, zeros, group, bias, residual)


@op(cuda=int8_weight_linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]))
def int8_weight_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``x [M, K] @ ((weight - zeros) * scales)^T (+ bias [N]) (+ residual [M, N])``: [M, N] in x's dtype.

    weight uint8 [N, K]; scales fp32 and zeros int16 [N, G], one for each output and ``group`` inputs, a multiple of 32
    or at least K; without zeros 128 is subtracted. Roundings are those of ``int4_linear``.
    """
    return linear.cpu(x, int8_decode(weight, scales, zeros, group, x.dtype), bias, residual)


def _aot(dtype: str, tile: Tile, group: int, zeros: bool, even_k: bool, bias: bool) -> AotCase:
    return integer_case(_int8_weight_kernel, dtype, "i16", tile, group, zeros, even_k, bias)


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    tiles = [int8_weight_tile(rows, torch.bfloat16, shared) for rows in (*DECODING_TILES, 65)]
    return [
        *(_aot("bf16", tile, 128, has, True, False) for tile in tiles for has in (False, True)),
        _aot("fp16", int8_weight_tile(16, torch.float16, shared), 32, True, False, True),
        _aot("fp32", int8_weight_tile(1, torch.float32, shared), 128, True, True, True),
        *decoding_cases(_int8_decode_kernel, "i16", DECODED),
    ]


AOT = aot(HOPPER)
