"""Triton kernels of Kimi Delta Attention. Launched by ``kernels/recurrent/kimi_delta.py``.

They are those of ``gated_delta_triton`` with a decay for each channel of a key. Decays then do not leave the products
of keys and queries as factors of a chunk's tokens. :func:`_kimi_prepare_kernel` divides each product at the boundary
of two blocks of tokens, where both factors are at most 1, and stores keys and queries times their decays in two terms,
which keep 16 of fp32's 24 bits. :func:`_kimi_walk_kernel` walks a row's chunks with the state in registers, in prompts
and in rounds; ``kimi_delta_gluon`` has a faster walk, for 16-bit prompts.

Nothing is left to the compiler that could change bits: see ``gated_delta_triton``.

Shapes: T tokens, R rows, H heads, K / V key / value sizes, C elements of q, k and v side by side, W tokens per row of a
round, RING positions that a row remembers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.overlap import follow
from unisono.kernels.recurrent.gated_delta_triton import (
    CHUNK,
    EPS,
    _blank,
    _place_of,
    _put,
    _solved,
    _split,
    _store_chunk,
    _tile,
    _times_split,
    _within,
    half_of,
)

SLICE = tl.constexpr(16)
"""Channels that are prepared at once. It is part of the order of sums, hence of the bits."""


@triton.jit
def _terms(x, dtype: tl.constexpr):
    """Split x into two terms of this dtype; fp32 is the first term as it is."""
    if dtype == tl.float32:
        return x, x
    return _split(x, dtype)


@triton.jit
def _decays(g, after, last, dtype: tl.constexpr):
    """Compute exp of the sum of rows after[i] < t <= last[i] of g [CHUNK, n], for each row i.

    The sum is a product with ones and zeros, in three products of tf32 unless the op computes in fp32.
    """
    t = tl.arange(0, CHUNK)[None, :]
    ones = tl.where((after[:, None] < t) & (t <= last[:, None]), 1.0, 0.0)
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32x3"
    return tl.exp(tl.dot(ones, g, tl.zeros_like(g), input_precision=precision))


@triton.jit
def _blocks(k, q, g, below, weights, SIZE: tl.constexpr):
    """Add the products over some channels of keys i and queries i with keys j [CHUNK, CHUNK], for i in the second and j
    in the first of two neighbouring blocks of SIZE tokens. Results of other i and j mean nothing.
    """
    dtype: tl.constexpr = k.dtype
    i = tl.arange(0, CHUNK)
    second = i // SIZE % 2 == 1
    boundary = i // (2 * SIZE) * (2 * SIZE) + SIZE - 1
    factor = _decays(g, tl.where(second, boundary, i), tl.where(second, i, boundary), dtype)
    keys = k.to(tl.float32) * factor
    high, low = _terms(tl.where(second[:, None], 0.0, keys), dtype)
    high, low = tl.trans(high), tl.trans(low)
    below = _times_split(tl.where(second[:, None], keys, 0.0), high, low, below)
    weights = _times_split(tl.where(second[:, None], q.to(tl.float32) * factor, 0.0), high, low, weights)
    return below, weights


@triton.jit
def _pairs(SIZE: tl.constexpr):
    """Mask of tokens i and j whose products :func:`_blocks` computes."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE % 2 == 1) & (j // SIZE % 2 == 0)


@triton.jit
def _joined(diagonal, eights, fours, twos, ones):
    """Join the products of all blocks and of each token with itself."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    joined = tl.where(_pairs(8), eights, tl.where(i == j, diagonal, 0.0))
    return tl.where(_pairs(4), fours, tl.where(_pairs(2), twos, tl.where(_pairs(1), ones, joined)))


@triton.jit
def _store_terms(pointer, x, d, K: tl.constexpr):
    """Store channels d of x [CHUNK, n] in two terms, one after the other; in fp32 as it is."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    at = tl.arange(0, CHUNK)[:, None] * K + d[None, :]
    high, low = _terms(x, dtype)
    tl.store(pointer + at, high)
    if dtype != tl.float32:
        tl.store(pointer + CHUNK * K + at, low)


@triton.jit
def _store_decayed(decayed, ends, k, q, g, d, TERMS: tl.constexpr, K: tl.constexpr):
    """Store channels d of a chunk's keys and queries with their decays, and the decay of the state."""
    dtype: tl.constexpr = k.dtype
    i, none = tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32)
    since_begin, to_end = _decays(g, none - 1, i, dtype), _decays(g, i, none + (CHUNK - 1), dtype)
    _store_terms(decayed, k.to(tl.float32) * since_begin, d, K)
    _store_terms(decayed + TERMS * CHUNK * K, q.to(tl.float32) * since_begin, d, K)
    _store_terms(decayed + 2 * TERMS * CHUNK * K, k.to(tl.float32) * to_end, d, K)
    tl.store(ends + d, tl.sum(tl.where((i == CHUNK - 1)[:, None], since_begin, 0.0), 0))


@triton.jit
def _unit_squares(kk, qq, below, weights, beta, SCALE: tl.constexpr):
    """Compute T times beta, P [CHUNK, CHUNK] and 1 / length of keys and queries [CHUNK] from products of tokens."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    k_row = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 0) + EPS)
    k_col = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 1) + EPS)
    q_col = tl.rsqrt(tl.sum(tl.where(i == j, qq, 0.0), 1) + EPS) * SCALE
    T = _solved(below * (beta * k_col)[:, None] * k_row[None, :]) * beta[None, :]
    return T, weights * q_col[:, None] * k_row[None, :], k_col, q_col


@triton.jit
def _load_terms(at, STEP: tl.constexpr):
    """Load the terms at pointers ``at`` and STEP elements after them; in fp32 both are the first one."""
    high = tl.load(at)
    if high.dtype == tl.float32:
        return high, high
    return high, tl.load(at + STEP)


@triton.jit
def _decayed_reads(S, at, STEP: tl.constexpr, k_sum, q_sum):
    """Add the products of half of S [V, n] with decayed keys and queries, STEP elements apart, to those of the other
    half [V, CHUNK].
    """
    zero = tl.zeros_like(k_sum)
    high, low = _load_terms(at, STEP // 2)
    k_half = _times_split(S, tl.trans(high), tl.trans(low), zero)
    high, low = _load_terms(at + STEP, STEP // 2)
    q_half = _times_split(S, tl.trans(high), tl.trans(low), zero)
    return tl.fma(k_half, zero + 1.0, k_sum), tl.fma(q_half, zero + 1.0, q_sum)


@triton.jit(do_not_specialize=["R"])
def _kimi_prepare_kernel(
    qkv, gates, kv_ring, gates_ring, squares, factors, decayed, ends, rows, since, first, end, query_start, R, W,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    ROUND: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Prepare chunks; one program per (chunk, head). In a round it also stores the tokens' inputs in the rings.

    decayed [places, H, 3, 2, CHUNK, K]: keys and queries times the decay from the chunk's begin, keys times the decay
    to its end, each in two terms (in fp32 one). ends [places, H, K]: decay of the state. EXTRA: see ``besides`` of
    :meth:`unisono.kernels.recurrent.gated_delta.Sizes.chunks`.
    """
    follow(OVERLAP)
    c, h = tl.program_id(0), tl.program_id(1)
    row, chunk, begin = _place_of(c, query_start, R, W, EXTRA, ROUND, BLOCK_R)
    start, at, stop, slot = tl.load(since + row), tl.load(first + row), tl.load(end + row), tl.load(rows + row)
    start += chunk * CHUNK
    limit = at + W if ROUND else stop
    if (at >= 0) & (start < limit):
        C: tl.constexpr = (2 * K + V) * H
        KV: tl.constexpr = (K + V) * H
        G: tl.constexpr = H * (K + 1)
        TERMS: tl.constexpr = 1 if qkv.dtype.element_ty == tl.float32 else 2
        position = start + tl.arange(0, CHUNK)
        fresh = (position >= at) & (position < stop)
        q_new, k_new, k_ring = qkv + h * K, qkv + (H + h) * K, kv_ring + h * K
        kept, place = slot.to(tl.int64) * RING + position % RING, c.to(tl.int64) * H + h
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        kk, qk, qq, kk8, qk8, kk4, qk4, kk2, qk2, kk1, qk1 = (
            zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
        )  # fmt: skip
        for s in tl.range(0, K, SLICE, num_stages=1):
            d = s + tl.arange(0, SLICE)
            g_new, g_ring = gates + h * K, gates_ring + h * K
            k = _tile(k_new, C, k_ring, KV, position, begin, at, stop, slot, d, RING, True)
            q = _tile(q_new, C, q_new, C, position, begin, at, stop, slot, d, RING, False)
            g = _tile(g_new, G, g_ring, G, position, begin, at, stop, slot, d, RING, True)
            if ROUND:  # the ring has room for the pass's tokens beside those that are read
                tl.store(k_ring + (kept * KV)[:, None] + d[None, :], k, mask=fresh[:, None])
                tl.store(g_ring + (kept * G)[:, None] + d[None, :], g, mask=fresh[:, None])
            kk = tl.dot(k, tl.trans(k), kk, input_precision="ieee")
            qk = tl.dot(q, tl.trans(k), qk, input_precision="ieee")
            qq = tl.dot(q, tl.trans(q), qq, input_precision="ieee")
            kk8, qk8 = _blocks(k, q, g, kk8, qk8, 8)
            kk4, qk4 = _blocks(k, q, g, kk4, qk4, 4)
            kk2, qk2 = _blocks(k, q, g, kk2, qk2, 2)
            kk1, qk1 = _blocks(k, q, g, kk1, qk1, 1)
            _store_decayed(decayed + place * (3 * TERMS * CHUNK * K), ends + place * K, k, q, g, d, TERMS, K)
        b_new = gates + (begin + position - at).to(tl.int64) * G + H * K + h
        b_ring = gates_ring + kept * G + H * K + h
        beta = tl.load(tl.where(position < at, b_ring, b_new), mask=position < stop, other=0.0)
        if ROUND:
            tl.store(b_ring, beta, mask=fresh)
        below, weights = _joined(zero, kk8, kk4, kk2, kk1), _joined(qk, qk8, qk4, qk2, qk1)
        T, P, k_col, q_col = _unit_squares(kk, qq, below, weights, beta, SCALE)
        _store_chunk(squares, factors, place, T, P, -k_col, q_col, k_col, 0.0, True)


@triton.jit(do_not_specialize=["T", "R"])
def _kimi_walk_kernel(
    qkv, kv_ring, squares, factors, decayed, ends, state, out, rows, since, first, until, end, query_start, T, R, W,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, EXTRA: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Walk all chunks of a row; one program per (tile of V, head, row). The last row's zero a prompt pass's padding.

    STAGES: chunks whose inputs are loaded at once; it affects speed only.
    """
    follow(OVERLAP)
    h, row = tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = (2 * K + V) * H
    KV: tl.constexpr = (K + V) * H
    TILE: tl.constexpr = CHUNK * K
    TERMS: tl.constexpr = 1 if qkv.dtype.element_ty == tl.float32 else 2
    HALF: tl.constexpr = half_of(K)
    dv, d, i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, HALF), tl.arange(0, CHUNK)
    out += h * V + dv[None, :]
    begin, at = row * W if ROUND else tl.load(query_start + row), tl.load(first + row)
    if not ROUND and row == R - 1:
        _blank(out, tl.load(query_start + R), T, H * V, BLOCK_V)
    if at < 0:
        if ROUND:
            _blank(out, begin, begin + W, H * V, BLOCK_V)
    else:
        slot, start, goal, stop = tl.load(rows + row), tl.load(since + row), tl.load(until + row), tl.load(end + row)
        limit = at + W if ROUND else stop
        chunks, keep = tl.cdiv(limit - start, CHUNK), (goal - start) // CHUNK
        base = (row * EXTRA if ROUND else begin // CHUNK + row * EXTRA).to(tl.int64) * H + h
        home = state + (slot.to(tl.int64) * H + h) * (V * K) + dv[:, None] * K + d[None, :]
        S = tl.load(home)
        Z = tl.load(home + HALF) if K > HALF else S  # the state's second half
        v_new, v_old = qkv + 2 * H * K + h * V, kv_ring + H * K + h * V
        tile = i[:, None] * K + d[None, :]
        zero = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        for ch in tl.range(0, chunks, num_stages=STAGES):
            position, place = start + ch * CHUNK + i, base + ch * H
            own, whole = decayed + place * (3 * TERMS * TILE), ends + place * K + d
            v = _tile(v_new, C, v_old, KV, position, begin, at, stop, slot, dv, RING, True)
            k_sum, q_sum = _decayed_reads(S, own + tile, TERMS * TILE, zero, zero)
            if K > HALF:
                k_sum, q_sum = _decayed_reads(Z, own + tile + HALF, TERMS * TILE, k_sum, q_sum)
            square, factor = squares + place * (4 * CHUNK * CHUNK), factors + place * (4 * CHUNK)
            o, taken, _whole = _within(k_sum, q_sum, v, square, factor, None, True)
            _put(out, v_old, o, v, position, begin, at, stop, limit, slot, dv, H * V, KV, RING, ROUND)
            if (ch + 1 < chunks) | (ch + 1 == keep):
                adds = own + 2 * TERMS * TILE + tile
                high, low = _load_terms(adds, TILE)
                S = _times_split(taken, high, low, S * tl.load(whole)[None, :])
                if K > HALF:
                    high, low = _load_terms(adds + HALF, TILE)
                    Z = _times_split(taken, high, low, Z * tl.load(whole + HALF)[None, :])
            if ch + 1 == keep:
                tl.store(home, S)
                if K > HALF:
                    tl.store(home + HALF, Z)
