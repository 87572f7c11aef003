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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.hopper import block_barrier, stage_barriers
from unisono.kernels.staying import order_loads

STAGES = 3
"""Steps whose keys and values are held at once: two programs fit on a multiprocessor."""


@gluon.jit
def _work_item(work_ptr, item, total, KV_HEADS: gl.constexpr):
    """An item's entry of the work list, or the last one's: slot, length, first and end token, first and end split,
    partial, counter. The plan was made before the kernel ahead of this one, so it may be read while that one runs.
    """
    entry = work_ptr + gl.minimum(item, gl.maximum(total - 1, 0)) // KV_HEADS * 8
    slot, length, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
    first_split, end_split = gl.load(entry + 4), gl.load(entry + 5)
    return slot, length, first, last, first_split, end_split, gl.load(entry + 6), gl.load(entry + 7)


@gluon.jit
def _steps(length, first_split, end_split, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The first and the end step of an item's splits."""
    each: gl.constexpr = SPLIT // KEYS
    return first_split * each, gl.minimum(end_split * each, (length + KEYS - 1) // KEYS)


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
                STAGES: gl.constexpr, HALF: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """One warp's part: read page ``which`` of every step's keys and values into its stage, as stages come free."""
    each: gl.constexpr = KEYS // PAGE
    slot, length, _, _, first_split, end_split, _, _ = _work_item(work_ptr, gl.program_id(0), total, KV_HEADS)
    begin, _ = _steps(length, first_split, end_split, KEYS, SPLIT)
    upcoming = gl.load(table_ptr + slot.to(gl.int64) * max_pages + gl.minimum(begin * each + which, max_pages - 1))
    if OVERLAP:
        gdc_wait()
    order_loads()
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        begin, end = _steps(length, first_split, end_split, KEYS, SPLIT)
        pages_ptr, head = table_ptr + slot.to(gl.int64) * max_pages, item % KV_HEADS
        slot, length, _, _, first_split, end_split, _, _ = _work_item(
            work_ptr, item + gl.num_programs(0), total, KV_HEADS
        )
        later, _ = _steps(length, first_split, end_split, KEYS, SPLIT)
        following = table_ptr + slot.to(gl.int64) * max_pages + gl.minimum(later * each + which, max_pages - 1)
        for step in range(begin, end):
            row = (upcoming * KV_HEADS + head) * PAGE
            upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, max_pages - 1))  # a step ahead
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 4 * PAGE * HALF * 2)
            for half in gl.static_range(2):
                place = k.index(stage * 2 + half).slice(which * PAGE, PAGE)
                tma.async_copy_global_to_shared(k_desc, [row, half * HALF], bar, place)
            for half in gl.static_range(2):
                place = v.index(stage * 2 + half).slice(which * PAGE, PAGE)
                tma.async_copy_global_to_shared(v_desc, [row, half * HALF], bar, place)
            turn += 1
        upcoming = gl.load(following)


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
    return m, z, a0, a1


@gluon.jit
def _merge_read(state, read):
    """Merge a state that was read."""
    m1, z1, o0, o1 = read
    m, z, a0, a1 = state
    return _merge(m, z, a0, a1, m1, gl.expand_dims(z1, 0) + gl.zeros_like(o0), o0, o1)


@gluon.jit
def _merge_kept(state_ptr, acc_ptr, at, stride, splits, in_use, GROUP: gl.constexpr, ROWS: gl.constexpr,
                HALF: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The state of a tile from those of its splits, merged in order. GROUP of them (1, 2 or 4) are merged while the
    next ones are read.
    """
    state = _nothing(ROWS, HALF, MMA)
    one = _kept(state_ptr, acc_ptr, at, in_use, HALF, MMA)
    if GROUP > 1:
        two = _kept(state_ptr, acc_ptr, at + stride, in_use & (splits > 1), HALF, MMA)
    if GROUP > 2:
        three = _kept(state_ptr, acc_ptr, at + 2 * stride, in_use & (splits > 2), HALF, MMA)
        four = _kept(state_ptr, acc_ptr, at + 3 * stride, in_use & (splits > 3), HALF, MMA)
    for start in range(0, splits, GROUP):
        now, ahead = one, start + GROUP
        one = _kept(state_ptr, acc_ptr, at + ahead * stride, in_use & (ahead < splits), HALF, MMA)
        if GROUP > 1:
            after = two
            two = _kept(state_ptr, acc_ptr, at + (ahead + 1) * stride, in_use & (ahead + 1 < splits), HALF, MMA)
        if GROUP > 2:
            third, fourth = three, four
            three = _kept(state_ptr, acc_ptr, at + (ahead + 2) * stride, in_use & (ahead + 2 < splits), HALF, MMA)
            four = _kept(state_ptr, acc_ptr, at + (ahead + 3) * stride, in_use & (ahead + 3 < splits), HALF, MMA)
        state = _merge_read(state, now)
        if GROUP > 1:
            state = _merge_read(state, after)
        if GROUP > 2:
            state = _merge_read(_merge_read(state, third), fourth)
    _, z, a0, a1 = state
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
                  KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AHEAD: gl.constexpr,
                  ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """The warp group's part: attend every item of this program, and merge a tile's splits where it is the last."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUP: gl.constexpr = HEADS // KV_HEADS
    EACH: gl.constexpr = SPLIT // KEYS
    ones = gl.full([HALF, KEYS], 1.0, q.dtype, gl.DotOperandLayout(0, MMA, 2))
    upcoming = _work_item(work_ptr, gl.program_id(0), total, KV_HEADS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        _, length, tile, last, first_split, end_split, partial, counter = upcoming
        upcoming = _work_item(work_ptr, item + gl.num_programs(0), total, KV_HEADS)
        begin, end = _steps(length, first_split, end_split, KEYS, SPLIT)
        head = item % KV_HEADS
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
            _keep(state_ptr, acc_ptr, at + (end_split - 1) * stride, in_use, m, z, a0, a1, HALF, MMA)
            block_barrier()  # all of the group's stores come before its arrival
            splits, mine = (length + SPLIT - 1) // SPLIT, end_split - first_split
            arrivals = arrivals_ptr + counter * (TOKENS * KV_HEADS) + head
            if gl.atomic_add(arrivals, mine, sem="acq_rel", scope="gpu") + mine == splits:
                gl.store(arrivals, 0)
                z, a0, a1 = _merge_kept(state_ptr, acc_ptr, at, stride, splits, in_use, AHEAD, ROWS, HALF, MMA)
                _store(outs, index, in_use, position, z, a0, a1, FIRST, q.dtype, HEADS, HALF, MMA)


@gluon.jit
def round_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    scales_ptr, tokens, padded, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    HALF: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, FIRST: gl.constexpr, AHEAD: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the work list × KV heads; see ``attention_triton.attention_kernel``.

    scales_ptr, tokens, padded: of e4m3 outputs, else unread. ``_attend_items`` runs on a warp group, ``_load_pages`` on
    a warp for each page of a step.
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
    total = gl.load(count_ptr) * KV_HEADS
    outs = out_ptr, scales_ptr, tokens, padded
    gl.warp_specialize(
        [
            (_attend_items, (
                q_ptr, q, p, k, v, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr,
                outs, scale, HEADS, KV_HEADS, TOKENS, KEYS, SPLIT, FIRST, AHEAD, ROWS, HALF, STAGES, OVERLAP)),
            (_load_pages, (0, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (1, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (2, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF, OVERLAP)),
            (_load_pages, (3, k_desc, v_desc, k, v, full, free, table_ptr, work_ptr, total, max_pages, KV_HEADS, PAGE,
                           KEYS, SPLIT, STAGES, HALF, OVERLAP)),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip
