"""Products of activations and NVFP4 weights whose bits do not depend on the batch. Owns the ``nvfp4_linear`` op.

The rule of the format, the same in every kernel and on a CPU: an output's 16 inputs share an e4m3 scale, and an output
has an fp32 multiplier. ``s = scale * multiplier`` is rounded to fp32 and then to the activations' dtype; the weight
``e2m1 * s`` is rounded to that dtype once, so that kernels may multiply pairs of 16-bit numbers. Activations are not
quantised. The product of rounded weights accumulates K in one sequence in fp32, exactly as ``kernels/gemm/linear.py``
does.

As in ``kernels/gemm/int4.py`` up to FEW_ROWS rows one kernel decodes weights in registers, with outputs as the
instruction's M so that it is always wgmma on Hopper. Above, the weight is decoded into a buffer for the plain product,
if :func:`prove_nvfp4` found the same bits on the present GPU; otherwise the Triton kernel runs at every M.

Shapes: M rows, K inputs, N outputs. A byte of the weight [N, K / 2] holds inputs 2 i (low bits) and 2 i + 1; scales
uint8 [N, K / 16], the bits of e4m3; multipliers fp32 [N].
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.decoded import DECODING_TILES, FEW_ROWS, DecodedProduct, FewRowsProduct, decoding_tile
from unisono.kernels.gemm.linear import linear, linear_cuda, residual_tile, store_sums
from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP
from unisono.kernels.gemm.packed_gluon import launch_packed_rows, suits
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

GROUP = 16
"""Inputs that share a scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of e2m1 by their four bits."""

WIDTH, STEPS = 64, 4
"""Inputs of a step; steps of an iteration."""

DECODED = 2048
"""Inputs that a program of the decoding kernel writes."""

_LARGE = Tile(128, 64, 0, 4, 2)
"""At least 64 outputs, for wgmma."""


@triton.jit
def e2m1_pairs(packed):
    """Decode bytes to pairs of e2m1 values, fp32 with a last dimension more.

    Exponent and mantissa of e2m1 in the places of those of fp32 are the value times 2 ** -126, subnormals too.
    """
    byte = packed.to(tl.int32)
    low = ((byte & 0x07) << 22) | ((byte & 0x08) << 28)
    high = ((byte & 0x70) << 18) | ((byte & 0x80) << 24)
    return tl.join(low, high).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_values(bits):
    """Decode the bits of e4m3 numbers to fp32; 2 ** -120 of the value lies in the places of fp32, subnormals too."""
    byte = bits.to(tl.int32)
    return (((byte & 0x7F) << 20) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def nvfp4_decoded(packed, scale, multiplier, dtype: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Decode bytes [BLOCK_N, WIDTH / 2] with scales [BLOCK_N, WIDTH / 16] and multipliers [BLOCK_N] to weights."""
    values = tl.reshape(e2m1_pairs(packed), (BLOCK_N, WIDTH // 16, 16))
    factor = (e4m3_values(scale) * multiplier[:, None]).to(dtype).to(tl.float32)
    return tl.reshape(values * factor[:, :, None], (BLOCK_N, WIDTH)).to(dtype)


@triton.jit
def nvfp4_product(x_ptrs, x_ok, w_ptrs, s_ptrs, multiplier, K,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                  EVEN_K: tl.constexpr):  # fmt: skip
    """Compute the product over K of x and a packed weight, decoded in registers: fp32 [BLOCK_M, BLOCK_N].

    x_ptrs [BLOCK_M, WIDTH], w_ptrs [BLOCK_N, WIDTH / 2], s_ptrs [BLOCK_N, WIDTH / 16]: the first step's; rows of x that
    are not ``x_ok`` count as 0.
    """
    ks, bytes_, groups = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 16)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale = tl.load(s_ptrs, mask=(groups < K // 16)[None, :], other=0)
    for first in range(0, K, WIDTH * STEPS):
        for j in tl.static_range(STEPS):
            k = first + j * WIDTH
            if EVEN_K:
                x_tile = tl.load(x_ptrs + k, mask=x_ok[:, None], other=0.0)
                packed = tl.load(w_ptrs + k // 2)
            else:
                x_tile = tl.load(x_ptrs + k, mask=x_ok[:, None] & (ks < K - k)[None, :], other=0.0)
                packed = tl.load(w_ptrs + k // 2, mask=(bytes_ < (K - k) // 2)[None, :], other=0)
            # The compiler does not load so few bytes ahead of their step.
            after = k + WIDTH
            next_scale = tl.load(s_ptrs + after // 16, mask=(groups < (K - after) // 16)[None, :], other=0)
            w_tile = nvfp4_decoded(packed, scale, multiplier, x_tile.dtype, BLOCK_N, WIDTH)
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
            scale = next_scale
    return tl.trans(acc)


@triton.jit
def _nvfp4_linear_kernel(x, weight, scales, multipliers, bias, residual, out, M, N, K,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                         EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                         OVERLAP: tl.constexpr):  # fmt: skip
    # Row tiles of one weight tile are neighbours in the grid, so that the weight is read from memory once.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < M
    # The last weight tile repeats the last row: that is cheaper than a mask, and the result is not stored.
    weight_rows = tl.minimum(cols, N - 1).to(tl.int64)
    x_ptrs = x + rows.to(tl.int64)[:, None] * K + tl.arange(0, WIDTH)[None, :]
    w_ptrs = weight + weight_rows[:, None] * (K // 2) + tl.arange(0, WIDTH // 2)[None, :]
    s_ptrs = scales + weight_rows[:, None] * (K // 16) + tl.arange(0, WIDTH // 16)[None, :]
    follow(OVERLAP)
    multiplier = tl.load(multipliers + weight_rows)
    acc = nvfp4_product(x_ptrs, row_ok, w_ptrs, s_ptrs, multiplier, K, BLOCK_M, BLOCK_N, WIDTH, STEPS, EVEN_K)
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)
    store_sums(acc, out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _nvfp4_decode_kernel(weight, scales, multipliers, out, K, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Decode WIDTH inputs of one output per program."""
    follow(OVERLAP)
    row, ks = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    bytes_ = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    groups = tl.program_id(1) * (WIDTH // 16) + tl.arange(0, WIDTH // 16)
    packed = tl.load(weight + row * (K // 2) + bytes_, mask=bytes_ < K // 2, other=0)
    scale = tl.load(scales + row * (K // 16) + groups, mask=groups < K // 16, other=0)
    values = tl.reshape(e2m1_pairs(packed), (WIDTH // 16, 16))
    dtype: tl.constexpr = out.dtype.element_ty
    factor = (e4m3_values(scale) * tl.load(multipliers + row)).to(dtype).to(tl.float32)
    tl.store(out + row * K + ks, tl.reshape(values * factor[:, None], (WIDTH,)).to(dtype), mask=ks < K)


def launch_nvfp4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    multipliers: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Launch the Triton product of packed weights at any M. tile: overrides the blocking (speed only)."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    tile = tile or decoding_tile(rows, x.dtype, _LARGE)
    out = x.new_empty(rows, n)
    _nvfp4_linear_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))](
        x, weight, scales, multipliers, bias, residual, out, rows, n, k,
        BLOCK_M=tile.m, BLOCK_N=tile.n, WIDTH=WIDTH, STEPS=STEPS, EVEN_K=k % (WIDTH * STEPS) == 0,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(x.device),
    )  # fmt: skip
    return out


def launch_nvfp4_decode(
    weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decode the weight to [N, K] in ``dtype``."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    out = multipliers.new_empty(n, k, dtype=dtype)
    _nvfp4_decode_kernel[(n, triton.cdiv(k, DECODED))](
        weight, scales, multipliers, out, k, WIDTH=DECODED, **overlapped(weight.device)
    )
    return out


_E2M1 = torch.tensor(E2M1)


def nvfp4_decode(
    weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decode weights [..., N, K / 2] to [..., N, K] in plain torch; CPU twin of :func:`launch_nvfp4_decode`."""
    values = _E2M1.to(weight.device)[torch.stack((weight & 15, weight >> 4), -1).flatten(-2).int()]
    groups = (scales.view(torch.float8_e4m3fn).float() * multipliers[..., None]).to(dtype).float()
    return (values.unflatten(-1, (-1, GROUP)) * groups[..., None]).flatten(-2).to(dtype)


def _keys(
    weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, dtype: torch.dtype
) -> tuple[Hashable, ...]:
    """(N, K, dtype of activations)."""
    return ((weight.shape[0], 2 * weight.shape[1], dtype),) if weight.device.type == "cuda" else ()


exact_nvfp4 = DecodedProduct("products of decoded NVFP4 weights", _keys, launch_nvfp4_decode, launch_nvfp4_linear)


def launch_nvfp4_rows(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor,
    bias: torch.Tensor | None, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Launch the Hopper kernel of few rows."""
    return launch_packed_rows(x, weight, scales, multipliers, NVFP4_GROUP, bias, residual)


exact_nvfp4_rows = FewRowsProduct(
    "NVFP4 products of few rows",
    _keys,
    launch_nvfp4_linear,
    launch_nvfp4_rows,
    lambda rows, weight, scales, multipliers, dtype: suits(rows, weight, NVFP4_GROUP, dtype),
)


def prove_nvfp4(*weight: Any) -> bool:
    """Prove the Hopper kernel of few rows and the product of the decoded weight. Returns the second result.

    Arguments: those of :func:`launch_nvfp4_decode`.
    """
    exact_nvfp4_rows.prove(*weight)
    return exact_nvfp4.prove(*weight)


def rehearse_nvfp4(*weight: Any) -> None:
    """Launch the kernels of :func:`prove_nvfp4` and ignore the results: this compiles them ahead of time."""
    exact_nvfp4_rows.rehearse(*weight)
    exact_nvfp4.rehearse(*weight)


def nvfp4_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, key = x.shape[0], (weight.shape[0], x.shape[1], x.dtype)
    if rows > FEW_ROWS and exact_nvfp4.serves(key):
        return linear_cuda(x, launch_nvfp4_decode(weight, scales, multipliers, x.dtype), bias, residual)
    few = exact_nvfp4_rows.serves(key) and suits(rows, weight, NVFP4_GROUP, x.dtype)
    launch = launch_nvfp4_rows if few else launch_nvfp4_linear
    return launch(x, weight, scales, multipliers, bias, residual)


@op(cuda=nvfp4_linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]))
def nvfp4_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``x [M, K] @ weight^T (+ bias [N]) (+ residual [M, N])``: [M, N] in x's dtype.

    weight uint8 [N, K / 2], scales uint8 [N, K / 16] and multipliers fp32 [N], decoded as the module says; K is a
    multiple of 16. The product is rounded, then the bias is added and rounded, then the residual. A row's bits depend
    on that row, the weight, its bias and its residual only.
    """
    return linear.cpu(x, nvfp4_decode(weight, scales, multipliers, x.dtype), bias, residual)


def _aot(dtype: str, tile: Tile, even_k: bool, bias: bool) -> AotCase:
    tensors = {name: f"*{dtype}" for name in ("x", "bias", "residual", "out")}
    packed = {"weight": "*u8", "scales": "*u8", "multipliers": "*fp32"}
    return AotCase(
        _nvfp4_linear_kernel,
        {**tensors, **packed, **dict.fromkeys(("M", "N", "K"), "i32")},
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "WIDTH": WIDTH, "STEPS": STEPS, "EVEN_K": even_k,
            "HAS_BIAS": bias, "HAS_RESIDUAL": True, "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


AOT: list[AotCase] = [
    *(_aot("bf16", tile, True, False) for tile in (*DECODING_TILES.values(), _LARGE)),
    _aot("fp16", DECODING_TILES[16], False, True),
    _aot("fp32", decoding_tile(1, torch.float32, _LARGE), True, True),
    AotCase(
        _nvfp4_decode_kernel,
        {"weight": "*u8", "scales": "*u8", "multipliers": "*fp32", "out": "*bf16", "K": "i32"},
        {"WIDTH": DECODED, "OVERLAP": True},
    ),
]
