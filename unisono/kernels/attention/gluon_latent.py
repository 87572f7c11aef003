"""Latent attention of long prompts on Hopper: the bits of ``latent_kernels``, faster.

All heads read the same latents, so a tile of 64 rows holds several tokens with all heads of a block. Two accumulators
of 512 columns for 64 rows (a split's and the merged one) would fill a multiprocessor's registers, so a program computes
256 columns of the outputs and the whole scores: half again as many products as needed, and each latent is read once for
both. One warp group computes the scores and the weights of a step, and hands them over in shared memory to two groups
with 128 columns each, which multiply them with the values while the scores of the next step are computed. A warp for
each page of a step loads it with the tensor memory accelerator: the columns that are no values of this program as soon
as the scores are computed, the values once both groups have multiplied them.

Every sum has the order of ``latent_kernels._latent_walk``: steps of 64 keys, splits of 256, merged in order by the same
formula. ``hopper_latent.exact_latent_attention`` compares both kernels on the present GPU.

Rows lie in chunks of 64 elements, the widest swizzle: latents first, then the part that rotates.
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

from unisono.kernels.attention.gluon import _row_sums, _weigh, keys_seen
from unisono.kernels.attention.gluon_rounds import forget_values
from unisono.kernels.hopper import block_barrier, stage_barriers

ROWS = 64
"""Rows of a program's tile."""

CHUNK = 64
"""Columns of a chunk: 128 bytes."""

VALUES = 4
"""Chunks of the values that a program computes: two for each of two warp groups."""

STAGES = 2
"""Steps whose latents are in shared memory at once."""

WARPS = 4


@gluon.jit
def load_step(turn, row, which, own, desc, k, bars, PAGE: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
              VALUES: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
    """Load a page, which begins at ``row``, into the stage of a program's step ``turn`` once its parts are unused.

    bars: barriers (full, read, free) of stages.
    """
    full, read, free = bars
    stage = turn % STAGES
    parity = (turn // STAGES & 1) ^ 1
    bar = full.index(stage)
    mbarrier.wait(read.index(stage), parity)
    mbarrier.expect(bar, CHUNKS * PAGE * CHUNK * 2)
    for i in gl.static_range(CHUNKS - VALUES):
        chunk = gl.where(i < own, i, i + VALUES)
        place = k.index(stage * CHUNKS + chunk).slice(which * PAGE, PAGE)
        tma.async_copy_global_to_shared(desc, [row, chunk * CHUNK], bar, place)
    mbarrier.wait(free.index(stage), parity)
    for i in gl.static_range(VALUES):
        place = k.index(stage * CHUNKS + own + i).slice(which * PAGE, PAGE)
        tma.async_copy_global_to_shared(desc, [row, (own + i) * CHUNK], bar, place)


@gluon.jit
def _load_pages(which, where, PAGE: gl.constexpr,
                KEYS: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr, VALUES: gl.constexpr,
                CHUNK: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step into its stage: chunks that are keys alone once their place has been ``read``,
    chunks ``own`` … own + VALUES - 1 once it is ``free``. The part of one warp.
    """
    desc, k, full, read, free, pages_ptr, last_page, own, steps = where
    each = KEYS // PAGE
    upcoming = gl.load(pages_ptr + gl.minimum(which, last_page))
    for step in range(steps):
        row = upcoming * PAGE
        upcoming = gl.load(pages_ptr + gl.minimum((step + 1) * each + which, last_page))  # a step ahead
        load_step(step, row, which, own, desc, k, (full, read, free), PAGE, STAGES, CHUNKS, VALUES, CHUNK)


@gluon.jit
def _score(step, q, k, full, CHUNKS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """Start the products of the scores [ROWS, KEYS] of ``step`` once its latents are loaded."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    s = warpgroup_mma_init(gl.zeros([ROWS, KEYS], gl.float32, MMA))
    s = warpgroup_mma(q.index(0), k.index(stage * CHUNKS).permute([1, 0]), s, use_acc=False, is_async=True)
    for i in gl.static_range(1, CHUNKS):
        s = warpgroup_mma(q.index(i), k.index(stage * CHUNKS + i).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _hand_over(ready, factors, first, second, third):
    """Store factors of rows, and hand them and all that was stored before to the groups that compute values."""
    factors.index(0).store(first)
    factors.index(1).store(second)
    factors.index(2).store(third)
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(ready)


@gluon.jit
def _weigh_steps(held, bars, positions_ptr, tile, scale, DTYPE: gl.constexpr, GROUP: gl.constexpr,
                 KEYS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr,
                 VALUES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Compute scores and weights of every step, hand over weights and factors, and at last each row's share.

    The part of one warp group.
    """
    q, k, p, ones, factors = held
    full, read, _, ready, taken, loaded = bars
    first, last, _, own, end, whole, steps = tile
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    EACH: gl.constexpr = SPLIT // KEYS
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)) // GROUP
    position = gl.load(positions_ptr + token, mask=token < last, other=-1)
    ones.store(gl.full([8, KEYS], 1.0, DTYPE, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))
    fence_async_shared()
    block_barrier()
    mbarrier.wait(loaded, 0)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    for split in range((steps + EACH - 1) // EACH):
        part_m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        part_z = gl.zeros([ROWS, 8], gl.float32, SUMS)
        for step in range(split * EACH, gl.minimum(split * EACH + EACH, steps)):
            stage = step % STAGES
            s = warpgroup_mma_wait(0, [_score(step, q, k, full, CHUNKS, KEYS, STAGES, ROWS, MMA)])
            block_barrier()
            mbarrier.arrive(read.index(stage))
            if split >= whole:
                keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
                s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
            part_m, weights, shrink = _weigh(s, part_m, scale, DTYPE)
            old_z = part_z * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
            part_z = warpgroup_mma(operand, ones.permute([1, 0]), old_z, is_async=True)
            top = gl.maximum(m, part_m)
            finite = gl.where(top == float("-inf"), 0.0, top)
            if (step + 1) * KEYS > end:
                forget_values(step, end, k, stage * CHUNKS + own, VALUES, 0, KEYS)
            mbarrier.wait(taken, (step & 1) ^ 1)
            p.store(weights)
            _hand_over(ready, factors, shrink, gl.exp2(m - finite), gl.exp2(part_m - finite))
            part_z = warpgroup_mma_wait(0, [part_z])
        m, z = _merge_sums(m, z, part_m, _row_sums(part_z, MMA))
    mbarrier.wait(taken, (steps & 1) ^ 1)
    sees = position >= 0
    share = 1.0 / gl.where(sees, z, 1.0)
    sees = gl.where(sees, 1.0, 0.0)
    _hand_over(ready, factors, share, sees, sees)


@gluon.jit
def _merge_sums(m, z, m1, z1):
    """Merge a later split's maxima and sums into an earlier one's, as ``split.merge`` does."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    return top, gl.fma(z, gl.exp2(m - finite), z1 * gl.exp2(m1 - finite))


@gluon.jit
def _merge_values(a, old, o, new):
    """Merge a later split's weighted values into an earlier one's, as ``split.merge`` does."""
    return gl.fma(a, gl.expand_dims(old, 1) + gl.zeros_like(a), o * new[:, None])


@gluon.jit
def _load_queries(group: gl.constexpr, q_ptr, q, loaded, first, last, head, HEADS: gl.constexpr, GROUP: gl.constexpr,
                  ROWS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
    """Store every second chunk of the queries in shared memory, with zeros for absent rows. The part of one group."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    token = first + row // GROUP
    index = (token.to(gl.int64) * HEADS + head * GROUP + row % GROUP) * (CHUNKS * CHUNK)
    at = q_ptr + index[:, None] + gl.arange(0, CHUNK, gl.SliceLayout(0, LOADED))[None, :]
    for i in gl.static_range(group, CHUNKS, 2):
        q.index(i).store(gl.load(at + i * CHUNK, mask=(token < last)[:, None], other=0.0))
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(loaded)


@gluon.jit
def add_weighted(turn, at, weights, shrink, o0, o1, k, full, free, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Add the weighted values of chunks ``at`` and at + 1 of a program's step ``turn`` to o0 and o1, and free them."""
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    place = stage * CHUNKS + at
    o0, o1 = o0 * shrink[:, None], o1 * shrink[:, None]
    o0 = warpgroup_mma(weights, k.index(place), o0, is_async=True)
    o1 = warpgroup_mma(weights, k.index(place + 1), o1, is_async=True)
    o0, o1 = warpgroup_mma_wait(0, [o0, o1])
    block_barrier()
    mbarrier.arrive(free.index(stage))
    return o0, o1


@gluon.jit
def _add_values(group: gl.constexpr, q_ptr, held, bars, out_ptr, tile, HEADS: gl.constexpr, GROUP: gl.constexpr,
                KEYS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, LATENT: gl.constexpr,
                CHUNKS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Load queries, add up the weighted values of two chunks and write the outputs. The part of one warp group, 0 or
    1.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    EACH: gl.constexpr = SPLIT // KEYS
    q, k, p, _, factors = held
    full, _, free, ready, taken, loaded = bars
    first, last, head, own, _, _, steps = tile
    _load_queries(group, q_ptr, q, loaded, first, last, head, HEADS, GROUP, ROWS, CHUNKS, CHUNK)
    a0 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
    a1 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
    at = own + 2 * group
    for split in range((steps + EACH - 1) // EACH):
        o0 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
        o1 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
        old = gl.zeros([ROWS], gl.float32, BY_ROW)
        new = gl.zeros([ROWS], gl.float32, BY_ROW)
        for step in range(split * EACH, gl.minimum(split * EACH + EACH, steps)):
            mbarrier.wait(ready, step & 1)
            shrink = factors.index(0).load(BY_ROW)
            old, new = factors.index(1).load(BY_ROW), factors.index(2).load(BY_ROW)
            weights = p.load(gl.DotOperandLayout(0, MMA, 2))
            block_barrier()  # all warps have read
            mbarrier.arrive(taken)
            o0, o1 = add_weighted(step, at, weights, shrink, o0, o1, k, full, free, CHUNKS, STAGES)
        a0, a1 = _merge_values(a0, old, o0, new), _merge_values(a1, old, o1, new)
    mbarrier.wait(ready, steps & 1)
    share, sees = factors.index(0).load(BY_ROW), factors.index(1).load(BY_ROW) > 0
    row = gl.arange(0, ROWS, BY_ROW)
    token = first + row // GROUP
    in_use = (token < last)[:, None]
    index = token.to(gl.int64) * HEADS + head * GROUP + row % GROUP
    to = out_ptr + (index * LATENT + at * CHUNK)[:, None] + gl.arange(0, CHUNK, gl.SliceLayout(0, MMA))[None, :]
    dtype = out_ptr.dtype.element_ty
    gl.store(to, gl.where(sees[:, None], a0 * share[:, None], 0.0).to(dtype), mask=in_use)
    gl.store(to + CHUNK, gl.where(sees[:, None], a1 * share[:, None], 0.0).to(dtype), mask=in_use)


@gluon.jit
def rooms(DTYPE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """Allocate queries, latents, weights of a step, ones, and factors of rows in shared memory."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(DTYPE, [CHUNKS, ROWS, CHUNK], SHARED)
    k = gl.allocate_shared_memory(DTYPE, [STAGES * CHUNKS, KEYS, CHUNK], SHARED)
    p = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SHARED)
    ones = gl.allocate_shared_memory(DTYPE, [8, KEYS], SHARED)
    factors = gl.allocate_shared_memory(gl.float32, [3, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return q, k, p, ones, factors


@gluon.jit
def barriers(STAGES: gl.constexpr, PAGES: gl.constexpr):
    """Allocate barriers of each stage (full, read, free), of weights (ready, taken), and of the queries."""
    full, free = stage_barriers(STAGES, PAGES, 2)
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(read.index(i), count=1)
    ready, taken, loaded = turns.index(0), turns.index(1), turns.index(2)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=2)
    mbarrier.init(loaded, count=2)
    fence_async_shared()
    block_barrier()
    return full, read, free, ready, taken, loaded


@gluon.jit
def latent_prompt_kernel(
    q_ptr, desc, table_ptr, positions_ptr, work_ptr, count_ptr, out_ptr, max_pages, scale,
    HEADS: gl.constexpr, BLOCKS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr,
    PARTS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr,
    VALUES: gl.constexpr, STAGES: gl.constexpr, ADDS: gl.constexpr, WEIGHS: gl.constexpr,
):  # fmt: skip
    """Attend with a program per item of the work list, part of its tile, block of heads and VALUES chunks of outputs.

    ADDS, WEIGHS: registers of a thread of the groups that add up values, and of the one that computes weights.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    GROUP: gl.constexpr = HEADS // BLOCKS
    CHUNKS: gl.constexpr = (LATENT + ROPE) // CHUNK
    PIECES: gl.constexpr = LATENT // (VALUES * CHUNK)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    own = gl.program_id(0) % PIECES * VALUES
    head = gl.program_id(0) // PIECES % BLOCKS
    part = gl.program_id(0) // (PIECES * BLOCKS) % PARTS
    item = gl.program_id(0) // (PIECES * BLOCKS * PARTS)
    if item < gl.load(count_ptr):
        entry = work_ptr + item * 8
        slot, length, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        first = first + part * (ROWS // GROUP)
        last = gl.maximum(gl.minimum(last, first + ROWS // GROUP), first)
        end, whole, steps = keys_seen(length, positions_ptr, first, last, ROWS, GROUP, KEYS, SPLIT)

        held = rooms(DTYPE, ROWS, KEYS, CHUNK, CHUNKS, STAGES)
        bars = barriers(STAGES, KEYS // PAGE)
        tile = first, last, head, own, end, whole, steps
        pages_ptr = table_ptr + slot.to(gl.int64) * max_pages
        where = desc, held[1], bars[0], bars[1], bars[2], pages_ptr, max_pages - 1, own, steps
        gl.warp_specialize(
            [
                (_add_values, (0, q_ptr, held, bars, out_ptr, tile, HEADS, GROUP, KEYS, SPLIT, ROWS, LATENT, CHUNKS,
                               CHUNK, STAGES)),
                (_add_values, (1, q_ptr, held, bars, out_ptr, tile, HEADS, GROUP, KEYS, SPLIT, ROWS, LATENT, CHUNKS,
                               CHUNK, STAGES)),
                (_weigh_steps, (held, bars, positions_ptr, tile, scale, DTYPE, GROUP, KEYS, SPLIT, ROWS, CHUNKS,
                                VALUES, STAGES)),
                (_load_pages, (0, where, PAGE, KEYS, STAGES, CHUNKS, VALUES, CHUNK)),
                (_load_pages, (1, where, PAGE, KEYS, STAGES, CHUNKS, VALUES, CHUNK)),
                (_load_pages, (2, where, PAGE, KEYS, STAGES, CHUNKS, VALUES, CHUNK)),
                (_load_pages, (3, where, PAGE, KEYS, STAGES, CHUNKS, VALUES, CHUNK)),
            ],
            [4, 4, 1, 1, 1, 1],
            [ADDS, WEIGHS, 24, 24, 24, 24],
        )  # fmt: skip
