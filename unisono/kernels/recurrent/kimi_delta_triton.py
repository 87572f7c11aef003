"""Walk of Kimi Delta Attention over a row's chunks in Triton. Launched by ``kernels/recurrent/kimi_delta.py``.

It is that of ``gated_delta_triton`` with a decay for each channel of a key: keys and queries come with their decays
from ``kimi_delta_prepare``, in two terms, which keep 16 of fp32's 24 bits. It serves rounds, and prompts in fp32;
``kimi_delta_gluon`` has a faster walk, for 16-bit prompts.

Nothing is left to the compiler that could change bits: see ``gated_delta_triton``.

Shapes: T tokens, R rows, H heads, K / V key / value sizes, C elements of q, k and v side by side, W tokens per row of a
round, RING positions that a row remembers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.overlap import follow, overlapping
from unisono.kernels.recurrent.gated_delta_triton import CHUNK, _blank, _put, _tile, _times_split, _within, half_of


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


@overlapping(reads_early=True)
@triton.jit
def _kimi_round_kernel(
    qkv, kv_ring, squares, factors, decayed, ends, state, out, rows, since, first, until, end, W,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Walk rounds of at most two chunks per row, as :func:`_kimi_walk_kernel`; the state is processed in halves of K.

    It is read before the kernel ahead has ended (``kernels/overlap.py``), and again if the first chunk closes or its
    tokens are committed.
    """
    h, row = tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = (2 * K + V) * H
    KV: tl.constexpr = (K + V) * H
    TILE: tl.constexpr = CHUNK * K
    TERMS: tl.constexpr = 1 if qkv.dtype.element_ty == tl.float32 else 2
    HALF: tl.constexpr = half_of(K)
    dv, d, i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, HALF), tl.arange(0, CHUNK)
    out += h * V + dv[None, :]
    begin, at = row * W, tl.load(first + row)
    if at < 0:
        follow(OVERLAP)
        _blank(out, begin, begin + W, H * V, BLOCK_V)
    else:
        slot, start, goal, stop = tl.load(rows + row), tl.load(since + row), tl.load(until + row), tl.load(end + row)
        limit, position = at + W, start + i
        place = (row * 2).to(tl.int64) * H + h
        squares += place * (4 * CHUNK * CHUNK)
        factors += place * (4 * CHUNK)
        own, whole = decayed + place * (3 * TERMS * TILE) + (i[:, None] * K + d[None, :]), ends + place * K + d
        home = state + (slot.to(tl.int64) * H + h) * (V * K) + dv[:, None] * K + d[None, :]
        v_new, v_old = qkv + 2 * H * K + h * V, kv_ring + H * K + h * V
        v = _tile(v_new, C, v_old, KV, position, begin, at, stop, slot, dv, RING, True)
        S = tl.load(home)
        Z = tl.load(home + HALF) if K > HALF else S  # the state's second half
        follow(OVERLAP)
        zero = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        k_sum, q_sum = _decayed_reads(S, own, TERMS * TILE, zero, zero)
        if K > HALF:
            k_sum, q_sum = _decayed_reads(Z, own + HALF, TERMS * TILE, k_sum, q_sum)
        o, taken, _ = _within(k_sum, q_sum, v, squares, factors, None, True)
        _put(out, v_old, o, v, position, begin, at, stop, limit, slot, dv, H * V, KV, RING, True)
        if (limit > start + CHUNK) | (goal > start):
            upcoming = own + H * (3 * TERMS * TILE)
            k_sum, q_sum = zero, zero
            for s in tl.static_range(0, K, HALF):
                high, low = _load_terms(own + 2 * TERMS * TILE + s, TILE)
                S = _times_split(taken, high, low, tl.load(home + s) * tl.load(whole + s)[None, :])
                if goal > start:
                    tl.store(home + s, S)
                if limit > start + CHUNK:
                    k_sum, q_sum = _decayed_reads(S, upcoming + s, TERMS * TILE, k_sum, q_sum)
            if limit > start + CHUNK:
                after = position + CHUNK
                v = _tile(v_new, C, v_old, KV, after, begin, at, stop, slot, dv, RING, True)
                squares += H * 4 * CHUNK * CHUNK
                o, taken, _ = _within(k_sum, q_sum, v, squares, factors + H * 4 * CHUNK, None, True)
                _put(out, v_old, o, v, after, begin, at, stop, limit, slot, dv, H * V, KV, RING, True)
