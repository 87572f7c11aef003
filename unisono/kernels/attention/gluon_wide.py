"""Attention of long prompts on Hopper for heads of 256, whose rows a warp group cannot hold.

A row's output of 256 and the merged one beside it take more registers than a thread has, so a program has 64 rows, and
each of its two warp groups half of the output's columns. A group computes the whole scores of its rows, a third more
products than needed, and shares nothing with the other one: every sum then has the order of
``triton_kernels._walk``, as in ``gluon.py``. (Groups of 64 rows each, with the columns in two programs, take 2 to 5 %
longer.) Heads are held in quarters of 64 elements, the widest swizzle. ``hopper.py`` proves the kernel and chooses it.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from unisono.kernels.attention.gluon import HALF, WARPS, attend, keys_seen, load_queries
from unisono.kernels.hopper import block_barrier, stage_barriers

__all__ = ["HEAD_DIM", "WARPS", "wide_attention_kernel", "wide_sizes"]

HEAD_DIM = 256
STAGES = 3
"""Steps whose keys and values are in shared memory at once. With 2 the compiler spills 448 bytes per thread, with 3 80:
1.7 times as long."""


@gluon.jit
def _load_pages(which, k_desc, v_desc, k, v, full, free, pages_ptr, last_page, head, steps, KV_HEADS: gl.constexpr,
                PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, QUARTER: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step's keys and values. The part of one warp."""
    each = KEYS // PAGE
    upcoming = gl.load(pages_ptr + gl.minimum(which, last_page))
    for step in range(steps):
        row = (upcoming * KV_HEADS + head) * PAGE
        upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, last_page))  # a step ahead
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 8 * PAGE * QUARTER * 2)
        for i in gl.static_range(4):
            place = k.index(stage * 4 + i).slice(which * PAGE, PAGE)
            tma.async_copy_global_to_shared(k_desc, [row, i * QUARTER], bar, place)
        for i in gl.static_range(4):
            place = v.index(stage * 4 + i).slice(which * PAGE, PAGE)
            tma.async_copy_global_to_shared(v_desc, [row, i * QUARTER], bar, place)


@gluon.jit
def wide_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, out_ptr, max_pages, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
    ROWS: gl.constexpr, QUARTER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with two programs of ROWS = 64 rows per tile of the work list and KV head; see ``gluon.py``."""
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    GROUP: gl.constexpr = HEADS // KV_HEADS
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    item, part = gl.program_id(0) // 2, gl.program_id(0) % 2
    if item < gl.load(count_ptr) * KV_HEADS:
        entry = work_ptr + item // KV_HEADS * 8
        head = item % KV_HEADS
        slot, length, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        first = first + part * (ROWS // GROUP)
        last = gl.maximum(gl.minimum(last, first + ROWS // GROUP), first)
        end, whole, steps = keys_seen(length, positions_ptr, first, last, ROWS, GROUP, KEYS, SPLIT)

        q = gl.allocate_shared_memory(DTYPE, [4, ROWS, QUARTER], SHARED)
        k = gl.allocate_shared_memory(DTYPE, [STAGES * 4, KEYS, QUARTER], SHARED)
        v = gl.allocate_shared_memory(DTYPE, [STAGES * 4, KEYS, QUARTER], SHARED)
        ones = gl.allocate_shared_memory(DTYPE, [8, KEYS], SHARED)
        full, free = stage_barriers(STAGES, KEYS // PAGE, 2)
        load_queries(q_ptr, q, 0, ones, first, last, head, 4, HEADS, GROUP, ROWS, QUARTER, KEYS)
        fence_async_shared()
        block_barrier()
        pages_ptr = table_ptr + slot.to(gl.int64) * max_pages
        gl.warp_specialize(
            [
                (attend, (
                    q, 0, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps, scale,
                    0, 4, HEADS, GROUP, KEYS, SPLIT, ROWS, QUARTER, STAGES)),
                (attend, (
                    q, 0, k, v, ones, full, free, out_ptr, positions_ptr, first, last, head, end, whole, steps, scale,
                    2, 4, HEADS, GROUP, KEYS, SPLIT, ROWS, QUARTER, STAGES)),
                (_load_pages, (0, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, KV_HEADS,
                               PAGE, KEYS, STAGES, QUARTER)),
                (_load_pages, (1, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, KV_HEADS,
                               PAGE, KEYS, STAGES, QUARTER)),
                (_load_pages, (2, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, KV_HEADS,
                               PAGE, KEYS, STAGES, QUARTER)),
                (_load_pages, (3, k_desc, v_desc, k, v, full, free, pages_ptr, max_pages - 1, head, steps, KV_HEADS,
                               PAGE, KEYS, STAGES, QUARTER)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip


def wide_sizes(rows: int) -> dict[str, int]:
    """Compile-time sizes of the kernel beside heads, page and steps. rows: rows of a program."""
    return {"ROWS": rows, "QUARTER": HALF, "STAGES": STAGES}
