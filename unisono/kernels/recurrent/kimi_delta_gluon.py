"""Walk of Kimi Delta Attention over prompts: the bits of ``kimi_delta_triton._kimi_walk_kernel``, faster.

It is the walk of ``gated_delta_gluon`` with a decay for each channel of a key: two warps share a program, each with
half of the state's columns, and the inputs of the next chunks are prefetched. Keys and queries come with their decays
from ``kimi_delta_prepare``, in two terms. Launched by ``kernels/recurrent/kimi_delta.py``.

Shapes: as in ``kimi_delta_triton``. A program has 16 elements of V.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.overlap import overlapping
from unisono.kernels.recurrent.gated_delta_gluon import (
    APART,
    BOTH,
    CHUNK,
    SIZE,
    STAGES,
    SUMS,
    WARPS,
    _added,
    _fetch_rows,
    _put,
    _split,
    _times_split,
)

TILES = gl.constexpr(6)
"""Keys, queries and added keys of a chunk, two terms each."""


@gluon.jit
def _fetch(ch, stage, inputs, where, qkv, kv_ring, squares, factors, decayed, ends, h, dv, H: gl.constexpr,
           K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Start to copy a chunk's inputs to its stage of ``inputs``, in shared memory.

    where: (first token of the row in the pass, position of the state, position of the first token, end position, row of
    the state). squares … ends: those of the row's first chunk.
    """
    tiles, v, square, factor, whole = inputs
    begin, start, first, stop, slot = where
    HALF: gl.constexpr = K // WARPS
    rows: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HALF, HALF // 8], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    halves: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    place = gl.to_tensor(ch).to(gl.int64) * H
    half = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    token = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    own = decayed + place * (TILES * CHUNK * K) + (token * K + d)
    for tile in gl.static_range(TILES):
        async_copy.async_copy_global_to_shared(tiles[tile].index(stage), own + tile * (CHUNK * K))
    v_token = gl.arange(0, CHUNK, gl.SliceLayout(1, flat))[:, None]
    x = h * V + dv + gl.arange(0, SIZE, gl.SliceLayout(0, flat))[None, :]
    values, v_ring = qkv + 2 * H * K, kv_ring + H * K
    _fetch_rows(v.index(stage), values, v_ring, start + ch * CHUNK, v_token, x, begin, first, stop, slot,
                (2 * K + V) * H, (K + V) * H, RING, False, True)  # fmt: skip
    i = gl.arange(0, 4 * CHUNK, gl.SliceLayout(1, flat))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, flat))[None, :]
    four = place * (4 * CHUNK)
    async_copy.async_copy_global_to_shared(square.index(stage), squares + four * CHUNK + (i * CHUNK + j))
    async_copy.async_copy_global_to_shared(factor.index(stage), factors + four + gl.arange(0, 4 * CHUNK, line))
    n = gl.arange(0, WARPS, gl.SliceLayout(1, halves))[:, None] * HALF
    n = n + gl.arange(0, HALF, gl.SliceLayout(0, halves))[None, :]
    async_copy.async_copy_global_to_shared(whole.index(stage), ends + place * K + n)
    async_copy.commit_group()


@gluon.jit
def _read(high, low, y_high, y_low):
    """Compute the sums [WARPS, SIZE, CHUNK] of the state's two terms with the two terms of keys or queries."""
    keys: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    y_high, y_low = y_high.permute([0, 2, 1]).load(keys), y_low.permute([0, 2, 1]).load(keys)
    sums = mma_v2(low, y_high, gl.zeros([WARPS, SIZE, CHUNK], gl.float32, SUMS))
    return mma_v2(high, y_high, mma_v2(high, y_low, sums))


@gluon.jit
def _step(S, stage, inputs, k_sums, q_sums, dtype: gl.constexpr):
    """Compute one chunk from S [WARPS, SIZE, HALF]: (new state, outputs [SIZE, CHUNK])."""
    tiles, v, square, factor, whole = inputs
    state: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    keys: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    high, low = _split(S, dtype)
    high, low = gl.convert_layout(high, state), gl.convert_layout(low, state)
    k_sums.store(_read(high, low, tiles[0].index(stage), tiles[1].index(stage)))
    q_sums.store(_read(high, low, tiles[2].index(stage), tiles[3].index(stage)))
    square, factor = square.index(stage), factor.index(stage)
    to_new: gl.constexpr = gl.DotOperandLayout(1, BOTH, 2)
    to_out: gl.constexpr = gl.DotOperandLayout(1, APART, 2)
    T_high, T_low = square.slice(0, CHUNK).load(to_new), square.slice(CHUNK, CHUNK).load(to_new)
    P_high, P_low = square.slice(2 * CHUNK, CHUNK).load(to_out), square.slice(3 * CHUNK, CHUNK).load(to_out)
    w_k = factor.slice(0, CHUNK).load(gl.SliceLayout(0, BOTH))
    w_q = factor.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, APART))
    w_s = factor.slice(2 * CHUNK, CHUNK).load(gl.SliceLayout(0, BOTH))
    left = whole.index(stage).load(gl.SliceLayout(1, SUMS))
    values = v.index(stage).permute([1, 0]).load(BOTH).to(gl.float32)
    y_high, y_low = tiles[4].index(stage).load(keys), tiles[5].index(stage).load(keys)
    S = S * left[:, None, :]
    k_sum, w_k = gl.broadcast(_added(k_sums, BOTH), w_k[None, :])
    none = gl.zeros([SIZE, CHUNK], gl.float32, BOTH)
    new = _times_split(gl.fma(k_sum, w_k, values), T_high, T_low, none, BOTH, dtype)
    high, low = _split(new * w_s[None, :], dtype)
    each: gl.constexpr = gl.SliceLayout(0, state)
    room = gl.zeros([WARPS, SIZE, CHUNK], dtype, state)
    high, room = gl.broadcast(gl.convert_layout(high, each)[None, :, :], room)
    low, room = gl.broadcast(gl.convert_layout(low, each)[None, :, :], room)
    S = mma_v2(high, y_high, mma_v2(high, y_low, mma_v2(low, y_high, S)))
    q_sum = _added(q_sums, APART)
    return S, _times_split(new, P_high, P_low, q_sum * w_q[None, :], APART, dtype)


@gluon.jit
def _rooms(dtype: gl.constexpr, HALF: gl.constexpr):
    """Allocate (inputs of each stage's chunk, sums of reads by keys, by queries) in shared memory."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // HALF, HALF // 8, [2, 1, 0])
    narrow: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    straight: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_high = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    k_low = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    q_high = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    q_low = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    add_high = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    add_low = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    v = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, SIZE], narrow)
    square = gl.allocate_shared_memory(dtype, [STAGES, 4 * CHUNK, CHUNK], narrow)
    factor = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    whole = gl.allocate_shared_memory(gl.float32, [STAGES, WARPS, HALF], straight)
    k_sums = gl.allocate_shared_memory(gl.float32, [WARPS, SIZE, CHUNK], plain)
    q_sums = gl.allocate_shared_memory(gl.float32, [WARPS, SIZE, CHUNK], plain)
    tiles = k_high, k_low, q_high, q_low, add_high, add_low
    return (tiles, v, square, factor, whole), k_sums, q_sums


@overlapping(beside=True)
@gluon.jit(do_not_specialize=["T", "R"])
def kimi_walk_kernel(qkv, kv_ring, squares, factors, decayed, ends, state, out, rows, since, first, until, end,
                     query_start, T, R, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr,
                     EXTRA: gl.constexpr, OTHERS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Walk all chunks of a prompt's row; one program per (tile of V, head, row). Those of the last row zero the
    padding.

    OTHERS, OVERLAP: see :func:`unisono.kernels.recurrent.gated_delta_gluon.walk_kernel`.
    """
    if OVERLAP and not OTHERS:
        gdc_launch_dependents()
    h, row, dv = gl.program_id(1), gl.program_id(2), gl.program_id(0) * SIZE
    if OTHERS:
        row += 1
    HALF: gl.constexpr = K // WARPS
    dtype: gl.constexpr = qkv.dtype.element_ty
    i = gl.arange(0, SIZE, gl.SliceLayout(1, APART))[:, None]
    token = gl.arange(0, CHUNK, gl.SliceLayout(0, APART))[None, :]
    outputs = out + h * V + dv + (i + token * (H * V))
    begin, at = gl.load(query_start + row), gl.load(first + row)
    if at >= 0:
        slot, start = gl.load(rows + row), gl.load(since + row)
        goal, stop = gl.load(until + row), gl.load(end + row)
        if stop > start:
            place = (begin // CHUNK + row * EXTRA).to(gl.int64) * H + h
            squares += place * (4 * CHUNK * CHUNK)
            factors += place * (4 * CHUNK)
            decayed += place * (TILES * CHUNK * K)
            ends += place * K
            of_row = outputs + (begin + start - at).to(gl.int64) * (H * V)
            half = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
            x = dv + gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
            d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
            home = state + (slot.to(gl.int64) * H + h) * (V * K) + (x * K + d)
            inputs, k_sums, q_sums = _rooms(dtype, HALF)
            chunks, keep, stage = (stop - start + CHUNK - 1) // CHUNK, (goal - start) // CHUNK, slot * 0
            where = begin, start, at, stop, slot
            for early in gl.static_range(STAGES):
                _fetch(gl.minimum(early, chunks - 1), early, inputs, where, qkv, kv_ring, squares, factors, decayed,
                       ends, h, dv, H, K, V, RING)  # fmt: skip
            S = gl.load(home)
            for ch in range(chunks):
                async_copy.wait_group(STAGES - 1)
                S, o = _step(S, stage, inputs, k_sums, q_sums, dtype)
                _put(of_row, o, ch, start + ch * CHUNK + token, at, stop, H * V)
                if ch + 1 == keep:
                    gl.store(home, S)
                _fetch(gl.minimum(ch + STAGES, chunks - 1), stage, inputs, where, qkv, kv_ring, squares, factors,
                       decayed, ends, h, dv, H, K, V, RING)  # fmt: skip
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            async_copy.wait_group(0)
    if row == R - 1:
        for t in range(gl.load(query_start + R), T, CHUNK):
            place = gl.to_tensor(t).to(gl.int64) * (H * V)
            gl.store(outputs + place, gl.zeros([SIZE, CHUNK], dtype, APART), mask=t + token < T)
        if OVERLAP and OTHERS:
            gdc_wait()
