"""The state-independent part of Kimi Delta Attention's chunks. Launched by ``kernels/recurrent/kimi_delta.py``.

Token i of a chunk reads token j <= i with a decay of its own for each channel: the product of the decays of the tokens
after j, up to i. A loop over j, from the chunk's last token to its first, multiplies these products up for all i at
once. No product exceeds 1, no decay is divided by another one, and one that underflows is zero as it should be. The
same loop yields the decays from the chunk's begin and to its end. Keys and queries are normalised here.

The bits of a chunk must not depend on whether a prompt or a round computes it. So the layouts, which are the orders of
sums, are written out, and no product is fused into a sum (:func:`product`).

Shapes: T tokens, R rows, H heads, K / V key / value sizes, W tokens per row of a round, RING positions that a row
remembers.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from unisono.kernels.overlap import follow
from unisono.kernels.recurrent.gated_delta_cpu import EPS as LENGTH_EPS
from unisono.kernels.recurrent.gated_delta_gluon import CHUNK, SQUARE, _split

EPS = gl.constexpr(LENGTH_EPS)
PREPARE_WARPS = gl.constexpr(4)

COLUMNS = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, 4], [0, 1]))
"""Layout of a square [CHUNK, CHUNK]: a column for each thread, the same in each warp."""


@gluon.jit
def product(x, y):
    """Compute x y, which no compiler fuses into a sum."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _place_of(c, query_start, R, W, EXTRA: gl.constexpr, ROUND: gl.constexpr, BLOCK_R: gl.constexpr):
    """Compute (row, number of the chunk in it, the row's first token in the pass) of the chunk at place c."""
    if ROUND:
        row = c // EXTRA
        chunk, begin = c % EXTRA, row * W
    else:
        r = gl.arange(0, BLOCK_R, gl.BlockedLayout([1], [32], [PREPARE_WARPS], [0]))
        bases = gl.load(query_start + r, mask=r < R, other=0) // CHUNK + EXTRA * r
        row = gl.sum(((bases <= c) & (r < R)).to(gl.int32), 0) - 1
        begin = gl.load(query_start + row)
        chunk = c - begin // CHUNK - EXTRA * row
    return row, chunk, begin


@gluon.jit
def _inputs(new, old, position, column, where, C: gl.constexpr, KEPT: gl.constexpr, RING: gl.constexpr,
            OLD: gl.constexpr):  # fmt: skip
    """Load elements ``column`` of the tokens at ``position``, from the pass or, if OLD, from the ring; others are zero.

    where: (first token of the row in the pass, its position, end position, row of the state). C, KEPT: elements of a
    token in the pass and in the ring.
    """
    begin, at, stop, slot = where
    there = position < stop
    source = new + ((begin + position - at).to(gl.int64) * C + column)
    if OLD:
        kept = old + ((slot.to(gl.int64) * RING + position % RING) * KEPT + column)
        source = gl.where(position < at, kept, source)
    else:
        there = there & (position >= at)
    return gl.load(source, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def _normalised(x, FACTOR: gl.constexpr):
    """Divide each row of x [CHUNK, K] by its length, and multiply it by FACTOR."""
    return x * (gl.rsqrt(gl.sum(product(x, x), 1) + EPS) * FACTOR)[:, None]


@gluon.jit
def _decayed_products(k, q, decay, beta, i, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Compute (products of keys times beta, products of queries and keys, decays from the begin, decays to the end).

    k, q, decay [CHUNK, K]; beta, i [CHUNK]: the tokens' numbers. The products are squares in shared memory, by columns:
    those of i with j < i, of i with j <= i.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.float32, [1, CHUNK, K], plain).index(0)
    decays = gl.allocate_shared_memory(gl.float32, [1, CHUNK, K], plain).index(0)
    below = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], line)
    attend = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], line)
    keys.store(k)
    decays.store(decay)
    keys = keys._reinterpret(gl.float32, [CHUNK, K], line)
    decays = decays._reinterpret(gl.float32, [CHUNK, K], line)
    left = gl.full([CHUNK, K], 1.0, gl.float32, LAYOUT)
    to_end = left
    for step in range(CHUNK):
        j = CHUNK - 1 - step
        own = (i == j)[:, None]
        to_end = gl.where(own, left, to_end)
        left = gl.where(own, 1.0, left)
        key = left * keys.index(j).load(gl.SliceLayout(0, LAYOUT))[None, :]
        below.index(j).store(gl.where(i > j, gl.sum(product(k, key), 1) * beta, 0.0))
        attend.index(j).store(gl.where(i >= j, gl.sum(product(q, key), 1), 0.0))
        left = left * decays.index(j).load(gl.SliceLayout(0, LAYOUT))[None, :]
    return below, attend, left, to_end


@gluon.jit
def _solved(below):
    """Compute (1 + below)^-1 [CHUNK, CHUNK] for a lower triangle without its diagonal, by columns in shared memory."""
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, COLUMNS))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, COLUMNS))[None, :]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, COLUMNS)
    T = gl.where(i == j, zero + 1.0, zero)
    for s in gl.static_range(CHUNK - 1):
        row = gl.sum(gl.where(i == s, T, zero), 0)
        column = below.index(s).load(gl.SliceLayout(1, COLUMNS))
        T = gl.fma(zero - column[:, None], zero + row[None, :], T)
    return T


@gluon.jit
def _store_terms(pointer, x, at, STEP: gl.constexpr):
    """Store x at ``at`` in two terms, the second one STEP elements after the first; in fp32 as it is."""
    dtype: gl.constexpr = pointer.dtype.element_ty
    if dtype == gl.float32:
        gl.store(pointer + at, x)
    else:
        high, low = _split(x, dtype)
        gl.store(pointer + at, high)
        gl.store(pointer + STEP + at, low)


@gluon.jit(do_not_specialize=["R"])
def kimi_prepare_kernel(
    qkv, gates, kv_ring, gates_ring, squares, factors, decayed, ends, rows, since, first, end, query_start, R, W,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr, SCALE: gl.constexpr, EXTRA: gl.constexpr,
    ROUND: gl.constexpr, BLOCK_R: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Prepare chunks; one program per (chunk, head). In a round it also stores the tokens' inputs in the rings.

    decayed [places, H, 3, 2, CHUNK, K]: keys and queries times the decay from the chunk's begin, keys times the decay
    to its end, each in two terms (in fp32 one). ends [places, H, K]: decay of the state. EXTRA: see ``besides`` of
    :meth:`unisono.kernels.recurrent.gated_delta.Sizes.chunks`.
    """
    follow(OVERLAP)
    c, h = gl.program_id(0), gl.program_id(1)
    row, chunk, begin = _place_of(c, query_start, R, W, EXTRA, ROUND, BLOCK_R)
    start = gl.load(since + row) + chunk * CHUNK
    at, stop, slot = gl.load(first + row), gl.load(end + row), gl.load(rows + row)
    limit = stop
    if ROUND:
        limit = at + W
    if (at >= 0) & (start < limit):
        C: gl.constexpr = (2 * K + V) * H
        KV: gl.constexpr = (K + V) * H
        G: gl.constexpr = H * (K + 1)
        TERMS: gl.constexpr = 1 if qkv.dtype.element_ty == gl.float32 else 2
        LANES: gl.constexpr = 8 if K > 16 else 4
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [PREPARE_WARPS, 1], [1, 0])
        i = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        d = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
        position, where = start + i, (begin, at, stop, slot)
        token = position[:, None]
        k = _inputs(qkv + (H + h) * K, kv_ring + h * K, token, d, where, C, KV, RING, True)
        q = _inputs(qkv + h * K, qkv, token, d, where, C, C, RING, False)
        g = _inputs(gates + h * K, gates_ring + h * K, token, d, where, G, G, RING, True)
        beta = _inputs(gates + H * K + h, gates_ring + H * K + h, position, 0, where, G, G, RING, True)
        if ROUND:  # the ring has room for the pass's tokens beside those that are read
            fresh, kept = (position >= at) & (position < stop), slot.to(gl.int64) * RING + position % RING
            own = fresh[:, None]
            gl.store(kv_ring + h * K + (kept[:, None] * KV + d), k.to(kv_ring.dtype.element_ty), mask=own)
            gl.store(gates_ring + h * K + (kept[:, None] * G + d), g, mask=own)
            gl.store(gates_ring + H * K + h + kept * G, beta, mask=fresh)
        k, q, decay = _normalised(k, 1.0), _normalised(q, SCALE), gl.exp(g)
        below, attend, from_begin, to_end = _decayed_products(k, q, decay, beta, i, K, layout)
        place, tile = gl.to_tensor(c).to(gl.int64) * H + h, i[:, None] * K + d
        own = decayed + place * (3 * TERMS * CHUNK * K)
        _store_terms(own, k * from_begin, tile, CHUNK * K)
        _store_terms(own + TERMS * CHUNK * K, q * from_begin, tile, CHUNK * K)
        _store_terms(own + 2 * TERMS * CHUNK * K, k * to_end, tile, CHUNK * K)
        gl.store(ends + place * K + (tile - (CHUNK - 1) * K), from_begin, mask=(i == CHUNK - 1)[:, None])
        _store_squares(squares + place * (4 * SQUARE), factors + place * (4 * CHUNK), below, attend, beta)


@gluon.jit
def _store_squares(squares, factors, below, attend, beta):
    """Store a chunk's T times beta and P by columns, in terms, and the factors of ``gated_delta_triton._within``."""
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, COLUMNS))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, COLUMNS))[None, :]
    beta = gl.convert_layout(beta, gl.SliceLayout(0, COLUMNS))
    _store_terms(squares, _solved(below) * beta[None, :], j * CHUNK + i, SQUARE)
    by_column = attend._reinterpret(gl.float32, [CHUNK, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    P = by_column.permute([1, 0]).load(COLUMNS)
    _store_terms(squares + 2 * SQUARE, P, j * CHUNK + i, SQUARE)
    n = gl.arange(0, 4 * CHUNK, gl.BlockedLayout([1], [32], [PREPARE_WARPS], [0]))
    gl.store(factors + n, gl.where(n < CHUNK, -1.0, 1.0))
