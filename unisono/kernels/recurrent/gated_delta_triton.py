"""Triton kernels of the gated delta rule, and of Mamba2. Launched by ``kernels/recurrent/gated_delta.py``.

A chunk is 16 tokens at a multiple of 16. :func:`_prepare_kernel` computes its state-independent part: from the products
of its keys and queries, and from the decays, it computes T (the new values are T times the values' errors) and P (the
outputs are P times the new values, plus the queries' reads of the state). :func:`_walk_kernel` walks a row's chunks
with the state in registers, :func:`_round_kernel` takes the one or two chunks of a round's row. They share the
arithmetic and differ in the source of tokens: a round's chunks begin before its tokens, so most of their inputs are
read from the ring. ``gated_delta_gluon`` has a faster walk, for 16-bit prompts.

Without DELTA they compute Mamba2 (``kernels/recurrent/mamba2.py``): the new values are the values times their steps,
so there is no T and no read of the state by keys, and the outputs have the values times ``skip`` added.

The tensor cores multiply 16-bit numbers. S, the errors, the new values, T and P are split into two such terms, which
keep 16 of fp32's 24 bits; q, k and v are exact. The bits of a chunk must not depend on which kernel computes it, so
nothing is left to the compiler: every fused multiply-add is written out, a split is guarded, and sums over a dimension
are products on the tensor core or have one term that is not zero. A read of the state has a sum for each half of K, so
that two warps can share it; the halves are added as a fused multiply-add, which no compiler moves into a product.

Shapes: T tokens, R rows, NR state rows, HK / HV key / value heads, K / V head sizes, C elements of q, k and v side by
side, W tokens per row of a round, RING positions that a row remembers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.library import COMPILED
from unisono.kernels.overlap import follow, overlapping
from unisono.kernels.recurrent.gated_delta_cpu import CHUNK as CHUNK_TOKENS
from unisono.kernels.recurrent.gated_delta_cpu import EPS as LENGTH_EPS

CHUNK = tl.constexpr(CHUNK_TOKENS)
EPS = tl.constexpr(LENGTH_EPS)
NEVER = tl.constexpr(2**31 - 1)


@triton.constexpr_function
def half_of(K):
    """Columns of the state whose products with a key are summed separately; a product takes at least 16."""
    return max(K // 2, 16)


# ---- products of fp32 numbers in two terms ----------------------------------------------------------


@triton.jit
def _split(x, dtype: tl.constexpr):
    """Split x into two terms of 8 bits each; the first is truncated, not rounded.

    The ``mov`` keeps the compiler from fusing a product x into the subtraction in one kernel and not in another.
    """
    if COMPILED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def _times(x, y, acc):
    """Compute acc + x y for fp32 x and exact y."""
    dtype: tl.constexpr = y.dtype
    if dtype == tl.float32:
        return tl.dot(x, y, acc, input_precision="ieee")
    high, low = _split(x, dtype)
    acc = tl.dot(low, y, acc, input_precision="ieee")
    return tl.dot(high, y, acc, input_precision="ieee")


@triton.jit
def _times_split(x, y_high, y_low, acc):
    """Compute acc + x (y_high + y_low) for fp32 x; in fp32 y_low is unused."""
    dtype: tl.constexpr = y_high.dtype
    if dtype == tl.float32:
        return tl.dot(x, y_high, acc, input_precision="ieee")
    high, low = _split(x, dtype)
    acc = tl.dot(low, y_high, acc, input_precision="ieee")
    acc = tl.dot(high, y_low, acc, input_precision="ieee")
    return tl.dot(high, y_high, acc, input_precision="ieee")


@triton.jit
def _store_split(pointer, x, at, SQUARE: tl.constexpr):
    """Store a square as two terms, the second after the first; in fp32 as it is."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    if dtype == tl.float32:
        tl.store(pointer + at, x)
    else:
        high, low = _split(x, dtype)
        tl.store(pointer + at, high)
        tl.store(pointer + SQUARE + at, low)


@triton.jit
def _load_split(pointer, at, SQUARE: tl.constexpr):
    """Load a square that :func:`_store_split` stored."""
    high = tl.load(pointer + at)
    if pointer.dtype.element_ty == tl.float32:
        return high, high
    return high, tl.load(pointer + SQUARE + at)


# ---- where tokens are -------------------------------------------------------------------------------


@triton.jit
def _tile(new, new_stride, ring, ring_stride, position, begin, first, stop, slot, d, RING: tl.constexpr,
          OLD: tl.constexpr):  # fmt: skip
    """Load elements d of the tokens at ``position`` [N], from the pass or, if OLD, from the ring; others are zero."""
    there = position < stop
    row = new + (begin + position - first).to(tl.int64) * new_stride
    if OLD:
        kept = ring + (slot.to(tl.int64) * RING + position % RING) * ring_stride
        row = tl.where(position < first, kept, row)
    else:
        there = there & (position >= first)
    return tl.load(row[:, None] + d[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _of_head(qkv, kv_ring, h, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Offsets of the queries, keys and values of value head h in the pass, and of the keys and values in the ring."""
    k, v = h // (HV // HK) * K, HK * K + h * V
    return qkv + k, qkv + HK * K + k, qkv + HK * K + v, kv_ring + k, kv_ring + v


@triton.jit
def _gate(gates, token, there, h, HV: tl.constexpr):
    """Load (g, beta) [N] of head h of tokens, from the pass or the ring; zeros if not ``there``."""
    row = gates + token * (2 * HV) + h
    return tl.load(row, mask=there, other=0.0), tl.load(row + HV, mask=there, other=0.0)


# ---- what of a chunk does not depend on the state ---------------------------------------------------


@triton.jit
def _solved(below):
    """Compute (1 + below)^-1 for below [CHUNK, CHUNK], lower triangular without its diagonal."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    T = tl.where(i == j, 1.0, 0.0)
    for s in tl.static_range(CHUNK - 1):
        row = tl.sum(tl.where(i == s, T, 0.0), 0)
        column = tl.sum(tl.where(j == s, below, 0.0), 1)
        T = tl.fma(zero - column[:, None], zero + row[None, :], T)
    return T


@triton.jit
def _squares(k, q, sums, sums_row, beta, SCALE: tl.constexpr):
    """Compute T times beta, P [CHUNK, CHUNK] and the chunk's factors [CHUNK] from its keys and queries [CHUNK, K].

    sums, sums_row: cumulative logs of the decays, along the rows and the columns of a square; beta: along the rows.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    kk = tl.dot(k, tl.trans(k), zero, input_precision="ieee")
    qk = tl.dot(q, tl.trans(k), zero, input_precision="ieee")
    qq = tl.dot(q, tl.trans(q), zero, input_precision="ieee")
    k_row = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 0) + EPS)
    k_col = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 1) + EPS)
    q_col = tl.rsqrt(tl.sum(tl.where(i == j, qq, 0.0), 1) + EPS) * SCALE
    left = tl.exp(tl.where(i >= j, sums[:, None] - sums_row[None, :], 0.0)) * k_row[None, :]
    below = tl.where(i > j, kk * (beta * k_col)[:, None] * left, 0.0)
    P = tl.where(i >= j, qk * q_col[:, None] * left, 0.0)
    T = _solved(below)
    end = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), 0)
    decay = tl.exp(sums)
    return T * beta[None, :], P, -(decay * k_col), decay * q_col, tl.exp(end - sums) * k_col, tl.exp(end)


@triton.jit
def _weights(k, q, sums, sums_row, step):
    """Compute Mamba2's P and the chunk's factors, as :func:`_squares`, with P in place of T; step: along the rows."""
    qk = tl.dot(q, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32), input_precision="ieee")
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    left = tl.exp(tl.where(i >= j, sums[:, None] - sums_row[None, :], 0.0))
    end = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), 0)
    P = tl.where(i >= j, qk * left, 0.0)
    return P, P, step, tl.exp(sums), tl.exp(end - sums), tl.exp(end)


@triton.jit
def _store_chunk(squares, factors, place, T, P, w_k, w_q, w_s, whole, DELTA: tl.constexpr):
    """Store the inputs of :func:`_within` of a chunk and head at this place. Squares are stored by columns."""
    i = tl.arange(0, CHUNK)
    own, square = place * (4 * CHUNK * CHUNK), i[None, :] * CHUNK + i[:, None]
    if DELTA:
        _store_split(squares + own, T, square, CHUNK * CHUNK)
    _store_split(squares + own + 2 * CHUNK * CHUNK, P, square, CHUNK * CHUNK)
    f = factors + place * (4 * CHUNK) + i
    tl.store(f, w_k)
    tl.store(f + CHUNK, w_q)
    tl.store(f + 2 * CHUNK, w_s)
    tl.store(f + 3 * CHUNK, tl.zeros([CHUNK], tl.float32) + whole)


@triton.jit
def _place_of(c, query_start, R, W, EXTRA: tl.constexpr, ROUND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Compute (row, number of the chunk in it, the row's first token in the pass) of the chunk at place c."""
    if ROUND:
        row = c // EXTRA
        chunk, begin = c % EXTRA, row * W
    else:
        r = tl.arange(0, BLOCK_R)
        bases = tl.load(query_start + r, mask=r < R, other=0) // CHUNK + EXTRA * r
        row = tl.sum(((bases <= c) & (r < R)).to(tl.int32), 0) - 1
        begin = tl.load(query_start + row)
        chunk = c - begin // CHUNK - EXTRA * row
    return row, chunk, begin


@overlapping(reads_early=True)
@triton.jit(do_not_specialize=["R"])
def _prepare_kernel(
    qkv, gates, kv_ring, gates_ring, squares, factors, rows, since, first, end, query_start, R, W,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, ROUND: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Prepare chunks; one program per (chunk, value head).

    EXTRA: chunks per row in a round; in a prompt pass see ``besides`` of the launch. In a round the ring is read before
    the kernel ahead has ended: see ``kernels/overlap.py``.
    """
    if not ROUND:
        follow(OVERLAP)
    c, h = tl.program_id(0), tl.program_id(1)
    row, chunk, begin = _place_of(c, query_start, R, W, EXTRA, ROUND, BLOCK_R)
    start, at, stop, slot = tl.load(since + row), tl.load(first + row), tl.load(end + row), tl.load(rows + row)
    start += chunk * CHUNK
    limit = at + W if ROUND else stop
    used = (at >= 0) & (start < limit)
    i, d = tl.arange(0, CHUNK), tl.arange(0, K)
    position, G = start + i, HV // HK
    old = used & (position < stop) & (position < at)
    kept = slot.to(tl.int64) * RING + position % RING
    q_new, k_new, _, k_ring, _ = _of_head(qkv, kv_ring, h, HK, HV, K, V)
    ring = k_ring + (kept * (HK * K + HV * V))[:, None] + d[None, :]
    k_old = tl.load(ring, mask=old[:, None], other=0.0)
    g_old, beta_old = _gate(gates_ring, kept, old, h, HV)
    if ROUND:
        follow(OVERLAP)
    if used:
        C: tl.constexpr = 2 * HK * K + HV * V
        fresh = (position >= at) & (position < stop)
        k = _tile(k_new, C, k_new, C, position, begin, at, stop, slot, d, RING, False)
        q = _tile(q_new, C, q_new, C, position, begin, at, stop, slot, d, RING, False)
        g, beta = _gate(gates, (begin + position - at).to(tl.int64), fresh, h, HV)
        k, g, beta = tl.where(old[:, None], k_old, k), tl.where(old, g_old, g), tl.where(old, beta_old, beta)
        if ROUND:  # the ring has room for the pass's tokens beside those that are read
            tl.store(ring, k, mask=fresh[:, None] & (h % G == 0))
            tl.store(gates_ring + kept * (2 * HV) + h, g, mask=fresh)
            tl.store(gates_ring + kept * (2 * HV) + HV + h, beta, mask=fresh)
        sums, sums_row = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for s in tl.static_range(CHUNK):
            term = tl.sum(tl.where(i == s, g, 0.0), 0)
            sums += tl.where(i >= s, term, 0.0)
            sums_row += tl.where(i >= s, term, 0.0)
        if DELTA:
            T, P, w_k, w_q, w_s, whole = _squares(k, q, sums, sums_row, beta, SCALE)
        else:
            T, P, w_k, w_q, w_s, whole = _weights(k, q, sums, sums_row, beta)
        _store_chunk(squares, factors, c.to(tl.int64) * HV + h, T, P, w_k, w_q, w_s, whole, DELTA)


# ---- the walk over a row's chunks -------------------------------------------------------------------


@triton.jit
def _reads(S, k, q, k_sum, q_sum, DELTA: tl.constexpr):
    """Add the products of half of S [V, n] with keys and queries [CHUNK, n] to the other half's [V, CHUNK]."""
    dtype: tl.constexpr = k.dtype
    k, q = tl.trans(k), tl.trans(q)
    zero = tl.zeros_like(k_sum)
    k_half = zero
    if not DELTA:
        q_half = _times(S, q, zero)
    elif dtype == tl.float32:
        k_half = tl.dot(S, k, zero, input_precision="ieee")
        q_half = tl.dot(S, q, zero, input_precision="ieee")
    else:
        high, low = _split(S, dtype)
        k_half = tl.dot(low, k, zero, input_precision="ieee")
        k_half = tl.dot(high, k, k_half, input_precision="ieee")
        q_half = tl.dot(low, q, zero, input_precision="ieee")
        q_half = tl.dot(high, q, q_half, input_precision="ieee")
    return tl.fma(k_half, zero + 1.0, k_sum), tl.fma(q_half, zero + 1.0, q_sum)


@triton.jit
def _within(k_sum, q_sum, v, squares, factors, skip, DELTA: tl.constexpr):
    """Compute one chunk: (outputs [V, CHUNK], update of the state by each token [V, CHUNK], decay of the state).

    k_sum, q_sum [V, CHUNK]: the keys' and queries' reads of the state. v [CHUNK, V]. squares, factors: outputs of
    :func:`_prepare_kernel`. skip: pointer to the head's factor of the values in the outputs, without DELTA.
    """
    i = tl.arange(0, CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    P_high, P_low = _load_split(squares + 2 * CHUNK * CHUNK, square, CHUNK * CHUNK)
    w_k, w_q = tl.load(factors + i)[None, :], tl.load(factors + CHUNK + i)[None, :]
    w_s, whole = tl.load(factors + 2 * CHUNK + i)[None, :], tl.load(factors + 3 * CHUNK)
    values = tl.trans(v).to(tl.float32)
    zero = tl.zeros_like(values)
    if DELTA:
        T_high, T_low = _load_split(squares, square, CHUNK * CHUNK)
        new = _times_split(tl.fma(k_sum, zero + w_k, values), T_high, T_low, zero)
    else:
        new = values * w_k
    out = _times_split(new, P_high, P_low, q_sum * w_q)
    if not DELTA:
        out = tl.fma(values, zero + tl.load(skip), out)
    return out, new * w_s, whole


@triton.jit
def _chunk(S, k, q, v, squares, factors, skip, DELTA: tl.constexpr):
    """Compute a chunk that begins with the state S [V, K]: see :func:`_within`."""
    K: tl.constexpr = k.shape[1]
    half = tl.arange(0, K)[None, :] // half_of(K)
    k_sum = tl.zeros([v.shape[1], CHUNK], tl.float32)
    q_sum = k_sum
    for n in tl.static_range(K // half_of(K)):  # zeros in the other half change no sum
        k_sum, q_sum = _reads(S, tl.where(half == n, k, 0.0), tl.where(half == n, q, 0.0), k_sum, q_sum, DELTA)
    return _within(k_sum, q_sum, v, squares, factors, skip, DELTA)


@triton.jit(do_not_specialize=["T", "R"])
def _walk_kernel(
    qkv, kv_ring, squares, factors, skip, state, out, rows, since, first, until, end, query_start, T, R, W,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, EXTRA: tl.constexpr,
    ROUND: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Walk all chunks of a row; one program per (tile of V, value head, row). The last row's zero a prompt pass's
    padding.
    """
    follow(OVERLAP)
    h, row = tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * HK * K + HV * V
    KV: tl.constexpr = HK * K + HV * V
    dv, d, i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, K), tl.arange(0, CHUNK)
    out += h * V + dv[None, :]
    if not DELTA:
        skip += h
    begin, at = row * W if ROUND else tl.load(query_start + row), tl.load(first + row)
    if not ROUND and row == R - 1:
        _blank(out, tl.load(query_start + R), T, HV * V, BLOCK_V)
    if at < 0:
        if ROUND:
            _blank(out, begin, begin + W, HV * V, BLOCK_V)
    else:
        slot, start, goal, stop = tl.load(rows + row), tl.load(since + row), tl.load(until + row), tl.load(end + row)
        limit = at + W if ROUND else stop
        chunks, keep = tl.cdiv(limit - start, CHUNK), (goal - start) // CHUNK
        base = (row * EXTRA if ROUND else begin // CHUNK + row * EXTRA).to(tl.int64) * HV + h
        squares += base * (4 * CHUNK * CHUNK)
        factors += base * (4 * CHUNK)
        home = state + (slot.to(tl.int64) * HV + h) * (V * K) + dv[:, None] * K + d[None, :]
        S = tl.load(home)
        q_new, k_new, v_new, k_old, v_old = _of_head(qkv, kv_ring, h, HK, HV, K, V)
        for ch in tl.range(0, chunks, num_stages=1):
            position = start + ch * CHUNK + i
            k = _tile(k_new, C, k_old, KV, position, begin, at, stop, slot, d, RING, True)
            v = _tile(v_new, C, v_old, KV, position, begin, at, stop, slot, dv, RING, True)
            q = _tile(q_new, C, q_new, C, position, begin, at, stop, slot, d, RING, False)
            place = ch * HV * (4 * CHUNK)
            o, taken, whole = _chunk(S, k, q, v, squares + place * CHUNK, factors + place, skip, DELTA)
            _put(out, v_old, o, v, position, begin, at, stop, limit, slot, dv, HV * V, KV, RING, ROUND)
            if (ch + 1 < chunks) | (ch + 1 == keep):
                S = _times(taken, k, S * whole)
            if ch + 1 == keep:
                tl.store(home, S)


@overlapping(reads_early=True)
@triton.jit
def _round_kernel(
    qkv, kv_ring, squares, factors, skip, state, out, rows, since, first, until, end, W,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Walk rounds of at most two chunks per row, as :func:`_walk_kernel`; the state is processed in halves of K.

    It is read again for the second chunk if the first closes, and written if the chunk's tokens are committed. Inputs
    that :func:`_prepare_kernel` does not write are read before it has ended
    (:data:`unisono.kernels.overlap.READ_EARLY`).
    """
    h, row = tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * HK * K + HV * V
    HALF: tl.constexpr = half_of(K)
    KV: tl.constexpr = HK * K + HV * V
    dv, d, i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, HALF), tl.arange(0, CHUNK)
    out += h * V + dv[None, :]
    if not DELTA:
        skip += h
    begin, at = row * W, tl.load(first + row)
    if at < 0:
        follow(OVERLAP)
        _blank(out, begin, begin + W, HV * V, BLOCK_V)
    else:
        slot, start, goal, stop = tl.load(rows + row), tl.load(since + row), tl.load(until + row), tl.load(end + row)
        limit, position = at + W, start + i
        squares += (row * 2 * HV + h).to(tl.int64) * (4 * CHUNK * CHUNK)
        factors += (row * 2 * HV + h).to(tl.int64) * (4 * CHUNK)
        home = state + (slot.to(tl.int64) * HV + h) * (V * K) + dv[:, None] * K + d[None, :]
        q_new, k_new, v_new, k_old, v_old = _of_head(qkv, kv_ring, h, HK, HV, K, V)
        v = _tile(v_new, C, v_old, KV, position, begin, at, stop, slot, dv, RING, True)
        k_sum = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        q_sum = k_sum
        for s in tl.static_range(0, K, HALF):
            k = _tile(k_new + s, C, k_old + s, KV, position, begin, at, stop, slot, d, RING, True)
            q = _tile(q_new + s, C, q_new, C, position, begin, at, stop, slot, d, RING, False)
            k_sum, q_sum = _reads(tl.load(home + s), k, q, k_sum, q_sum, DELTA)
        follow(OVERLAP)
        o, taken, whole = _within(k_sum, q_sum, v, squares, factors, skip, DELTA)
        _put(out, v_old, o, v, position, begin, at, stop, limit, slot, dv, HV * V, KV, RING, True)
        if (limit > start + CHUNK) | (goal > start):
            after = position + CHUNK
            k_sum = tl.zeros([BLOCK_V, CHUNK], tl.float32)
            q_sum = k_sum
            for s in tl.static_range(0, K, HALF):
                k = _tile(k_new + s, C, k_old + s, KV, position, begin, at, stop, slot, d, RING, True)
                S = _times(taken, k, tl.load(home + s) * whole)
                if goal > start:
                    tl.store(home + s, S)
                k = _tile(k_new + s, C, k_old + s, KV, after, begin, at, stop, slot, d, RING, True)
                q = _tile(q_new + s, C, q_new, C, after, begin, at, stop, slot, d, RING, False)
                k_sum, q_sum = _reads(S, k, q, k_sum, q_sum, DELTA)
            v = _tile(v_new, C, v_old, KV, after, begin, at, stop, slot, dv, RING, True)
            if limit > start + CHUNK:
                squares += HV * 4 * CHUNK * CHUNK
                o, taken, whole = _within(k_sum, q_sum, v, squares, factors + HV * 4 * CHUNK, skip, DELTA)
                _put(out, v_old, o, v, after, begin, at, stop, limit, slot, dv, HV * V, KV, RING, True)


@triton.jit
def _put(out, v_ring, o, v, position, begin, first, stop, limit, slot, dv, STRIDE: tl.constexpr, KV: tl.constexpr,
         RING: tl.constexpr, REMEMBER: tl.constexpr):  # fmt: skip
    """Store a chunk's outputs o [V, CHUNK] of tokens of the pass up to ``limit``, and their values in the ring."""
    token = (begin + position - first).to(tl.int64)[:, None] * STRIDE
    tl.store(
        out + token, tl.trans(o).to(out.dtype.element_ty), mask=((position >= first) & (position < limit))[:, None]
    )
    if REMEMBER:  # the ring has room for the pass's tokens beside those that are read
        kept = (slot.to(tl.int64) * RING + position % RING)[:, None] * KV
        tl.store(v_ring + kept + dv[None, :], v, mask=((position >= first) & (position < stop))[:, None])


@triton.jit
def _blank(out, begin, last, STRIDE: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store zeros as the outputs of padding tokens."""
    for t in range(begin, last, CHUNK):
        token = t + tl.arange(0, CHUNK)
        zeros = tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty)
        tl.store(out + token.to(tl.int64)[:, None] * STRIDE, zeros, mask=(token < last)[:, None])


@triton.jit
def _remember_chunk_kernel(
    qkv, gates, kv_ring, gates_ring, rows, first, until, end, query_start, QUERIES: tl.constexpr, KV: tl.constexpr,
    GATES: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store the tokens of a prompt pass's open chunk in the ring. The last programs of a row take the gates."""
    follow(OVERLAP)
    row = tl.program_id(0)
    at = tl.load(first + row)
    if at >= 0:
        position = tl.maximum(tl.load(until + row), at) + tl.arange(0, CHUNK)
        open_ = (position < tl.load(end + row))[:, None]
        token = (tl.load(query_start + row) + position - at).to(tl.int64)[:, None]
        kept = (tl.load(rows + row).to(tl.int64) * RING + position % RING)[:, None]
        x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        if tl.program_id(1) * BLOCK < KV:
            kv = tl.load(qkv + token * (QUERIES + KV) + QUERIES + x, mask=open_ & (x < KV), other=0.0)
            tl.store(kv_ring + kept * KV + x, kv, mask=open_ & (x < KV))
        else:
            y = x - (KV + BLOCK - 1) // BLOCK * BLOCK
            own = tl.load(gates + token * GATES + y, mask=open_ & (y < GATES), other=0.0)
            tl.store(gates_ring + kept * GATES + y, own, mask=open_ & (y < GATES))
