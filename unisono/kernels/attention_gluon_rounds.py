"""Attention of few rows on Hopper, as in rounds: the same bits as ``attention_triton``, in less time.

A round's query tile has a few rows: the tokens of a request times the query heads that share a KV head. The tensor
core's left operand has 64 rows or more, so keys and values take that side: scores are ``K Q^T`` [keys, rows], outputs
``V^T P`` [D, rows]. Nobody multiplies rows that do not exist, keys and values go from shared memory to the tensor core
without passing through registers, and one warp for each page of a step loads them, through the tensor memory
accelerator, ahead of the group that computes and on into the next item of the work list.

Every sum has the order of ``attention_triton._walk``: steps of 64 keys, splits of 256, merged in order by the same
formula; which operand is the left one changes no bit. ``attention_hopper.prove`` compares both kernels on the present
GPU. It serves 16-bit heads of 128, without a window, a soft cap or sinks.

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

from unisono.kernels.hopper import block_barrier, order_loads, stage_barriers
from unisono.kernels.overlap import follow

STAGES = 3
"""Steps whose keys and values are held at once: two programs fit on a multiprocessor."""


@gluon.jit
def _work_item(work_ptr, item, KV_HEADS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """An item's entry of the work list, its KV head, and its first and end step."""
    entry = work_ptr + item // KV_HEADS * 8
    begin = gl.load(entry + 4) * (SPLIT // KEYS)
    end = gl.minimum(gl.load(entry + 5) * (SPLIT // KEYS), (gl.load(entry + 1) + KEYS - 1) // KEYS)
    return entry, item % KV_HEADS, begin, end


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
                STAGES: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """One warp's part: read page ``which`` of every step's keys and values into its stage, as stages come free."""
    each: gl.constexpr = KEYS // PAGE
    order_loads()
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, begin, end = _work_item(work_ptr, item, KV_HEADS, KEYS, SPLIT)
        pages_ptr = table_ptr + gl.load(entry).to(gl.int64) * max_pages
        upcoming = gl.load(pages_ptr + gl.minimum(begin * each + which, max_pages - 1))
        for step in range(begin, end):
            row = (upcoming * KV_HEADS + head) * PAGE
            upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, max_pages - 1))  # a step ahead
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


@gluon.jit
def _load_queries(q_ptr, q, first, last, head, HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
                  HALF: gl.constexpr):  # fmt: skip
    """Put an item's queries in shared memory, as two halves [ROWS, HALF]; zeros for rows that do not exist."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    token = first + row // GROUP
    index = (token.to(gl.int64) * HEADS + head * GROUP + row % GROUP) * (2 * HALF)
    at = q_ptr + index[:, None] + gl.arange(0, HALF, gl.SliceLayout(0, LOADED))[None, :]
    for i in gl.static_range(2):
        q.index(i).store(gl.load(at + i * HALF, mask=(token < last)[:, None], other=0.0))


@gluon.jit
def _forget_values(step, end, v, place, FIRST: gl.constexpr, KEYS: gl.constexpr):
    """Zero the values of keys below FIRST and from ``end`` on: what was there before may be NaN."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, BLOCKED))
    kept = (keys < end) & (keys >= FIRST)
    for i in gl.static_range(2):
        held = v.index(place + i).load(BLOCKED)
        v.index(place + i).store(gl.where(kept[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _nothing(ROWS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):
    """The state of rows that have seen no key: maxima [ROWS], sums (in equal rows) and values' halves [HALF, ROWS]."""
    zeros = gl.zeros([HALF, ROWS], gl.float32, MMA)
    return gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, MMA)), zeros, zeros, zeros


@gluon.jit
def _merge(m, z, a0, a1, m1, z1, o0, o1):
    """Merge a later split's state into an earlier one's: ``attention_split.merge``."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    old = gl.expand_dims(gl.exp2(m - finite), 0) + gl.zeros_like(a0)
    new = gl.expand_dims(gl.exp2(m1 - finite), 0) + gl.zeros_like(a0)
    return top, gl.fma(z, old, z1 * new), gl.fma(a0, old, o0 * new), gl.fma(a1, old, o1 * new)


@gluon.jit
def _attend_step(step, stage, phase, length, position, q, p, k, v, full, ones, m, z, o0, o1, scale,
                 FIRST: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Attend a step's keys, in a stage that is being loaded: the split's state with them."""
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
        _forget_values(step, length, v, stage * 2, FIRST, KEYS)
    fence_async_shared()
    block_barrier()
    z = warpgroup_mma(ones, p.permute([1, 0]), z * shrink, is_async=True)
    o0 = warpgroup_mma(v.index(stage * 2).permute([1, 0]), p.permute([1, 0]), o0 * shrink, is_async=True)
    o1 = warpgroup_mma(v.index(stage * 2 + 1).permute([1, 0]), p.permute([1, 0]), o1 * shrink, is_async=True)
    z, o0, o1 = warpgroup_mma_wait(0, [z, o0, o1])
    return top, z, o0, o1


@gluon.jit
def _keep(state_ptr, acc_ptr, at, in_use, m, z, a0, a1, HALF: gl.constexpr, MMA: gl.constexpr):
    """Write a split's state to the workspace, where rows have the places ``at``."""
    dims = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    gl.store(state_ptr + at * 2, m, mask=in_use)
    once = in_use[None, :] & (dims == 0)[:, None]
    gl.store(state_ptr + (at * 2 + 1)[None, :] + (dims * 0)[:, None], z, mask=once)
    to = acc_ptr + (at * (2 * HALF))[None, :] + dims[:, None]
    there = in_use[None, :] & (dims >= 0)[:, None]
    gl.store(to, a0, mask=there)
    gl.store(to + HALF, a1, mask=there)


@gluon.jit
def _kept(state_ptr, acc_ptr, at, wanted, HALF: gl.constexpr, MMA: gl.constexpr):
    """What :func:`_keep` has written, or nothing. The reads bypass L1, which may hold an older layer's values."""
    dims = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    m = gl.load(state_ptr + at * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
    z = gl.load(state_ptr + at * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
    source = acc_ptr + (at * (2 * HALF))[None, :] + dims[:, None]
    there = wanted[None, :] & (dims >= 0)[:, None]
    a0 = gl.load(source, mask=there, other=0.0, cache_modifier=".cg")
    a1 = gl.load(source + HALF, mask=there, other=0.0, cache_modifier=".cg")
    return m, gl.expand_dims(z, 0) + gl.zeros_like(a0), a0, a1


@gluon.jit
def _merge_kept(state_ptr, acc_ptr, at, stride, splits, in_use, AT_ONCE: gl.constexpr, ROWS: gl.constexpr,
                HALF: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The state of a tile from those of its splits, merged in order; AT_ONCE of them are read at once."""
    m, z, a0, a1 = _nothing(ROWS, HALF, MMA)
    for start in range(0, splits, AT_ONCE):
        first = _kept(state_ptr, acc_ptr, at + start * stride, in_use, HALF, MMA)
        if AT_ONCE > 1:
            wanted = in_use & (start + 1 < splits)
            second = _kept(state_ptr, acc_ptr, at + (start + 1) * stride, wanted, HALF, MMA)
        if AT_ONCE > 2:
            wanted = in_use & (start + 2 < splits)
            third = _kept(state_ptr, acc_ptr, at + (start + 2) * stride, wanted, HALF, MMA)
            wanted = in_use & (start + 3 < splits)
            fourth = _kept(state_ptr, acc_ptr, at + (start + 3) * stride, wanted, HALF, MMA)
        m, z, a0, a1 = _merge(m, z, a0, a1, first[0], first[1], first[2], first[3])
        if AT_ONCE > 1:
            m, z, a0, a1 = _merge(m, z, a0, a1, second[0], second[1], second[2], second[3])
        if AT_ONCE > 2:
            m, z, a0, a1 = _merge(m, z, a0, a1, third[0], third[1], third[2], third[3])
            m, z, a0, a1 = _merge(m, z, a0, a1, fourth[0], fourth[1], fourth[2], fourth[3])
    return z, a0, a1


@gluon.jit
def _store(outs, index, in_use, position, z, a0, a1, FIRST: gl.constexpr, DTYPE: gl.constexpr, HEADS: gl.constexpr,
           HALF: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Write the outputs of a tile's rows, rounded to DTYPE; quantised, where outputs are e4m3.

    outs: (outputs, scales, tokens, padded tokens); the last three are of e4m3 outputs.
    """
    out_ptr, scales_ptr, tokens, padded = outs
    dims = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    sees = (position >= FIRST)[None, :] & (dims >= 0)[:, None]
    share = 1.0 / gl.where(sees, z, 1.0)
    to = out_ptr + (index * (2 * HALF))[None, :] + dims[:, None]
    there = in_use[None, :] & (dims >= 0)[:, None]
    a0, a1 = gl.where(sees, a0 * share, 0.0).to(DTYPE), gl.where(sees, a1 * share, 0.0).to(DTYPE)
    if out_ptr.dtype.element_ty == DTYPE:
        gl.store(to, a0, mask=there)
        gl.store(to + HALF, a1, mask=there)
    else:
        a0, a1 = a0.to(gl.float32), a1.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(a0), 0), gl.max(gl.abs(a1), 0))
        scale = gl.div_rn(gl.maximum(largest, 1e-10), 448.0)
        at = scales_ptr + index % HEADS * padded + index // HEADS
        gl.store(at, scale, mask=in_use)
        _store_scaled(to, a0, scale, there, out_ptr.dtype.element_ty)
        _store_scaled(to + HALF, a1, scale, there, out_ptr.dtype.element_ty)
        for i in gl.static_range(1, 4):  # the padding, which follows the last token
            beyond = in_use & (index // HEADS == tokens - 1) & (tokens - 1 + i < padded)
            gl.store(at + i, gl.div_rn(gl.zeros_like(scale) + 1e-10, 448.0), mask=beyond)
            after = there & beyond[None, :]
            nothing = gl.zeros_like(a0).to(out_ptr.dtype.element_ty)
            gl.store(to + i * HEADS * 2 * HALF, nothing, mask=after)
            gl.store(to + (i * HEADS * 2 + 1) * HALF, nothing, mask=after)


@gluon.jit
def _store_scaled(to, value, scale, there, dtype: gl.constexpr):
    """Values [HALF, ROWS] over their rows' scales: the bits of ``fp8_quantize.scaled_by``."""
    scaled = gl.div_rn(value, gl.expand_dims(scale, 0) + gl.zeros_like(value))
    gl.store(to, gl.minimum(gl.maximum(scaled, -448.0), 448.0).to(dtype), mask=there)


@gluon.jit
def _attend_items(q_ptr, q, p, k, v, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr,
                  outs, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr,
                  KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AT_ONCE: gl.constexpr,
                  ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp group's part: attend every item of this program, and merge a tile's splits where it is the last."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUP: gl.constexpr = HEADS // KV_HEADS
    EACH: gl.constexpr = SPLIT // KEYS
    ones = gl.full([HALF, KEYS], 1.0, q.dtype, gl.DotOperandLayout(0, MMA, 2))
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, begin, end = _work_item(work_ptr, item, KV_HEADS, KEYS, SPLIT)
        length, tile, last = gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        partial, counter = gl.load(entry + 6), gl.load(entry + 7)
        row = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
        token = tile + row // GROUP
        in_use = token < last
        position = gl.load(positions_ptr + token, mask=in_use, other=-1)
        index = token.to(gl.int64) * HEADS + head * GROUP + row % GROUP
        at, stride = index + (partial.to(gl.int64) * TOKENS - tile) * HEADS, TOKENS * HEADS
        _load_queries(q_ptr, q, tile, last, head, HEADS, GROUP, ROWS, HALF)
        fence_async_shared()
        block_barrier()
        m, z, a0, a1 = _nothing(ROWS, HALF, MMA)
        part_m, part_z, o0, o1 = _nothing(ROWS, HALF, MMA)
        for step in range(begin, end):
            if (step % EACH == 0) & (step > begin):
                if partial >= 0:
                    place = at + (step // EACH - 1) * stride
                    _keep(state_ptr, acc_ptr, place, in_use, part_m, part_z, o0, o1, HALF, MMA)
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
            _store(outs, index, in_use, position, z, a0, a1, FIRST, q.dtype, HEADS, HALF, MMA)
        else:
            first_split, end_split = gl.load(entry + 4), gl.load(entry + 5)
            _keep(state_ptr, acc_ptr, at + (end_split - 1) * stride, in_use, m, z, a0, a1, HALF, MMA)
            block_barrier()  # all of the group's stores come before its arrival
            splits, mine = (length + SPLIT - 1) // SPLIT, end_split - first_split
            arrivals = arrivals_ptr + counter * (TOKENS * KV_HEADS) + head
            if gl.atomic_add(arrivals, mine, sem="acq_rel", scope="gpu") + mine == splits:
                gl.store(arrivals, 0)
                z, a0, a1 = _merge_kept(state_ptr, acc_ptr, at, stride, splits, in_use, AT_ONCE, ROWS, HALF, MMA)
                _store(outs, index, in_use, position, z, a0, a1, FIRST, q.dtype, HEADS, HALF, MMA)


@gluon.jit
def round_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    scales_ptr, tokens, padded, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    HALF: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the work list × KV heads; see ``attention_triton.attention_kernel``.

    scales_ptr, tokens, padded: of e4m3 outputs, else unread. ``_attend_items`` runs on a warp group, ``_load_pages`` on
    a warp for each page of a step.
    """
    follow(OVERLAP)
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
    total = gl.load(count_ptr) * KV_HEADS
    outs = out_ptr, scales_ptr, tokens, padded
    gl.warp_specialize(
        [
            (_attend_items, (
                q_ptr, q, p, k, v, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr,
                outs, scale, HEADS, KV_HEADS, TOKENS, KEYS, SPLIT, FIRST, AT_ONCE, ROWS, HALF, STAGES)),
            (_load_pages, (0, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF)),
            (_load_pages, (1, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF)),
            (_load_pages, (2, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF)),
            (_load_pages, (3, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF)),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip
