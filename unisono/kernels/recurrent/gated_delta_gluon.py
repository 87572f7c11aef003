"""Walk of the gated delta rule, or of Mamba2, over prompts: the bits of ``gated_delta_triton._walk_kernel``, faster.

Chunks are sequential, so their latency bounds a prompt, and few programs run: 256 for one prompt of a layer with 32
heads. Two warps share a program here. Each holds half of the state's columns, reads it with its half of a chunk's keys
and queries, and passes its sums to the other one through shared memory, which Triton cannot express. The inputs of the
next chunks are prefetched. Launched by ``kernels/recurrent/gated_delta.py``.

Without DELTA it computes Mamba2: see ``gated_delta_triton``. Shapes: as there. A program has 16 elements of V.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.overlap import overlapping
from unisono.kernels.recurrent.gated_delta_cpu import CHUNK as CHUNK_TOKENS

CHUNK = gl.constexpr(CHUNK_TOKENS)
SIZE = gl.constexpr(16)
"""Elements of V of a program: the rows of a product on a tensor core."""

WARPS = gl.constexpr(2)
STAGES = gl.constexpr(3)
"""Chunks whose inputs are in shared memory at once. 2 to 6 take the same time for one prompt; for eight 6 take
longer.
"""

SQUARE = gl.constexpr(CHUNK_TOKENS**2)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1, 1], [1, 16, 8]))
"""Layout of the state and of its sums [WARPS, SIZE, n]: a half for each warp."""

BOTH = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1], [16, 8]))
"""Layout of the values that both warps compute [SIZE, CHUNK]."""

APART = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 2], [16, 8]))
"""Layout of the outputs [SIZE, CHUNK]: half of the tokens for each warp."""


def walks(qkv: torch.Tensor, key_dim: int) -> bool:
    """Return True if the kernel serves keys of this size: a product takes at least 16 of a half's columns."""
    return qkv.is_cuda and qkv.dtype.itemsize == 2 and key_dim >= 16 * WARPS.value


@gluon.jit
def _split(x, dtype: gl.constexpr):
    """Split x into two terms, as ``gated_delta_triton._split``."""
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@gluon.jit
def _times_split(x, y_high, y_low, acc, layout: gl.constexpr, dtype: gl.constexpr):
    """Compute acc + x (y_high + y_low) in acc's layout, as ``gated_delta_triton._times_split``."""
    high, low = _split(x, dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    high, low = gl.convert_layout(high, operand), gl.convert_layout(low, operand)
    acc = mma_v2(low, y_high, acc)
    acc = mma_v2(high, y_low, acc)
    return mma_v2(high, y_high, acc)


@gluon.jit
def _added(sums, layout: gl.constexpr):
    """Add the sums [SIZE, CHUNK] of both halves."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = sums._reinterpret(gl.float32, [WARPS * SIZE, CHUNK], flat)
    return sums.slice(0, SIZE).load(layout) + sums.slice(SIZE, SIZE).load(layout)


@gluon.jit
def _fetch_rows(place, new, old, at, token, column, begin, first, stop, slot, C: gl.constexpr, KV: gl.constexpr,
                RING: gl.constexpr, WHOLE: gl.constexpr, OLD: gl.constexpr):  # fmt: skip
    """Start to copy elements ``column`` of the tokens from position ``at`` on, as ``gated_delta_triton._tile`` does.

    WHOLE: all positions are tokens of the pass.
    """
    source = new + (begin + at - first).to(gl.int64) * C
    position = at + token
    if WHOLE:
        async_copy.async_copy_global_to_shared(place, source + (token * C + column))
    elif OLD:
        kept = old + ((slot.to(gl.int64) * RING + position % RING) * KV + column)
        source = gl.where(position < first, kept, source + (token * C + column))
        async_copy.async_copy_global_to_shared(place, source, mask=position < stop)
    else:
        there = (position >= first) & (position < stop)
        async_copy.async_copy_global_to_shared(place, source + (token * C + column), mask=there)


@gluon.jit
def _fetch(ch, stage, inputs, where, qkv, kv_ring, squares, factors, h, dv, HK: gl.constexpr, HV: gl.constexpr,
           K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr, DELTA: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """Start to copy a chunk's inputs to its stage of ``inputs``, in shared memory. WHOLE: see :func:`_fetch_rows`.

    where: (first token of the row in the pass, position of the state, position of the first token, end position, row of
    the state). squares, factors: those of the row's first chunk.
    """
    k, q, v, square, factor = inputs
    begin, start, first, stop, slot = where
    C: gl.constexpr = 2 * HK * K + HV * V
    KV: gl.constexpr = HK * K + HV * V
    HALF: gl.constexpr = K // WARPS
    rows: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HALF, HALF // 8], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    half = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    token = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    d += h // (HV // HK) * K
    v_token = gl.arange(0, CHUNK, gl.SliceLayout(1, flat))[:, None]
    x = h * V + dv + gl.arange(0, SIZE, gl.SliceLayout(0, flat))[None, :]
    keys, values, v_ring = qkv + HK * K, qkv + 2 * HK * K, kv_ring + HK * K
    k, q, v = k.index(stage), q.index(stage), v.index(stage)
    at = start + ch * CHUNK
    _fetch_rows(k, keys, kv_ring, at, token, d, begin, first, stop, slot, C, KV, RING, WHOLE, True)
    _fetch_rows(q, qkv, qkv, at, token, d, begin, first, stop, slot, C, KV, RING, WHOLE, False)
    _fetch_rows(v, values, v_ring, at, v_token, x, begin, first, stop, slot, C, KV, RING, WHOLE, True)
    FIRST: gl.constexpr = 0 if DELTA else 2 * CHUNK  # without DELTA there is no T
    i = FIRST + gl.arange(0, 4 * CHUNK - FIRST, gl.SliceLayout(1, flat))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, flat))[None, :]
    place = gl.to_tensor(ch).to(gl.int64) * (HV * 4 * CHUNK)
    square = square.index(stage).slice(FIRST, 4 * CHUNK - FIRST)
    async_copy.async_copy_global_to_shared(square, squares + place * CHUNK + (i * CHUNK + j))
    async_copy.async_copy_global_to_shared(factor.index(stage), factors + place + gl.arange(0, 4 * CHUNK, line))
    async_copy.commit_group()


@gluon.jit
def _step(S, stage, inputs, k_sums, q_sums, skip, dtype: gl.constexpr, DELTA: gl.constexpr):
    """Compute one chunk from S [WARPS, SIZE, HALF], as ``gated_delta_triton._chunk``: (new state, outputs [SIZE,
    CHUNK]). skip: the head's factor of the values in the outputs, without DELTA.
    """
    k, q, v, square, factor = inputs
    state: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    keys: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    zero = gl.zeros([WARPS, SIZE, CHUNK], gl.float32, SUMS)
    k_columns = k.index(stage).permute([0, 2, 1]).load(keys)
    q_columns = q.index(stage).permute([0, 2, 1]).load(keys)
    high, low = _split(S, dtype)
    high, low = gl.convert_layout(high, state), gl.convert_layout(low, state)
    if DELTA:
        k_sums.store(mma_v2(high, k_columns, mma_v2(low, k_columns, zero)))
    q_sums.store(mma_v2(high, q_columns, mma_v2(low, q_columns, zero)))
    square, factor = square.index(stage), factor.index(stage)
    to_out: gl.constexpr = gl.DotOperandLayout(1, APART, 2)
    P_high, P_low = square.slice(2 * CHUNK, CHUNK).load(to_out), square.slice(3 * CHUNK, CHUNK).load(to_out)
    w_k = factor.slice(0, CHUNK).load(gl.SliceLayout(0, BOTH))
    w_q = factor.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, APART))
    w_s = factor.slice(2 * CHUNK, CHUNK).load(gl.SliceLayout(0, BOTH))
    whole = factor.slice(3 * CHUNK, 1).load(gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    values = v.index(stage).permute([1, 0]).load(BOTH).to(gl.float32)
    k_rows = k.index(stage).load(keys)
    S = S * whole[:, None, None]
    if DELTA:
        to_new: gl.constexpr = gl.DotOperandLayout(1, BOTH, 2)
        T_high, T_low = square.slice(0, CHUNK).load(to_new), square.slice(CHUNK, CHUNK).load(to_new)
        k_sum, w_k = gl.broadcast(_added(k_sums, BOTH), w_k[None, :])
        none = gl.zeros([SIZE, CHUNK], gl.float32, BOTH)
        new = _times_split(gl.fma(k_sum, w_k, values), T_high, T_low, none, BOTH, dtype)
    else:
        new = values * w_k[None, :]
    high, low = _split(new * w_s[None, :], dtype)
    each: gl.constexpr = gl.SliceLayout(0, state)
    room = gl.zeros([WARPS, SIZE, CHUNK], dtype, state)
    high, room = gl.broadcast(gl.convert_layout(high, each)[None, :, :], room)
    low, room = gl.broadcast(gl.convert_layout(low, each)[None, :, :], room)
    S = mma_v2(high, k_rows, mma_v2(low, k_rows, S))
    q_sum = _added(q_sums, APART)
    o = _times_split(new, P_high, P_low, q_sum * w_q[None, :], APART, dtype)
    if not DELTA:
        values = v.index(stage).permute([1, 0]).load(APART).to(gl.float32)
        o = gl.fma(values, gl.zeros([SIZE, CHUNK], gl.float32, APART) + skip, o)
    return S, o


@gluon.jit
def _put(outputs, o, ch, position, first, stop, STRIDE: gl.constexpr):
    """Store a chunk's outputs [SIZE, CHUNK] of tokens of the pass. outputs: pointer to those of the first chunk."""
    place = gl.to_tensor(ch).to(gl.int64) * (CHUNK * STRIDE)
    gl.store(outputs + place, o.to(outputs.dtype.element_ty), mask=(position >= first) & (position < stop))


@gluon.jit
def _rooms(dtype: gl.constexpr, HALF: gl.constexpr):
    """Allocate (inputs of each stage's chunk, sums of reads by keys, by queries) in shared memory."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // HALF, HALF // 8, [2, 1, 0])
    narrow: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    k = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    q = gl.allocate_shared_memory(dtype, [STAGES, WARPS, CHUNK, HALF], swizzled)
    v = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, SIZE], narrow)
    square = gl.allocate_shared_memory(dtype, [STAGES, 4 * CHUNK, CHUNK], narrow)
    factor = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_sums = gl.allocate_shared_memory(gl.float32, [WARPS, SIZE, CHUNK], plain)
    q_sums = gl.allocate_shared_memory(gl.float32, [WARPS, SIZE, CHUNK], plain)
    return (k, q, v, square, factor), k_sums, q_sums


@gluon.jit
def _walk(S, home, keep, where, token, outputs, qkv, kv_ring, squares, factors, skip, h, dv, dtype: gl.constexpr,
          HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr,
          DELTA: gl.constexpr):  # fmt: skip
    """Walk all chunks of a row from the state S on, which is stored at ``home`` after ``keep`` of them.

    where, squares, factors: see :func:`_fetch`. skip: see :func:`_step`. outputs [SIZE, CHUNK]: pointers to those of
    the first chunk; token [1, CHUNK]: its tokens.
    """
    inputs, k_sums, q_sums = _rooms(dtype, K // WARPS)
    _, start, at, stop, _ = where
    chunks = (stop - start + CHUNK - 1) // CHUNK
    for early in gl.static_range(STAGES):
        _fetch(gl.minimum(early, chunks - 1), early, inputs, where, qkv, kv_ring, squares, factors, h, dv,
               HK, HV, K, V, RING, DELTA, False)  # fmt: skip
    # The first loop has no branch: it fetches whole chunks of the pass only and stores no state.
    smooth = gl.minimum((stop - start) // CHUNK - STAGES, keep - 1)
    smooth = gl.where(at - start > STAGES * CHUNK, 0, gl.maximum(smooth, 0))
    stage = smooth * 0
    for ch in range(smooth):
        async_copy.wait_group(STAGES - 1)
        S, o = _step(S, stage, inputs, k_sums, q_sums, skip, dtype, DELTA)
        _put(outputs, o, ch, start + ch * CHUNK + token, at, stop, HV * V)
        _fetch(ch + STAGES, stage, inputs, where, qkv, kv_ring, squares, factors, h, dv, HK, HV, K, V, RING, DELTA,
               True)  # fmt: skip
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    for ch in range(smooth, chunks):
        async_copy.wait_group(STAGES - 1)
        S, o = _step(S, stage, inputs, k_sums, q_sums, skip, dtype, DELTA)
        _put(outputs, o, ch, start + ch * CHUNK + token, at, stop, HV * V)
        if ch + 1 == keep:
            gl.store(home, S)
        _fetch(gl.minimum(ch + STAGES, chunks - 1), stage, inputs, where, qkv, kv_ring, squares, factors, h, dv,
               HK, HV, K, V, RING, DELTA, False)  # fmt: skip
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)


@overlapping(beside=True)
@gluon.jit(do_not_specialize=["T", "R"])
def walk_kernel(qkv, kv_ring, squares, factors, skip, state, out, rows, since, first, until, end, query_start, T, R,
                HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RING: gl.constexpr,
                EXTRA: gl.constexpr, OTHERS: gl.constexpr, DELTA: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Walk all chunks of a prompt's row; one program per (tile of V, value head, row). Those of the last row zero the
    padding.

    OTHERS: the launch has all rows but row 0, which has its own launch: two of its 256 programs then share a
    multiprocessor. In a larger grid the hardware places three on some, which take 1.4 times as long. With OVERLAP the
    launch of the other rows runs beside it: neither reads the other's outputs. It ends after it, since the last row's
    programs wait.

    Row 0's launch does not overlap the kernel before it: while the last programs of that kernel run, only some
    multiprocessors have room, and they would get all of the few programs that walk. One prompt took 1.3 times as long.
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
    outputs = out + h * V + dv + (i + token * (HV * V))
    begin, at = gl.load(query_start + row), gl.load(first + row)
    if at >= 0:
        slot, start = gl.load(rows + row), gl.load(since + row)
        goal, stop = gl.load(until + row), gl.load(end + row)
        if stop > start:
            base = (begin // CHUNK + row * EXTRA).to(gl.int64) * HV + h
            of_row = outputs + (begin + start - at).to(gl.int64) * (HV * V)
            half = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
            x = dv + gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
            d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
            home = state + (slot.to(gl.int64) * HV + h) * (V * K) + (x * K + d)
            of_head = 0.0
            if not DELTA:
                of_head = gl.load(skip + h)
            _walk(gl.load(home), home, (goal - start) // CHUNK, (begin, start, at, stop, slot), token, of_row, qkv,
                  kv_ring, squares + base * (4 * SQUARE), factors + base * (4 * CHUNK), of_head, h, dv, dtype,
                  HK, HV, K, V, RING, DELTA)  # fmt: skip
    if row == R - 1:
        for t in range(gl.load(query_start + R), T, CHUNK):
            place = gl.to_tensor(t).to(gl.int64) * (HV * V)
            gl.store(outputs + place, gl.zeros([SIZE, CHUNK], dtype, APART), mask=t + token < T)
        if OVERLAP and OTHERS:
            gdc_wait()
