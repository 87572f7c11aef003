"""Attention of few rows on Hopper, as in rounds: the bits of ``triton_kernels``, faster.

A round's query tile has a few rows: the tokens of a request times the query heads that share a KV head. The tensor
core's left operand has 64 rows or more, so keys and values take that side: scores are ``K Q^T`` [keys, rows], outputs
``V^T P`` [D, rows]. No absent rows are multiplied, keys and values go from shared memory to the tensor core without
passing through registers, and one warp per page of a step loads them with the tensor memory accelerator, ahead of the
group that computes and on into the next item of the work list.

Every sum has the order of ``triton_kernels._walk``: steps of 64 keys, splits of 256, merged in order by the same
formula. Swapping the operands changes no bit. ``hopper_rounds.exact_round_attention`` compares both kernels on the
present GPU. The kernel serves 16-bit heads of 128, without a window, a soft cap or sinks.

Shapes: N rows, padded to a power of two from 8 on; D = 2 HALF.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from unisono.kernels.gemm.fp8_quantize import scale_for, scaled_by
from unisono.kernels.hopper import block_barrier, order_loads, stage_barriers
from unisono.kernels.overlap import follow, overlapping

STAGES = 3
"""Steps whose keys and values are in shared memory at once: two programs fit on a multiprocessor."""


@gluon.jit
def _work_item(work_ptr, item, KV_HEADS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """Read an item: its entry of the work list, KV head, length, and first and end step. The reads bypass L1."""
    entry = work_ptr + item // KV_HEADS * 8
    length = gl.load(entry + 1, cache_modifier=".cg")
    begin = gl.load(entry + 4, cache_modifier=".cg") * (SPLIT // KEYS)
    end = gl.minimum(gl.load(entry + 5, cache_modifier=".cg") * (SPLIT // KEYS), (length + KEYS - 1) // KEYS)
    return entry, item % KV_HEADS, length, begin, end


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, tokens,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
                STAGES: gl.constexpr, HALF: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step's keys and values into its stage, as stages become free. The part of one warp.

    tokens: tokens of the pass. Steps that may hold their keys wait for the kernel that writes them.
    """
    each: gl.constexpr = KEYS // PAGE
    order_loads()
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, length, begin, end = _work_item(work_ptr, item, KV_HEADS, KEYS, SPLIT)
        pages_ptr = table_ptr + gl.load(entry, cache_modifier=".cg").to(gl.int64) * max_pages
        upcoming = gl.load(pages_ptr + gl.minimum(begin * each + which, max_pages - 1), cache_modifier=".cg")
        written = gl.maximum(length - tokens, 0) // KEYS
        for step in range(begin, end):
            if step >= written:
                follow(OVERLAP, True)
            row = (upcoming * KV_HEADS + head) * PAGE
            ahead = gl.minimum((step + 1) * each + which, max_pages - 1)
            upcoming = gl.load(pages_ptr + ahead, cache_modifier=".cg")
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 4 * PAGE * HALF * 2)
            for half in gl.static_range(2):
                place = stage * 2 + half
                at = [row, half * HALF]
                tma.async_copy_global_to_shared(k_desc, at, bar, k.index(place).slice(which * PAGE, PAGE))
                tma.async_copy_global_to_shared(v_desc, at, bar, v.index(place).slice(which * PAGE, PAGE))
            turn += 1
    follow(OVERLAP, True)


@gluon.jit
def tile_rows(tile, last, head, HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Token, query head and presence of each row of a tile."""
    row = gl.arange(0, ROWS, LAYOUT)
    token = tile + row // GROUP
    return token, head * GROUP + row % GROUP, token < last


@gluon.jit
def load_queries(q_ptr, q, first, last, head, HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
                 PIECES: gl.constexpr, PIECE: gl.constexpr):  # fmt: skip
    """Store the queries of tokens from ``first`` on in shared memory as pieces [ROWS, PIECE], zeros for absent rows."""
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token, own, in_use = tile_rows(first, last, head, HEADS, GROUP, ROWS, gl.SliceLayout(1, BY_ROW))
    index = (token.to(gl.int64) * HEADS + own) * (PIECES * PIECE)
    at = q_ptr + index[:, None] + gl.arange(0, PIECE, gl.SliceLayout(0, BY_ROW))[None, :]
    for i in gl.static_range(PIECES):
        q.index(i).store(gl.load(at + i * PIECE, mask=in_use[:, None], other=0.0))


@gluon.jit
def forget_values(step, end, v, place, PIECES: gl.constexpr, first, KEYS: gl.constexpr):
    """Zero PIECES pieces of the values of keys below ``first`` and from ``end`` on: stale ones may be NaN."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, BLOCKED))
    kept = (keys < end) & (keys >= first)
    for i in gl.static_range(PIECES):
        held = v.index(place + i).load(BLOCKED)
        v.index(place + i).store(gl.where(kept[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _nothing(ROWS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):
    """State of rows that have seen no key: maxima [ROWS], sums (in equal rows) and halves of values [HALF, ROWS]."""
    zeros = gl.zeros([HALF, ROWS], gl.float32, MMA)
    return gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, MMA)), zeros, zeros, zeros


@gluon.jit
def _merge(m, z, a0, a1, m1, z1, o0, o1):
    """Merge a later split's state into an earlier one's, as ``split.merge`` does."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    old = gl.expand_dims(gl.exp2(m - finite), 0) + gl.zeros_like(a0)
    new = gl.expand_dims(gl.exp2(m1 - finite), 0) + gl.zeros_like(a0)
    return top, gl.fma(z, old, z1 * new), gl.fma(a0, old, o0 * new), gl.fma(a1, old, o1 * new)


@gluon.jit
def _attend_step(step, stage, phase, length, position, q, p, k, v, full, ones, m, z, o0, o1, scale,
                 FIRST: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Attend a step's keys once their stage is loaded; returns the split's new state."""
    mbarrier.wait(full.index(stage), phase)
    s = warpgroup_mma_init(gl.zeros([KEYS, ROWS], gl.float32, MMA))
    s = warpgroup_mma(k.index(stage * 2), q.index(0).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma(k.index(stage * 2 + 1), q.index(1).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, MMA))
    visible = keys[:, None] <= position[None, :]
    if FIRST > 0:
        visible = visible & (keys >= FIRST)[:, None]
    s = gl.where(visible, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 0) * scale)
    finite = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.exp2(gl.fma(s, scale, -finite[None, :])).to(q.dtype)
    shrink = gl.exp2(m - finite)[None, :]
    p.permute([1, 0]).store(weights)
    if ((step + 1) * KEYS > length) | (step * KEYS < FIRST):
        forget_values(step, length, v, stage * 2, 2, FIRST, KEYS)
    fence_async_shared()
    block_barrier()
    z = warpgroup_mma(ones, p.permute([1, 0]), z * shrink, is_async=True)
    o0 = warpgroup_mma(v.index(stage * 2).permute([1, 0]), p.permute([1, 0]), o0 * shrink, is_async=True)
    o1 = warpgroup_mma(v.index(stage * 2 + 1).permute([1, 0]), p.permute([1, 0]), o1 * shrink, is_async=True)
    z, o0, o1 = warpgroup_mma_wait(0, [z, o0, o1])
    return top, z, o0, o1


@gluon.jit
def _places(part, CAPACITY: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):
    """Addresses of a split's maxima, sums and values in the workspace, and the mask of rows it has room for.

    Rows are adjacent, so that a warp's accesses are contiguous. A split has 2 CAPACITY floats of state and 2 HALF
    CAPACITY of values.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    dims = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    fits = row < CAPACITY
    values = part * (2 * HALF * CAPACITY) + dims[:, None] * CAPACITY + row[None, :]
    return part * (2 * CAPACITY) + row, values, fits, fits[None, :] & (dims >= 0)[:, None]


@gluon.jit
def _keep(state_ptr, acc_ptr, part, m, z, a0, a1, CAPACITY: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr,
          MMA: gl.constexpr):  # fmt: skip
    """Write a split's state to the workspace, at its place ``part`` there."""
    state, values, fits, there = _places(part, CAPACITY, ROWS, HALF, MMA)
    dims = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    gl.store(state_ptr + state, m, mask=fits)
    gl.store(state_ptr + (state + CAPACITY)[None, :] + (dims * 0)[:, None], z, mask=there & (dims == 0)[:, None])
    gl.store(acc_ptr + values, a0, mask=there)
    gl.store(acc_ptr + values + HALF * CAPACITY, a1, mask=there)


@gluon.jit
def _kept(state_ptr, acc_ptr, part, wanted, CAPACITY: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr,
          MMA: gl.constexpr):  # fmt: skip
    """Read a state that :func:`_keep` has written, or an empty one. The reads bypass L1, which may hold an older
    layer's.
    """
    state, values, fits, there = _places(part, CAPACITY, ROWS, HALF, MMA)
    fits, there = fits & wanted, there & wanted
    m = gl.load(state_ptr + state, mask=fits, other=float("-inf"), cache_modifier=".cg")
    z = gl.load(state_ptr + state + CAPACITY, mask=fits, other=0.0, cache_modifier=".cg")
    a0 = gl.load(acc_ptr + values, mask=there, other=0.0, cache_modifier=".cg")
    a1 = gl.load(acc_ptr + values + HALF * CAPACITY, mask=there, other=0.0, cache_modifier=".cg")
    return m, gl.expand_dims(z, 0) + gl.zeros_like(a0), a0, a1


@gluon.jit
def _merge_kept(state_ptr, acc_ptr, part, stride, splits, AT_ONCE: gl.constexpr, CAPACITY: gl.constexpr,
                ROWS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Merge the states of a tile's splits in order; AT_ONCE of them are read together."""
    m, z, a0, a1 = _nothing(ROWS, HALF, MMA)
    for start in range(0, splits, AT_ONCE):
        at = part + start * stride
        first = _kept(state_ptr, acc_ptr, at, start < splits, CAPACITY, ROWS, HALF, MMA)
        if AT_ONCE > 1:
            second = _kept(state_ptr, acc_ptr, at + stride, start + 1 < splits, CAPACITY, ROWS, HALF, MMA)
        if AT_ONCE > 2:
            third = _kept(state_ptr, acc_ptr, at + 2 * stride, start + 2 < splits, CAPACITY, ROWS, HALF, MMA)
            fourth = _kept(state_ptr, acc_ptr, at + 3 * stride, start + 3 < splits, CAPACITY, ROWS, HALF, MMA)
        m, z, a0, a1 = _merge(m, z, a0, a1, first[0], first[1], first[2], first[3])
        if AT_ONCE > 1:
            m, z, a0, a1 = _merge(m, z, a0, a1, second[0], second[1], second[2], second[3])
        if AT_ONCE > 2:
            m, z, a0, a1 = _merge(m, z, a0, a1, third[0], third[1], third[2], third[3])
            m, z, a0, a1 = _merge(m, z, a0, a1, fourth[0], fourth[1], fourth[2], fourth[3])
    return z, a0, a1


@gluon.jit
def _store(outs, q, tile, last, head, position, z, a0, a1, FIRST: gl.constexpr, HEADS: gl.constexpr,
           GROUP: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Write the outputs of a tile's rows, rounded to the queries' dtype, and quantised if outputs are e4m3.

    They replace the queries in shared memory first, so that a row's elements are stored together. outs: (outputs,
    scales, tokens, padded tokens); the last three are for e4m3 outputs.
    """
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_ptr, scales_ptr, tokens, padded = outs
    sees = (position >= FIRST)[None, :] & (gl.arange(0, HALF, gl.SliceLayout(1, MMA)) >= 0)[:, None]
    share = 1.0 / gl.where(sees, z, 1.0)
    block_barrier()  # all warps have multiplied the queries
    q.index(0).permute([1, 0]).store(gl.where(sees, a0 * share, 0.0).to(q.dtype))
    q.index(1).permute([1, 0]).store(gl.where(sees, a1 * share, 0.0).to(q.dtype))
    block_barrier()
    a0, a1 = q.index(0).load(BY_ROW), q.index(1).load(BY_ROW)
    token, own, in_use = tile_rows(tile, last, head, HEADS, GROUP, ROWS, gl.SliceLayout(1, BY_ROW))
    dims = gl.arange(0, HALF, gl.SliceLayout(0, BY_ROW))
    to = out_ptr + ((token.to(gl.int64) * HEADS + own) * (2 * HALF))[:, None] + dims[None, :]
    there = in_use[:, None] & (dims >= 0)[None, :]
    if out_ptr.dtype.element_ty == q.dtype:
        gl.store(to, a0, mask=there)
        gl.store(to + HALF, a1, mask=there)
    else:
        a0, a1 = a0.to(gl.float32), a1.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(a0), 1), gl.max(gl.abs(a1), 1))
        scale = scale_for(largest)
        at = scales_ptr + own * padded + token
        gl.store(at, scale, mask=in_use)
        _store_scaled(to, a0, scale, there, out_ptr.dtype.element_ty)
        _store_scaled(to + HALF, a1, scale, there, out_ptr.dtype.element_ty)
        for i in gl.static_range(1, 4):  # the padding, which follows the last token
            beyond = in_use & (token == tokens - 1) & (tokens - 1 + i < padded)
            gl.store(at + i, scale_for(gl.zeros_like(scale)), mask=beyond)
            after = there & beyond[:, None]
            nothing = gl.zeros_like(a0).to(out_ptr.dtype.element_ty)
            gl.store(to + i * HEADS * 2 * HALF, nothing, mask=after)
            gl.store(to + (i * HEADS * 2 + 1) * HALF, nothing, mask=after)


@gluon.jit
def _store_scaled(to, value, scale, there, dtype: gl.constexpr):
    """Store values [ROWS, HALF] divided by their rows' scales: the bits of ``fp8_quantize.scaled_by``."""
    gl.store(to, scaled_by(value, scale).to(dtype), mask=there)


@gluon.jit
def _attend_items(q_ptr, q, p, k, v, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr,
                  outs, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr,
                  KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AT_ONCE: gl.constexpr,
                  ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Attend every item of this program, and merge a tile's splits if it is the last. The warp group's part."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUP: gl.constexpr = HEADS // KV_HEADS
    CAPACITY: gl.constexpr = TOKENS * GROUP
    EACH: gl.constexpr = SPLIT // KEYS
    ones = gl.full([HALF, KEYS], 1.0, q.dtype, gl.DotOperandLayout(0, MMA, 2))
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, length, begin, end = _work_item(work_ptr, item, KV_HEADS, KEYS, SPLIT)
        tile, last = gl.load(entry + 2, cache_modifier=".cg"), gl.load(entry + 3, cache_modifier=".cg")
        partial, counter = gl.load(entry + 6, cache_modifier=".cg"), gl.load(entry + 7, cache_modifier=".cg")
        follow(OVERLAP, True)
        token, _, in_use = tile_rows(tile, last, head, HEADS, GROUP, ROWS, gl.SliceLayout(0, MMA))
        position = gl.load(positions_ptr + token, mask=in_use, other=-1)
        part = partial.to(gl.int64) * KV_HEADS + head  # of the workspace; the next split's is KV_HEADS further on
        load_queries(q_ptr, q, tile, last, head, HEADS, GROUP, ROWS, 2, HALF)
        fence_async_shared()
        block_barrier()
        m, z, a0, a1 = _nothing(ROWS, HALF, MMA)
        part_m, part_z, o0, o1 = _nothing(ROWS, HALF, MMA)
        for step in range(begin, end):
            if (step % EACH == 0) & (step > begin):
                if partial >= 0:
                    place = part + (step // EACH - 1) * KV_HEADS
                    _keep(state_ptr, acc_ptr, place, part_m, part_z, o0, o1, CAPACITY, ROWS, HALF, MMA)
                else:
                    m, z, a0, a1 = _merge(m, z, a0, a1, part_m, part_z, o0, o1)
                part_m, part_z, o0, o1 = _nothing(ROWS, HALF, MMA)
            stage = turn % STAGES
            part_m, part_z, o0, o1 = _attend_step(
                step, stage, turn // STAGES & 1, length, position, q, p, k, v, full, ones, part_m, part_z, o0, o1,
                scale, FIRST, KEYS, ROWS, MMA,
            )  # fmt: skip
            mbarrier.arrive(free.index(stage))
            turn += 1
        m, z, a0, a1 = _merge(m, z, a0, a1, part_m, part_z, o0, o1)
        if partial < 0:
            _store(outs, q, tile, last, head, position, z, a0, a1, FIRST, HEADS, GROUP, ROWS, HALF, MMA)
        else:
            end_split = (end + EACH - 1) // EACH
            place = part + (end_split - 1) * KV_HEADS
            _keep(state_ptr, acc_ptr, place, m, z, a0, a1, CAPACITY, ROWS, HALF, MMA)
            block_barrier()  # all of the group's stores come before its arrival
            splits, mine = (length + SPLIT - 1) // SPLIT, end_split - begin // EACH
            arrivals = arrivals_ptr + counter * (TOKENS * KV_HEADS) + head
            if gl.atomic_add(arrivals, mine, sem="acq_rel", scope="gpu") + mine == splits:
                gl.store(arrivals, 0)
                z, a0, a1 = _merge_kept(
                    state_ptr, acc_ptr, part, KV_HEADS, splits, AT_ONCE, CAPACITY, ROWS, HALF, MMA
                )  # fmt: skip
                _store(outs, q, tile, last, head, position, z, a0, a1, FIRST, HEADS, GROUP, ROWS, HALF, MMA)
    follow(OVERLAP, True)


@overlapping(reads_early=True, leads=True)
@gluon.jit
def round_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    scales_ptr, tokens, padded, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    HALF: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Share the work list × KV heads among a fixed number of programs; see ``triton_kernels.attention_kernel``.

    tokens: tokens of the pass. scales_ptr, padded: for e4m3 outputs only. ``_attend_items`` runs on a warp group,
    ``_load_pages`` on a warp for each page of a step. The work list and page tables are read before the kernel ahead
    has ended: see ``kernels/overlap.py``.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(DTYPE, [2, ROWS, HALF], SHARED)
    p = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SHARED)
    k = gl.allocate_shared_memory(DTYPE, [STAGES * 2, KEYS, HALF], SHARED)
    v = gl.allocate_shared_memory(DTYPE, [STAGES * 2, KEYS, HALF], SHARED)
    full, free = stage_barriers(STAGES, KEYS // PAGE, 1)
    fence_async_shared()
    block_barrier()
    total = gl.load(count_ptr, cache_modifier=".cg") * KV_HEADS
    outs = out_ptr, scales_ptr, tokens, padded
    gl.warp_specialize(
        [
            (_attend_items, (
                q_ptr, q, p, k, v, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr,
                outs, scale, HEADS, KV_HEADS, TOKENS, KEYS, SPLIT, FIRST, AT_ONCE, ROWS, HALF, STAGES, OVERLAP)),
            (_load_pages, (0, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, tokens,
                           KV_HEADS, PAGE, KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (1, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, tokens,
                           KV_HEADS, PAGE, KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (2, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, tokens,
                           KV_HEADS, PAGE, KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (3, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, tokens,
                           KV_HEADS, PAGE, KEYS, SPLIT, STAGES, HALF, OVERLAP)),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip
