"""Steps around the walk of latent attention: the cache's rows, rotated queries, and a product for each head.

Owns the ops ``rotate_latent``, ``head_product`` and ``latent_queries``, which is both in one launch; called by the
latent attention block. Every row of a result depends on its own token alone: one program norms and rotates one token,
and products accumulate K in one sequence.

Shapes: T tokens, Hq query heads, L latent size, R size of the rotated part, D elements of a head that do not rotate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unisono.kernels.cache.kv_e4m3 import as_e4m3, exponent_of, largest_bits, quantised
from unisono.kernels.gemm.cpu import row_exact_product, slice_of
from unisono.kernels.gemm.linear import tile_product
from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.norm.rms_norm import rms_norm, rounded_before_weight, square
from unisono.kernels.overlap import follow, overlapped

_AT_ONCE = 8
"""Query heads that a program rotates."""

_WARPS = 4
"""Warps of a program that norms a latent, alone or beside products: their number is part of the sum's order."""


@triton.jit
def _rotate(
    token, program, rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, out, turned, scales, rows_stride,
    q_stride, HEADS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, NOPE: tl.constexpr,
    BLOCK: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write one token's row of the cache (program 0), or rotate GROUP of its query heads.

    scales: exponents of e4m3 latents, whose rotated parts are in ``turned``; or None, like ``turned``.
    """
    h = tl.arange(0, TURNED)
    inside = h < HALF
    angles = cos_sin + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * (2 * HALF) + h
    cos, sin = tl.load(angles, mask=inside, other=1.0), tl.load(angles + HALF, mask=inside, other=0.0)
    dtype: tl.constexpr = rows.dtype.element_ty
    STEP: tl.constexpr = 2 if INTERLEAVED else 1  # elements between a plane and the next
    APART: tl.constexpr = 1 if INTERLEAVED else HALF  # between the two of a plane
    if program == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        w = tl.load(norm + cols, mask=cols < LATENT, other=0.0)
        row = rows + token * rows_stride
        value = tl.load(row + cols, mask=cols < LATENT, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(square(value), axis=0) / LATENT + eps)
        normed = rounded_before_weight(value * scale, w.dtype, dtype) * w.to(tl.float32)
        if scales is None:
            at = cache + slot * (LATENT + 2 * HALF)
            tl.store(at + cols, normed.to(dtype), mask=cols < LATENT)
            at += LATENT
        else:
            latent = normed.to(dtype).to(tl.float32)[None, :]
            exponent = exponent_of(largest_bits(latent))
            of_row = cols[None, :]
            tl.store(
                cache + slot * LATENT + of_row, as_e4m3(latent, exponent, cache.dtype.element_ty), mask=of_row < LATENT
            )
            tl.store(scales + slot + tl.arange(0, 1), exponent.to(tl.uint8))
            at = turned + slot * (2 * HALF)
        first = tl.load(row + LATENT + h * STEP, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(row + LATENT + h * STEP + APART, mask=inside, other=0.0).to(tl.float32)
        tl.store(at + h, tl.fma(first, cos, second * -sin).to(dtype), mask=inside)
        tl.store(at + HALF + h, tl.fma(second, cos, first * sin).to(dtype), mask=inside)
    else:
        head = (program - 1) * GROUP + tl.arange(0, GROUP)
        there = (head < HEADS)[:, None] & inside[None, :]
        of_head = q + token * q_stride + head[:, None] * (NOPE + 2 * HALF) + NOPE + h[None, :] * STEP
        firsts = tl.load(of_head, mask=there, other=0.0).to(tl.float32)
        seconds = tl.load(of_head + APART, mask=there, other=0.0).to(tl.float32)
        to = out + (token * HEADS + head[:, None]) * (LATENT + 2 * HALF) + LATENT + h[None, :]
        tl.store(to, tl.fma(firsts, cos[None, :], seconds * -sin[None, :]).to(dtype), mask=there)
        tl.store(to + HALF, tl.fma(seconds, cos[None, :], firsts * sin[None, :]).to(dtype), mask=there)


@triton.jit
def _rotate_latent_kernel(
    rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, out, turned, scales, rows_stride, q_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, NOPE: tl.constexpr,
    BLOCK: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write one token's row of the cache (second program index 0), or rotate GROUP of its query heads."""
    follow(OVERLAP)
    _rotate(
        tl.program_id(0).to(tl.int64), tl.program_id(1), rows, q, norm, eps, cos_sin, positions, slot_mapping, cache,
        out, turned, scales, rows_stride, q_stride, HEADS, LATENT, HALF, NOPE, BLOCK, TURNED, GROUP, INTERLEAVED,
    )  # fmt: skip


def launch_rotate_latent(
    rows: torch.Tensor, q: torch.Tensor, norm: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor, heads: int, interleaved: bool,
    turned: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See :func:`rotate_latent`."""
    out = q.new_empty(len(q), heads, len(norm) + cos_sin.shape[1])
    _rotate_latent_kernel[(len(q), 1 + triton.cdiv(heads, _AT_ONCE))](
        rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, out, turned, scales, rows.stride(0), q.stride(0),
        **_rotation_sizes(q, len(norm), cos_sin.shape[1], heads, interleaved), num_warps=_WARPS,
        **overlapped(q.device),
    )  # fmt: skip
    return out


def _rotation_sizes(q: torch.Tensor, latent: int, rope: int, heads: int, interleaved: bool) -> dict[str, int]:
    """Compile-time sizes of a rotation."""
    sizes = {"HEADS": heads, "LATENT": latent, "HALF": rope // 2, "NOPE": q.shape[1] // heads - rope}
    sizes |= {"BLOCK": triton.next_power_of_2(latent), "TURNED": triton.next_power_of_2(rope // 2)}
    return sizes | {"GROUP": _AT_ONCE, "INTERLEAVED": interleaved}


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, …, R] by cos_sin [T, R]; pairs of neighbours become halves where ``interleaved``."""
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = cos_sin.view(len(x), *[1] * (x.dim() - 2), -1).chunk(2, dim=-1)
    first, second = first.float(), second.float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _query_shape(q: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor, heads: int) -> tuple[int, int, int]:
    return q.shape[0], heads, norm.shape[0] + cos_sin.shape[1]


@op(cuda=launch_rotate_latent, shape=_query_shape)
def rotate_latent(
    rows: torch.Tensor, q: torch.Tensor, norm: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, cache: Mutated[torch.Tensor], heads: int, interleaved: bool,
    turned: Mutated[torch.Tensor | None] = None, scales: Mutated[torch.Tensor | None] = None,
) -> torch.Tensor:  # fmt: skip
    """Norm the latents, rotate what rotates, write the cache's rows, and return room for the queries.

    rows [T, L + R]: each token's latent and the part of its key that rotates. q [T, Hq · (D + R)]: query heads, the
    rotating part last. norm [L]: weight of the latents' RMSNorm. cos_sin [max_positions, R] fp32, cosines first.
    slot_mapping [T]: rows of the cache [NP, 1, P, L + R]. interleaved: neighbouring elements rotate together, and are
    written as two halves; otherwise the halves rotate. Returns [T, Hq, L + R], of which the last R are written.

    Or a cache [NP, 1, P, L] of e4m3, with rotated parts in turned [NP, 1, P, R] and biased exponents of the latents'
    scales in scales [NP, 1, P, 1] uint8 (``kernels/cache/kv_e4m3.py``); latents are rounded to rows' dtype first.
    """
    latent, rope = len(norm), cos_sin.shape[1]
    angles = cos_sin[positions.clamp(min=0)]
    pages, offsets = slot_mapping // cache.shape[2], slot_mapping % cache.shape[2]
    normed = rms_norm.cpu(rows[:, :latent], norm, eps)
    rotated = _rotated(rows[:, latent:], angles, interleaved)
    if scales is None or turned is None:
        cache[pages, 0, offsets] = torch.cat((normed, rotated), dim=1)
    else:
        values, scales[pages, 0, offsets] = quantised(normed)
        cache.view(torch.uint8)[pages, 0, offsets] = values.view(torch.uint8)
        turned[pages, 0, offsets] = rotated
    out = q.new_empty(len(q), heads, latent + rope)
    out[..., latent:] = _rotated(q.view(len(q), heads, -1)[..., -rope:], angles, interleaved)
    return out


@triton.jit
def _product(
    row_tile, column_tile, head, x, weight, out, M, N, K, x_row, x_head, out_row, out_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one head's product."""
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < M
    x_rows = x + rows.to(tl.int64) * x_row + head * x_head
    w_rows = weight + (head * N + tl.minimum(cols, N - 1)) * K
    acc = tile_product(x_rows, w_rows, row_ok, K, BLOCK_M, BLOCK_N, BLOCK_K, False, EVEN_K)
    at = out + rows.to(tl.int64)[:, None] * out_row + head * out_head + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & (cols < N)[None, :])


@triton.jit
def _head_product_kernel(
    x, weight, out, M, N, K, x_row, x_head, out_row, out_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one head's product. Row tiles of one weight tile are neighbours in the grid."""
    follow(OVERLAP)
    _product(
        tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), x, weight, out, M, N, K, x_row, x_head,
        out_row, out_head, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip


@triton.jit
def _latent_queries_kernel(
    rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, out, turned, scales, rows_stride, q_stride, weight, M,
    tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, NOPE: tl.constexpr,
    BLOCK: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of all heads' products, ``tiles`` of each head, then rotate as ``_rotate_latent_kernel``."""
    follow(OVERLAP)
    program = tl.program_id(0)
    if program < tiles * HEADS:
        _product(
            0, program % tiles, (program // tiles).to(tl.int64), q, weight, out, M, LATENT, NOPE, q_stride,
            NOPE + 2 * HALF, HEADS * (LATENT + 2 * HALF), LATENT + 2 * HALF, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
    else:
        EACH: tl.constexpr = 1 + (HEADS + GROUP - 1) // GROUP
        turn = program - tiles * HEADS
        _rotate(
            (turn // EACH).to(tl.int64), turn % EACH, rows, q, norm, eps, cos_sin, positions, slot_mapping, cache,
            out, turned, scales, rows_stride, q_stride, HEADS, LATENT, HALF, NOPE, BLOCK, TURNED, GROUP, INTERLEAVED,
        )  # fmt: skip


def _tile(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages); no bit depends on them."""
    if dtype is torch.float32:
        return 16, 32, 32, 4, 2
    return (16, 64, 64, 4, 4) if rows <= 16 else (64, 64, 64, 4, 4) if rows <= 256 else (128, 128, 64, 8, 3)


def launch_head_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`head_product`."""
    heads, n, k = weight.shape
    m, block_n, block_k, warps, stages = _tile(len(x), x.dtype)
    _head_product_kernel[(triton.cdiv(len(x), m), triton.cdiv(n, block_n), heads)](
        x, weight, out, len(x), n, k, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        BLOCK_M=m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=k % block_k == 0, num_warps=warps, num_stages=stages,
        **overlapped(x.device),
    )  # fmt: skip


@op(cuda=launch_head_product)
def head_product(x: torch.Tensor, weight: torch.Tensor, out: Mutated[torch.Tensor]) -> None:
    """Multiply each head's first K elements with its own weight, into the first N of ``out``.

    x [T, Hq, ≥ K] and out [T, Hq, ≥ N], contiguous heads; weight [Hq, N, K]; one dtype, sums in fp32.
    """
    heads, n, k = weight.shape
    for head in range(heads):
        out[:, head, :n] = row_exact_product(x[:, head, :k], slice_of(weight, head))


def launch_latent_queries(
    rows: torch.Tensor, q: torch.Tensor, norm: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor, heads: int, interleaved: bool,
    weight: torch.Tensor, turned: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See :func:`latent_queries`. One launch for the rows of one tile of products, two for more."""
    m, block_n, block_k, warps, stages = _tile(len(q), q.dtype)
    if len(q) > m or warps != _WARPS:
        out = launch_rotate_latent(
            rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, heads, interleaved, turned, scales
        )
        launch_head_product(q.view(len(q), heads, -1), weight, out)
        return out
    out = q.new_empty(len(q), heads, len(norm) + cos_sin.shape[1])
    sizes, tiles = _rotation_sizes(q, len(norm), cos_sin.shape[1], heads, interleaved), triton.cdiv(len(norm), block_n)
    programs = tiles * heads + len(q) * (1 + triton.cdiv(heads, _AT_ONCE))
    _latent_queries_kernel[(programs,)](
        rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, out, turned, scales, rows.stride(0), q.stride(0),
        weight, len(q), tiles, **sizes, BLOCK_M=m, BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN_K=weight.shape[2] % block_k == 0, num_warps=warps, num_stages=stages, **overlapped(q.device),
    )  # fmt: skip
    return out


@op(cuda=launch_latent_queries, shape=_query_shape)
def latent_queries(
    rows: torch.Tensor, q: torch.Tensor, norm: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, cache: Mutated[torch.Tensor], heads: int, interleaved: bool,
    weight: torch.Tensor, turned: Mutated[torch.Tensor | None] = None, scales: Mutated[torch.Tensor | None] = None,
) -> torch.Tensor:  # fmt: skip
    """Write the cache's rows as :func:`rotate_latent`, and return the queries: its result after :func:`head_product`.

    weight [Hq, L, D]: multiplies what does not rotate of each query head. Returns [T, Hq, L + R].
    """
    out = rotate_latent.cpu(
        rows, q, norm, eps, cos_sin, positions, slot_mapping, cache, heads, interleaved, turned, scales
    )
    head_product.cpu(q.view(len(q), heads, -1), weight, out)
    return out


_ROTATED = dict.fromkeys(("rows", "q", "norm", "cache", "out"), "*bf16") | {"cos_sin": "*fp32", "eps": "fp32"}
_ROTATED |= ints("positions slot_mapping", "rows_stride q_stride")


_E4M3 = {"cache": "*fp8e4nv", "turned": "*bf16", "scales": "*u8"}


def _rotation_constants(heads: int, nope: int, interleaved: bool, e4m3: bool = False) -> dict[str, Any]:
    sizes = {"HEADS": heads, "LATENT": 512, "HALF": 32, "NOPE": nope, "BLOCK": 512, "TURNED": 32}
    sizes |= {"GROUP": _AT_ONCE, "INTERLEAVED": interleaved, "OVERLAP": True}
    return sizes if e4m3 else sizes | {"turned": None, "scales": None}


def _product_case(kernel: Any, signature: dict[str, str], constants: dict[str, Any], rows: int) -> AotCase:
    m, n, k, warps, stages = _tile(rows, torch.bfloat16)
    constants |= {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "EVEN_K": True, "OVERLAP": True}
    return AotCase(kernel, signature, constants, num_warps=warps, num_stages=stages)


_MULTIPLIED = dict.fromkeys(("x", "weight", "out"), "*bf16") | ints("", "M N K x_row x_head out_row out_head")

AOT = [
    *(
        AotCase(_rotate_latent_kernel, _ROTATED, _rotation_constants(*heads), num_warps=_WARPS)
        for heads in ((20, 192, True), (128, 128, False))
    ),
    AotCase(_rotate_latent_kernel, _ROTATED | _E4M3, _rotation_constants(20, 192, True, True), num_warps=_WARPS),
    *(_product_case(_head_product_kernel, _MULTIPLIED, {}, rows) for rows in (1, 64, 1024)),
    *(
        _product_case(
            _latent_queries_kernel, _ROTATED | (_E4M3 if e4m3 else {}) | {"weight": "*bf16"} | ints("", "M tiles"),
            _rotation_constants(20, 192, True, e4m3), rows,
        )
        for rows, e4m3 in ((1, False), (64, False), (1, True))
    ),
]  # fmt: skip
