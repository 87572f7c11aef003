"""Attention of long prompts on Hopper for heads of 256: ``attention_gluon`` where a warp group cannot hold a row.

A row's output of 256 and the merged one beside it take more registers than a thread has, so each of the two warp groups
has half of the output's columns. It computes the scores of its rows whole, a third more products than are needed, and
shares nothing with the other group: that keeps the order of every sum that of ``attention_triton._walk``, as there.

Two shapes give the same bits. COLUMNS: both groups take the same 64 rows and a half of the columns each. Otherwise each
takes 64 of 128 rows, and two programs share a tile's columns: keys are read twice, values once. Heads are held in
quarters of 64 elements, the widest swizzle. ``attention_hopper`` proves the kernel and chooses it.
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

from unisono.kernels.attention_gluon import HALF, WARPS, _barrier, _merge, _nothing, _row_sums, _weigh

__all__ = ["COLUMNS", "HEAD_DIM", "WARPS", "wide_attention_kernel", "wide_sizes"]

HEAD_DIM = 256
COLUMNS = False
"""Which shape serves. Not measured yet: benchmarks/kernel_fusions.py times both."""

STAGES = 3
"""Steps whose keys and values are held at once: what fits. With 2 the compiler spills 448 bytes a thread, with 3 80."""


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps, first_quarter,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                QUARTER: gl.constexpr, HELD: gl.constexpr):  # fmt: skip
    """One warp's part: read page ``which`` of every step's keys, and of its values HELD quarters."""
    each = KEYS // PAGE
    upcoming = gl.load(pages_ptr + gl.minimum(which, last_page))
    for step in range(steps):
        row = (upcoming * KV_HEADS + head) * PAGE
        upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, last_page))  # a step ahead
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, (4 + HELD) * PAGE * QUARTER * 2)
        for i in gl.static_range(4):
            place = k.index(stage * 4 + i).slice(which * PAGE, PAGE)
            tma.async_copy_global_to_shared(k_desc, [row, i * QUARTER], bar, place)
        for i in gl.static_range(HELD):
            place = v.index(stage * HELD + i).slice(which * PAGE, PAGE)
            tma.async_copy_global_to_shared(v_desc, [row, (first_quarter + i) * QUARTER], bar, place)


@gluon.jit
def _score(
    step,
    q,
    base: gl.constexpr,
    k,
    bars,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    MMA: gl.constexpr,
):
    """Start the scores [ROWS, KEYS] of ``step`` once its keys are loaded: four products, one after the other."""
    stage = step % STAGES
    mbarrier.wait(bars.index(stage), step // STAGES & 1)
    s = warpgroup_mma_init(gl.zeros([ROWS, KEYS], gl.float32, MMA))
    s = warpgroup_mma(q.index(base + 0), k.index(stage * 4).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q.index(base + 1), k.index(stage * 4 + 1).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma(q.index(base + 2), k.index(stage * 4 + 2).permute([1, 0]), s, is_async=True)
    return warpgroup_mma(q.index(base + 3), k.index(stage * 4 + 3).permute([1, 0]), s, is_async=True)


@gluon.jit
def _value(step, p, shrink, v, ones, z, o0, o1, at: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """``attention_gluon._value`` of quarters ``at`` and at + 1 of those that are held."""
    place = step % STAGES * HELD + at
    old = z * gl.convert_layout(shrink, gl.SliceLayout(1, z.type.layout))[:, None]
    z = warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, z.type.layout, 2)), ones.permute([1, 0]), old, is_async=True
    )
    p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
    o0 = warpgroup_mma(p, v.index(place), o0 * shrink[:, None], is_async=True)
    o1 = warpgroup_mma(p, v.index(place + 1), o1 * shrink[:, None], is_async=True)
    return z, o0, o1


@gluon.jit
def _forget_values(step, end, v, at: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr):
    """Zero the values of keys from ``end`` on in the group's quarters: what lies there may be NaN."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, BLOCKED))
    for i in gl.static_range(2):
        place = v.index(step % STAGES * HELD + at + i)
        held = place.load(BLOCKED)
        place.store(gl.where((keys < end)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _load_queries(q_ptr, q, base: gl.constexpr, ones, first, last, head, HEADS: gl.constexpr, GROUP: gl.constexpr,
                  ROWS: gl.constexpr, QUARTER: gl.constexpr, KEYS: gl.constexpr):  # fmt: skip
    """Put a group's queries, and the ones that row sums are products with, into shared memory."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    token = first + row // GROUP
    index = (token.to(gl.int64) * HEADS + head * GROUP + row % GROUP) * (4 * QUARTER)
    at = q_ptr + index[:, None] + gl.arange(0, QUARTER, gl.SliceLayout(0, LOADED))[None, :]
    for i in gl.static_range(4):
        q.index(base + i).store(gl.load(at + i * QUARTER, mask=(token < last)[:, None], other=0.0))
    ones.store(gl.full([8, KEYS], 1.0, q_ptr.dtype.element_ty, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def _store(out_ptr, first, last, head, column, position, z, a0, a1, HEADS: gl.constexpr, GROUP: gl.constexpr,
           ROWS: gl.constexpr, QUARTER: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    token = first + row // GROUP
    in_use = (token < last)[:, None]
    sees = position >= 0
    share = (1.0 / gl.where(sees, z, 1.0))[:, None]
    index = token.to(gl.int64) * HEADS + head * GROUP + row % GROUP
    at = out_ptr + (index * (4 * QUARTER) + column)[:, None] + gl.arange(0, QUARTER, gl.SliceLayout(0, MMA))[None, :]
    dtype = out_ptr.dtype.element_ty
    gl.store(at, gl.where(sees[:, None], a0 * share, 0.0).to(dtype), mask=in_use)
    gl.store(at + QUARTER, gl.where(sees[:, None], a1 * share, 0.0).to(dtype), mask=in_use)


@gluon.jit
def _attend(q, base: gl.constexpr, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, column, end,
            whole, steps, scale, at: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
            SPLIT: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr, STAGES: gl.constexpr,
            HELD: gl.constexpr):  # fmt: skip
    """One warp group's part: ``attention_gluon._attend`` of ROWS rows and the columns of two quarters.

    base: the place of its queries. column: the first of its columns. at: their place among the HELD quarters of values.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    EACH: gl.constexpr = SPLIT // KEYS
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)) // GROUP
    position = gl.load(positions_ptr + token, mask=token < last, other=-1)

    m, _, a0, a1 = _nothing(ROWS, QUARTER, MMA)
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    s = warpgroup_mma_wait(0, [_score(0, q, base, k, full, KEYS, STAGES, ROWS, MMA)])
    for split in range(whole):
        part_m, part_z, o0, o1 = _nothing(ROWS, QUARTER, MMA)
        for i in gl.static_range(EACH):
            step = split * EACH + i
            part_m, p, shrink = _weigh(s, part_m, scale, DTYPE)
            if i > 0:
                part_z, o0, o1 = warpgroup_mma_wait(0, [part_z, o0, o1])
                mbarrier.arrive(free.index((step - 1) % STAGES))
            following = _score(step + 1, q, base, k, full, KEYS, STAGES, ROWS, MMA)
            part_z, o0, o1 = _value(step, p, shrink, v, ones, part_z, o0, o1, at, STAGES, HELD, MMA)
            if i < EACH - 1:
                s = warpgroup_mma_wait(3, [following])
            else:
                s, part_z, o0, o1 = warpgroup_mma_wait(0, [following, part_z, o0, o1])
                mbarrier.arrive(free.index(step % STAGES))
        m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)

    part_m, part_z, o0, o1 = _nothing(ROWS, QUARTER, MMA)
    for step in range(whole * EACH, steps):
        if step % EACH == 0 and step > whole * EACH:
            m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)
            part_m, part_z, o0, o1 = _nothing(ROWS, QUARTER, MMA)
        keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
        s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        part_m, p, shrink = _weigh(s, part_m, scale, DTYPE)
        if (step + 1) * KEYS > end:
            _forget_values(step, end, v, at, KEYS, STAGES, HELD)
        part_z, o0, o1 = _value(step, p, shrink, v, ones, part_z, o0, o1, at, STAGES, HELD, MMA)
        part_z, o0, o1 = warpgroup_mma_wait(0, [part_z, o0, o1])
        mbarrier.arrive(free.index(step % STAGES))
        if step + 1 < steps:
            s = warpgroup_mma_wait(0, [_score(step + 1, q, base, k, full, KEYS, STAGES, ROWS, MMA)])
    m, z, a0, a1 = _merge(m, z, a0, a1, part_m, _row_sums(part_z, MMA), o0, o1)
    _store(out_ptr, first, last, head, column, position, z, a0, a1, HEADS, GROUP, ROWS, QUARTER, MMA)


@gluon.jit
def _share(first, last, part, EACH: gl.constexpr, COLUMNS: gl.constexpr):
    """A program's tokens, the first one of its second group, and the first quarter of its columns."""
    if COLUMNS:
        first = first + part * EACH
        return first, gl.maximum(gl.minimum(last, first + EACH), first), first, part * 0
    else:
        return first, last, first + EACH, part * 2


@gluon.jit
def _keys_seen(length, positions_ptr, first, last, TILE: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
               SPLIT: gl.constexpr):  # fmt: skip
    """(end of the keys that a tile sees, splits without masks, steps); at least one step has masks."""
    token = first + gl.arange(0, TILE, gl.BlockedLayout([1], [32], [4], [0])) // GROUP
    position = gl.load(positions_ptr + token, mask=token < last, other=-1)
    end = gl.maximum(gl.minimum(length, gl.max(position, 0) + 1), 0)
    seen_by_all = gl.min(gl.where(position >= 0, position, end - 1), 0) + 1
    whole = gl.maximum(gl.minimum(seen_by_all, end - 1), 0) // SPLIT
    return end, whole, gl.maximum((end + KEYS - 1) // KEYS, 1)


@gluon.jit
def _init(full, free, PAGES: gl.constexpr, STAGES: gl.constexpr):
    """A stage is full when its pages are loaded, free when both groups have read it."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PAGES)
        mbarrier.init(free.index(i), count=2)


@gluon.jit
def wide_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, out_ptr, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
    ROWS: gl.constexpr, QUARTER: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Two programs per tile of the work list (of 128 rows) and KV head; see ``attention_gluon``.

    With COLUMNS they are halves of its rows, otherwise of the output's columns. ROWS: of a warp group, 64.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    GROUP: gl.constexpr = HEADS // KV_HEADS
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    TILE: gl.constexpr = ROWS if COLUMNS else 2 * ROWS
    HELD: gl.constexpr = 4 if COLUMNS else 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    item, part = gl.program_id(0) // 2, gl.program_id(0) % 2
    if item < gl.load(count_ptr) * KV_HEADS:
        entry = work_ptr + item // KV_HEADS * 8
        head = item % KV_HEADS
        slot, length, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        first, last, second, quarter = _share(first, last, part, ROWS // GROUP, COLUMNS)
        end, whole, steps = _keys_seen(length, positions_ptr, first, last, TILE, GROUP, KEYS, SPLIT)

        q = gl.allocate_shared_memory(DTYPE, [TILE // ROWS * 4, ROWS, QUARTER], SHARED)
        k = gl.allocate_shared_memory(DTYPE, [STAGES * 4, KEYS, QUARTER], SHARED)
        v = gl.allocate_shared_memory(DTYPE, [STAGES * HELD, KEYS, QUARTER], SHARED)
        ones = gl.allocate_shared_memory(DTYPE, [8, KEYS], SHARED)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        _init(full, free, KEYS // PAGE, STAGES)
        OTHERS: gl.constexpr = 0 if COLUMNS else 4
        _load_queries(q_ptr, q, 0, ones, first, last, head, HEADS, GROUP, ROWS, QUARTER, KEYS)
        if not COLUMNS:
            _load_queries(q_ptr, q, 4, ones, second, last, head, HEADS, GROUP, ROWS, QUARTER, KEYS)
        fence_async_shared()
        _barrier()
        pages_ptr = table_ptr + slot.to(gl.int64) * max_pages
        SECOND: gl.constexpr = 2 if COLUMNS else 0
        gl.warp_specialize(
            [
                (_attend, (
                    q, 0, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, quarter * QUARTER, end,
                    whole, steps, scale, 0, HEADS, GROUP, KEYS, SPLIT, ROWS, QUARTER, STAGES, HELD)),
                (_attend, (
                    q, OTHERS, k, v, ones, full, free, out_ptr, positions_ptr, second, last, head,
                    (quarter + SECOND) * QUARTER, end, whole, steps, scale, SECOND, HEADS, GROUP, KEYS, SPLIT, ROWS,
                    QUARTER, STAGES, HELD)),
                (_load_pages, (0, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, quarter,
                               KV_HEADS, PAGE, KEYS, STAGES, QUARTER, HELD)),
                (_load_pages, (1, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, quarter,
                               KV_HEADS, PAGE, KEYS, STAGES, QUARTER, HELD)),
                (_load_pages, (2, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, quarter,
                               KV_HEADS, PAGE, KEYS, STAGES, QUARTER, HELD)),
                (_load_pages, (3, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, quarter,
                               KV_HEADS, PAGE, KEYS, STAGES, QUARTER, HELD)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip


def wide_sizes(rows: int, columns: bool | None = None, stages: int = STAGES) -> dict[str, int]:
    """The kernel's compile-time sizes beside heads, page and steps. rows: of a warp group. columns: None: COLUMNS."""
    return {"ROWS": rows, "QUARTER": HALF, "STAGES": stages, "COLUMNS": COLUMNS if columns is None else columns}
