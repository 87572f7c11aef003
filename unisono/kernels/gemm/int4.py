"""Products of activations and 4-bit weights whose bits do not depend on the batch. Owns the ``int4_linear`` op.

A weight is ``(q - zero) * scale``, computed in fp32 and rounded to the activations' dtype; activations are not
quantised. The product of rounded weights accumulates K in one sequence in fp32, exactly as ``kernels/gemm/linear.py``
does. Up to FEW_ROWS rows one kernel unpacks weights in registers: that of ``packed_gluon.py`` on Hopper, if
:func:`prove_int4` found the same bits, otherwise the Triton kernel here. Above, the weight is unpacked into a buffer
and the plain product runs on it, if :func:`prove_int4` found the same bits on the present GPU; otherwise the Triton
kernel runs at every M.

The kernel's products have swapped operands, outputs as M and rows as N, so that they always run on wgmma. For tiles of
fewer than 64 rows Triton would take mma.sync, and for unpacked operands it permutes the inputs of that instruction,
which changes bits (seen on an H200).

Shapes: M rows, K inputs, N outputs, G = ceil(K / group) groups. A byte of the weight [N, K / 2] holds inputs 2 i (low
bits) and 2 i + 1 (high bits) as 0 … 15.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.decoded import (
    DECODING_TILES,
    FEW_ROWS,
    DecodedProduct,
    FewRowsProduct,
    decoding_cases,
    decoding_tile,
    integer_case,
    integer_product,
    launch_integer_linear,
)
from unisono.kernels.gemm.linear import linear, linear_cuda, residual_tile, store_sums
from unisono.kernels.gemm.packed_gluon import launch_packed_rows, suits
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

MIDDLE = 8
"""Zero point of a weight without stored zeros."""


_LARGE = Tile(128, 64, 0, 4, 2)
"""At least 64 outputs, for wgmma; two stages fit into 99 KiB of shared memory."""


@triton.jit
def _int4_linear_kernel(x, weight, scales, zeros, bias, residual, out, M, N, K, group,
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
    w_ptrs = weight + weight_rows[:, None] * (K // 2) + tl.arange(0, WIDTH // 2)[None, :]
    follow(OVERLAP)
    z_ptrs = zeros + weight_rows * G if HAS_ZEROS else zeros
    acc = integer_product(x_ptrs, row_ok, w_ptrs, scales + weight_rows * G, z_ptrs, K, group,
                       BLOCK_M, BLOCK_N, WIDTH, STEPS, EVEN_K, HAS_ZEROS, 2)  # fmt: skip
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)
    store_sums(acc, out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _unpack_kernel(weight, scales, zeros, out, K, group, WIDTH: tl.constexpr, HAS_ZEROS: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    """Unpack WIDTH inputs of one output per program."""
    follow(OVERLAP)
    row, ks = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    bytes_ = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    packed = tl.load(weight + row * (K // 2) + bytes_, mask=bytes_ < K // 2, other=0)
    values = tl.reshape(tl.join(packed & 15, packed >> 4), (WIDTH,)).to(tl.float32)
    at = row * tl.cdiv(K, group) + ks // group
    scale = tl.load(scales + at, mask=ks < K, other=0.0)
    if HAS_ZEROS:
        values -= tl.load(zeros + at, mask=ks < K, other=0).to(tl.float32)
    else:
        values -= 8.0
    tl.store(out + row * K + ks, (values * scale).to(out.dtype.element_ty), mask=ks < K)


def launch_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Launch the Triton product of packed weights at any M. tile: overrides the blocking (speed only)."""
    tile = tile or decoding_tile(x.shape[0], x.dtype, _LARGE)
    return launch_integer_linear(_int4_linear_kernel, x, weight, scales, zeros, group, bias, residual, tile)


def launch_unpack(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Unpack the weight to [N, K] in ``dtype``."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    out = scales.new_empty(n, k, dtype=dtype)
    _unpack_kernel[(n, triton.cdiv(k, 2048))](
        weight, scales, zeros, out, k, group, WIDTH=2048, HAS_ZEROS=zeros is not None, **overlapped(weight.device)
    )
    return out


def unpack_cpu(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Unpack the weight in plain torch; CPU twin of :func:`launch_unpack`."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    values = torch.stack((weight & 15, weight >> 4), 2).view(n, k).float()
    of = torch.arange(k, device=weight.device) // group
    values = values - (MIDDLE if zeros is None else zeros.float()[:, of])
    return (values * scales[:, of]).to(dtype)


def _keys(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> tuple[Hashable, ...]:
    """(N, K, group, dtype of activations)."""
    return ((weight.shape[0], 2 * weight.shape[1], group, dtype),) if weight.device.type == "cuda" else ()


exact_unpacked = DecodedProduct("products of unpacked int4 weights", _keys, launch_unpack, launch_int4_linear)
exact_int4_rows = FewRowsProduct(
    "int4 products of few rows",
    _keys,
    launch_int4_linear,
    launch_packed_rows,
    lambda rows, weight, scales, zeros, group, dtype: suits(rows, weight, group, dtype),
)


def prove_int4(*weight: Any) -> bool:
    """Prove the Hopper kernel of few rows and the product of the unpacked weight. Returns the second result.

    Arguments: those of :func:`launch_unpack`.
    """
    exact_int4_rows.prove(*weight)
    return exact_unpacked.prove(*weight)


def rehearse_int4(*weight: Any) -> None:
    """Launch the kernels of :func:`prove_int4` and ignore the results: this compiles them ahead of time."""
    exact_int4_rows.rehearse(*weight)
    exact_unpacked.rehearse(*weight)


def int4_linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, key = x.shape[0], (weight.shape[0], x.shape[1], group, x.dtype)
    if rows > FEW_ROWS and exact_unpacked.serves(key):
        return linear_cuda(x, launch_unpack(weight, scales, zeros, group, x.dtype), bias, residual)
    few = exact_int4_rows.serves(key) and suits(rows, weight, group, x.dtype)
    launch = launch_packed_rows if few else launch_int4_linear
    return launch(x, weight, scales, zeros, group, bias, residual)


@op(cuda=int4_linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]))
def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x [M, K] @ ((weight - zeros) * scales)^T (+ bias [N]) (+ residual [M, N])``: [M, N] in x's dtype.

    weight [N, K / 2] uint8, packed as the module says; scales fp32 and zeros int8 [N, G], one for each output and
    ``group`` inputs, a multiple of 32 or at least K; without zeros 8 is subtracted. Weights are rounded to x's dtype,
    the product is rounded, then the bias is added and rounded, then the residual. A row's bits depend on that row, the
    weight, its bias and its residual only.
    """
    return linear.cpu(x, unpack_cpu(weight, scales, zeros, group, x.dtype), bias, residual)


def _aot_int4(dtype: str, tile: Tile, group: int, zeros: bool, even_k: bool, bias: bool) -> AotCase:
    return integer_case(_int4_linear_kernel, dtype, "i8", tile, group, zeros, even_k, bias)


AOT: list[AotCase] = [
    *(
        _aot_int4("bf16", tile, 128, has, True, False)
        for tile in (*DECODING_TILES.values(), _LARGE)
        for has in (False, True)
    ),
    *(_aot_int4("fp16", DECODING_TILES[16], group, True, False, True) for group in (32, 64, 128)),
    _aot_int4("fp32", decoding_tile(1, torch.float32, _LARGE), 128, True, True, True),
    *decoding_cases(_unpack_kernel, "i8", 2048),
]
