"""Attention of long prompts on Hopper: the bits of ``triton_kernels``, faster.

Written in Gluon, Triton's lower-level language, for two things that Triton cannot express: two independent warp groups,
where one computes its softmax while the other's products run, and pages that are loaded by the tensor memory
accelerator. Every sum has the order of ``triton_kernels._walk``: steps of 64 keys, splits of 256, merged in order by
the same formula. ``hopper.exact_prompt_attention`` compares both kernels on the present GPU;
``kernels/attention/paged.py`` launches this one where their bits are equal.

It serves passes with tiles of 128 rows that are walked whole, for 16-bit heads of 128, without a window, a soft cap or
sinks. Without a window no page of a request is freed before its end, so every page that is read is the request's own.
``gluon_wide.py`` has the kernel for heads of 256; both use :func:`attend`.
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

from unisono.kernels.hopper import block_barrier, stage_barriers

ROWS = 128
"""Rows of a query tile: 64 for each of two warp groups."""

HEAD_DIM = 128
HALF = 64
"""Half of a head. Keys, values and outputs are held in halves: 64 elements are 128 bytes, the widest swizzle."""

STAGES = 3
"""Steps whose keys and values are in shared memory at once. Not 4, the steps of a split: all addresses are then
constants, which the compiler keeps in registers, and it spills. 3 stages take 1.10 ms, 4 take 1.38, 2 take 1.77 (8192
tokens, H200)."""

WARPS = 4
"""Warps of each of the two groups that compute. One more warp per page of a step loads it."""


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                HALF: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step's keys and values into its stage, as stages become free. The part of one
    warp.
    """
    each = KEYS // PAGE
    upcoming = gl.load(pages_ptr + gl.minimum(which, last_page))
    for step in range(steps):
        row = (upcoming * KV_HEADS + head) * PAGE
        upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, last_page))  # a step ahead
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 4 * PAGE * HALF * 2)
        for half in gl.static_range(2):
            place = stage * 2 + half
            tma.async_copy_global_to_shared(k_desc, [row, half * HALF], bar, k.index(place).slice(which * PAGE, PAGE))
            tma.async_copy_global_to_shared(v_desc, [row, half * HALF], bar, v.index(place).slice(which * PAGE, PAGE))


@gluon.jit
def _score(step, q, at, k, bars, PARTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """Start the products of the scores [ROWS, KEYS] of ``step`` once its keys are loaded: PARTS, one after the other.

    at: the group's first part in q.
    """
    stage = step % STAGES
    mbarrier.wait(bars.index(stage), step // STAGES & 1)
    s = warpgroup_mma_init(gl.zeros([ROWS, KEYS], gl.float32, MMA))
    s = warpgroup_mma(q.index(at), k.index(stage * PARTS).permute([1, 0]), s, use_acc=False, is_async=True)
    for i in gl.static_range(1, PARTS):
        s = warpgroup_mma(q.index(at + i), k.index(stage * PARTS + i).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _weigh(s, m, scale, DTYPE: gl.constexpr):
    """Compute probabilities [ROWS, KEYS] under the new row maxima, and the factor that rescales old sums."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    finite = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(gl.fma(s, scale, -finite[:, None])).to(DTYPE)
    return top, p, gl.exp2(m - finite)


@gluon.jit
def _value(step, p, shrink, v, ones, z, o0, o1, at: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """Start to add ``p``'s row sums to z and ``p``-weighted values to parts ``at`` and at + 1: three in flight.

    z [ROWS, 8] holds each sum eight times: the tensor core adds in the same order in every layout.
    """
    place = step % STAGES * PARTS + at
    old = z * gl.convert_layout(shrink, gl.SliceLayout(1, z.type.layout))[:, None]
    z = warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, z.type.layout, 2)), ones.permute([1, 0]), old, is_async=True
    )
    p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
    o0 = warpgroup_mma(p, v.index(place), o0 * shrink[:, None], is_async=True)
    o1 = warpgroup_mma(p, v.index(place + 1), o1 * shrink[:, None], is_async=True)
    return z, o0, o1


@gluon.jit
def _merge(m, z, a0, a1, m1, z1, o0, o1):
    """Merge a later split's state into an earlier one's, as ``split.merge`` does."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    old, new = gl.exp2(m - finite), gl.exp2(m1 - finite)
    a0 = gl.fma(a0, gl.expand_dims(old, 1) + gl.zeros_like(a0), o0 * new[:, None])
    a1 = gl.fma(a1, gl.expand_dims(old, 1) + gl.zeros_like(a1), o1 * new[:, None])
    return top, gl.fma(z, old, z1 * new), a0, a1


@gluon.jit
def _row_sums(z, MMA: gl.constexpr):
    return gl.convert_layout(gl.max(z, 1), gl.SliceLayout(1, MMA))


@gluon.jit
def _forget_values(step, end, v, at: gl.constexpr, PARTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Zero parts ``at`` and at + 1 of the values of keys from ``end`` on: pages beyond a request's end may hold NaN.

    Where both groups do this, in any order, they store the same values.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, BLOCKED))
    for i in gl.static_range(2):
        place = v.index(step % STAGES * PARTS + at + i)
        held = place.load(BLOCKED)
        place.store(gl.where((keys < end)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    block_barrier()


@gluon.jit
def _nothing(ROWS: gl.constexpr, PART: gl.constexpr, MMA: gl.constexpr):
    """State of rows that have seen no key of a split: maxima, sums, both parts of the output."""
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    o = gl.zeros([ROWS, PART], gl.float32, MMA)
    return m, gl.zeros([ROWS, 8], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])), o, o


@gluon.jit
def load_queries(q_ptr, q, part, ones, first, last, head, PARTS: gl.constexpr, HEADS: gl.constexpr,
                 GROUP: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, KEYS: gl.constexpr):  # fmt: skip
    """Store the queries in shared memory, in q from ``part`` on, and the vector of ones for row sums."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    token = first + row // GROUP
    index = (token.to(gl.int64) * HEADS + head * GROUP + row % GROUP) * (PARTS * PART)
    at = q_ptr + index[:, None] + gl.arange(0, PART, gl.SliceLayout(0, LOADED))[None, :]
    for i in gl.static_range(PARTS):
        q.index(part + i).store(gl.load(at + i * PART, mask=(token < last)[:, None], other=0.0))
    ones.store(gl.full([8, KEYS], 1.0, q_ptr.dtype.element_ty, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def attend(q, part, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps, scale,
           at: gl.constexpr, PARTS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
           SPLIT: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Attend ROWS rows and write parts ``at`` and at + 1 of their outputs. The part of one warp group.

    A head lies in PARTS parts of PART elements, those of the rows' queries in q from ``part`` on. first, last: the
    rows' tokens. end, whole, steps: see :func:`keys_seen`.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    EACH: gl.constexpr = SPLIT // KEYS
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)) // GROUP
    position = gl.load(positions_ptr + token, mask=token < last, other=-1)

    m, _, a0, a1 = _nothing(ROWS, PART, MMA)
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    s = warpgroup_mma_wait(0, [_score(0, q, part, k, full, PARTS, KEYS, STAGES, ROWS, MMA)])
    for split in range(whole):
        part_m, part_z, o0, o1 = _nothing(ROWS, PART, MMA)
        for i in gl.static_range(EACH):
            step = split * EACH + i
            part_m, p, shrink = _weigh(s, part_m, scale, DTYPE)
            if i > 0:
                part_z, o0, o1 = warpgroup_mma_wait(0, [part_z, o0, o1])
                mbarrier.arrive(free.index((step - 1) % STAGES))
            following = _score(step + 1, q, part, k, full, PARTS, KEYS, STAGES, ROWS, MMA)
            part_z, o0, o1 = _value(step, p, shrink, v, ones, part_z, o0, o1, at, PARTS, STAGES, MMA)
            if i < EACH - 1:
                s = warpgroup_mma_wait(3, [following])
            else:
                s, part_z, o0, o1 = warpgroup_mma_wait(0, [following, part_z, o0, o1])
                mbarrier.arrive(free.index(step % STAGES))
        m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)

    part_m, part_z, o0, o1 = _nothing(ROWS, PART, MMA)
    for step in range(whole * EACH, steps):
        if step % EACH == 0 and step > whole * EACH:
            m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)
            part_m, part_z, o0, o1 = _nothing(ROWS, PART, MMA)
        keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
        s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        part_m, p, shrink = _weigh(s, part_m, scale, DTYPE)
        if (step + 1) * KEYS > end:
            _forget_values(step, end, v, at, PARTS, KEYS, STAGES)
        part_z, o0, o1 = _value(step, p, shrink, v, ones, part_z, o0, o1, at, PARTS, STAGES, MMA)
        part_z, o0, o1 = warpgroup_mma_wait(0, [part_z, o0, o1])
        mbarrier.arrive(free.index(step % STAGES))
        if step + 1 < steps:
            s = warpgroup_mma_wait(0, [_score(step + 1, q, part, k, full, PARTS, KEYS, STAGES, ROWS, MMA)])
    m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)
    _store(out_ptr, first, last, head, at * PART, position, z, a0, a1, PARTS, HEADS, GROUP, ROWS, PART, MMA)


@gluon.jit
def _store(out_ptr, first, last, head, column, position, z, a0, a1, PARTS: gl.constexpr, HEADS: gl.constexpr,
           GROUP: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Write two parts of the outputs, from ``column`` of a head on."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    token = first + row // GROUP
    in_use = (token < last)[:, None]
    sees = position >= 0
    share = (1.0 / gl.where(sees, z, 1.0))[:, None]
    index = token.to(gl.int64) * HEADS + head * GROUP + row % GROUP
    at = out_ptr + (index * (PARTS * PART) + column)[:, None] + gl.arange(0, PART, gl.SliceLayout(0, MMA))[None, :]
    dtype = out_ptr.dtype.element_ty
    gl.store(at, gl.where(sees[:, None], a0 * share, 0.0).to(dtype), mask=in_use)
    gl.store(at + PART, gl.where(sees[:, None], a1 * share, 0.0).to(dtype), mask=in_use)


@gluon.jit
def keys_seen(length, positions_ptr, first, last, ROWS: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
              SPLIT: gl.constexpr):  # fmt: skip
    """(end of a tile's visible keys, splits without masks, steps). At least one step has masks."""
    token = first + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])) // GROUP
    position = gl.load(positions_ptr + token, mask=token < last, other=-1)
    end = gl.maximum(gl.minimum(length, gl.max(position, 0) + 1), 0)
    seen_by_all = gl.min(gl.where(position >= 0, position, end - 1), 0) + 1
    whole = gl.maximum(gl.minimum(seen_by_all, end - 1), 0) // SPLIT
    return end, whole, gl.maximum((end + KEYS - 1) // KEYS, 1)


@gluon.jit
def _attend_half(group, q_ptr, q, k, v, ones, full, free, out_ptr, positions_ptr, tile, last, head, end, whole, steps,
                 scale, HEADS: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
                 ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Attend one warp group's half of a tile, ROWS rows. group: 0 or 1. tile: its first token."""
    first = tile + group * (ROWS // GROUP)
    ones = ones.slice(8 * group, 8)
    load_queries(q_ptr, q, 2 * group, ones, first, last, head, 2, HEADS, GROUP, ROWS, HALF, KEYS)
    fence_async_shared()
    block_barrier()
    attend(q, 2 * group, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps, scale,
           0, 2, HEADS, GROUP, KEYS, SPLIT, ROWS, HALF, STAGES)  # fmt: skip


@gluon.jit
def prompt_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, out_ptr, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
    ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with one program per tile of the work list and KV head; see ``triton_kernels.attention_kernel``.

    ``_attend_half`` runs on two warp groups, each for itself, ``_load_pages`` on a warp for each page of a step.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    GROUP: gl.constexpr = HEADS // KV_HEADS
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    item = gl.program_id(0)
    if item < gl.load(count_ptr) * KV_HEADS:
        entry = work_ptr + item // KV_HEADS * 8
        head = item % KV_HEADS
        slot, length, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        end, whole, steps = keys_seen(length, positions_ptr, first, last, ROWS, GROUP, KEYS, SPLIT)

        q = gl.allocate_shared_memory(DTYPE, [4, ROWS // 2, HALF], SHARED)
        k = gl.allocate_shared_memory(DTYPE, [STAGES * 2, KEYS, HALF], SHARED)
        v = gl.allocate_shared_memory(DTYPE, [STAGES * 2, KEYS, HALF], SHARED)
        ones = gl.allocate_shared_memory(DTYPE, [16, KEYS], SHARED)
        full, free = stage_barriers(STAGES, KEYS // PAGE, 2)
        fence_async_shared()
        block_barrier()
        pages_ptr = table_ptr + slot.to(gl.int64) * max_pages
        last_page = max_pages - 1
        gl.warp_specialize(
            [
                (_attend_half, (
                    0, q_ptr, q, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps,
                    scale, HEADS, GROUP, KEYS, SPLIT, ROWS // 2, HALF, STAGES)),
                (_attend_half, (
                    1, q_ptr, q, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps,
                    scale, HEADS, GROUP, KEYS, SPLIT, ROWS // 2, HALF, STAGES)),
                (_load_pages, (0, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps,
                               KV_HEADS, PAGE, KEYS, STAGES, HALF)),
                (_load_pages, (1, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps,
                               KV_HEADS, PAGE, KEYS, STAGES, HALF)),
                (_load_pages, (2, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps,
                               KV_HEADS, PAGE, KEYS, STAGES, HALF)),
                (_load_pages, (3, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps,
                               KV_HEADS, PAGE, KEYS, STAGES, HALF)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip
