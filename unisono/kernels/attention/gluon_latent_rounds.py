"""Latent attention of few rows on Hopper, as in rounds: the bits of ``latent_kernels``, faster.

The groups of ``gluon_latent.py``, for tiles that may be cut along KV: a program takes items of the work list one after
the other. A tile of 64 rows holds the heads of few tokens; the other rows are absent. The group that computes weights
hands over maxima and sums of each split, too. Each of the two groups that add up 128 columns merges splits of a whole
tile in registers. It keeps those of a cut tile in the workspace, counts them, and merges them in order if it is the
last one of its columns. Latents of tokens before the pass are loaded while the kernel ahead still runs.

Every sum has the order of ``latent_kernels._latent_walk``; ``hopper_latent.exact_latent_rounds`` compares both kernels
on the present GPU.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from unisono.kernels.attention.gluon import _merge, _row_sums, _weigh
from unisono.kernels.attention.gluon_latent import _load_queries, _score, add_weighted, barriers, load_step, rooms
from unisono.kernels.attention.gluon_rounds import forget_values
from unisono.kernels.hopper import block_barrier, order_loads
from unisono.kernels.overlap import follow, overlapping


@gluon.jit
def _item(work_ptr, turn, BLOCKS: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr, VALUES: gl.constexpr,
          GROUP: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Read an item: entry, (own chunks, head block, part), length, tokens, and splits: at least one.

    The number of programs is a multiple of PIECES: a program's own chunks are the same in every item, as the loads of
    the next item rely on. The reads bypass L1.
    """
    own, head, part = turn % PIECES * VALUES, turn // PIECES % BLOCKS, turn // (PIECES * BLOCKS) % PARTS
    entry = work_ptr + turn // (PIECES * BLOCKS * PARTS) * 8
    length = gl.load(entry + 1, cache_modifier=".cg")
    first = gl.load(entry + 2, cache_modifier=".cg") + part * (ROWS // GROUP)
    last = gl.maximum(gl.minimum(gl.load(entry + 3, cache_modifier=".cg"), first + ROWS // GROUP), first)
    begin = gl.load(entry + 4, cache_modifier=".cg")
    end = gl.maximum(gl.load(entry + 5, cache_modifier=".cg"), begin + 1)
    return entry, (own, head, part), length, first, last, begin, end


@gluon.jit
def _end_step(split, length, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """Step after the last of a split; the first split has at least one."""
    EACH: gl.constexpr = SPLIT // KEYS
    return gl.minimum(split * EACH + EACH, gl.maximum((length + KEYS - 1) // KEYS, 1))


@gluon.jit
def _load_pages(which, where, work, PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                CHUNKS: gl.constexpr, VALUES: gl.constexpr, CHUNK: gl.constexpr, BLOCKS: gl.constexpr,
                PARTS: gl.constexpr, PIECES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
                OVERLAP: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step into its stage, as ``gluon_latent._load_pages``. The part of one warp.

    Steps that may hold keys of the pass wait for the kernel that writes them.
    """
    desc, k, full, read, free, table_ptr, max_pages, tokens = where
    work_ptr, total = work
    each: gl.constexpr = KEYS // PAGE
    EACH: gl.constexpr = SPLIT // KEYS
    order_loads()
    step_turn = gl.to_tensor(0)
    for turn in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, place_of, length, _first, _last, begin, end = _item(
            work_ptr, turn, BLOCKS, PARTS, PIECES, VALUES, GROUP, ROWS
        )
        own = place_of[0]
        pages_ptr = table_ptr + gl.load(entry, cache_modifier=".cg").to(gl.int64) * max_pages
        at = gl.minimum(begin * EACH * each + which, max_pages - 1)
        upcoming = gl.load(pages_ptr + at, cache_modifier=".cg")
        written = gl.maximum(length - tokens, 0) // KEYS
        for step in range(begin * EACH, _end_step(end - 1, length, KEYS, SPLIT)):
            if step >= written:
                follow(OVERLAP)
            row = upcoming * PAGE
            ahead = gl.minimum((step + 1) * each + which, max_pages - 1)
            upcoming = gl.load(pages_ptr + ahead, cache_modifier=".cg")
            load_step(step_turn, row, which, own, desc, k, (full, read, free), PAGE, STAGES, CHUNKS, VALUES, CHUNK)
            step_turn += 1
    follow(OVERLAP)


@gluon.jit
def _hand_over(turn, ready, factors, first, second):
    """Hand factors of rows, and all that was stored before, to the groups that add up values."""
    factors.index(0).store(first)
    factors.index(1).store(second)
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(ready)
    return turn + 1


@gluon.jit
def _weigh_items(held, bars, positions_ptr, work, scale, DTYPE: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
                 SPLIT: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, VALUES: gl.constexpr,
                 STAGES: gl.constexpr, BLOCKS: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr,
                 FIRST: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Compute scores and weights of every item, and hand over weights of steps, and maxima and sums of splits.

    The part of one warp group.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    q, k, p, ones, factors = held
    full, read, _, ready, taken, loaded = bars
    work_ptr, total = work
    ones.store(gl.full([8, KEYS], 1.0, DTYPE, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))
    fence_async_shared()
    block_barrier()
    follow(OVERLAP)
    turn, step_turn, items = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        _entry, place_of, length, first, last, begin, end = _item(
            work_ptr, at, BLOCKS, PARTS, PIECES, VALUES, GROUP, ROWS
        )
        own = place_of[0]
        token = first + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)) // GROUP
        position = gl.load(positions_ptr + token, mask=token < last, other=-1)
        mbarrier.wait(loaded, items & 1)
        items += 1
        for split in range(begin, end):
            part_m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
            part_z = gl.zeros([ROWS, 8], gl.float32, SUMS)
            for step in range(split * (SPLIT // KEYS), _end_step(split, length, KEYS, SPLIT)):
                stage = step_turn % STAGES
                s = warpgroup_mma_wait(0, [_score(step_turn, q, k, full, CHUNKS, KEYS, STAGES, ROWS, MMA)])
                block_barrier()
                mbarrier.arrive(read.index(stage))
                keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
                visible = keys[None, :] <= position[:, None]
                if FIRST > 0:
                    visible = visible & (keys >= FIRST)[None, :]
                part_m, weights, shrink = _weigh(gl.where(visible, s, float("-inf")), part_m, scale, DTYPE)
                old_z = part_z * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
                operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
                part_z = warpgroup_mma(operand, ones.permute([1, 0]), old_z, is_async=True)
                if ((step + 1) * KEYS > length) | (step * KEYS < FIRST):
                    forget_values(step, length, k, stage * CHUNKS + own, VALUES, FIRST, KEYS)
                mbarrier.wait(taken, (turn & 1) ^ 1)
                p.store(weights)
                turn = _hand_over(turn, ready, factors, shrink, shrink)
                part_z = warpgroup_mma_wait(0, [part_z])
                step_turn += 1
            mbarrier.wait(taken, (turn & 1) ^ 1)
            turn = _hand_over(turn, ready, factors, part_m, _row_sums(part_z, MMA))


@gluon.jit
def _split_values(turn, step_turn, split, length, at, k, p, factors, full, free, ready, taken, KEYS: gl.constexpr,
                  SPLIT: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
                  STAGES: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Add up a split's weighted values: (turns, steps, maxima, sums, values of chunk ``at`` and the next)."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    o0 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
    o1 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
    for _step in range(split * (SPLIT // KEYS), _end_step(split, length, KEYS, SPLIT)):
        mbarrier.wait(ready, turn & 1)
        shrink = factors.index(0).load(BY_ROW)
        weights = p.load(gl.DotOperandLayout(0, MMA, 2))
        block_barrier()  # all warps have read
        mbarrier.arrive(taken)
        o0, o1 = add_weighted(step_turn, at, weights, shrink, o0, o1, k, full, free, CHUNKS, STAGES)
        turn += 1
        step_turn += 1
    mbarrier.wait(ready, turn & 1)
    m, z = factors.index(0).load(BY_ROW), factors.index(1).load(BY_ROW)
    block_barrier()
    mbarrier.arrive(taken)
    return turn + 1, step_turn, m, z, o0, o1


@gluon.jit
def _keep(state_ptr, acc_ptr, row, in_use, m, z, o0, o1, LATENT: gl.constexpr, CHUNK: gl.constexpr,
          MMA: gl.constexpr):  # fmt: skip
    """Write a split's state, as all groups do, and two chunks of values to rows ``row`` of the workspace."""
    gl.store(state_ptr + row * 2, m, mask=in_use)
    gl.store(state_ptr + row * 2 + 1, z, mask=in_use)
    values = acc_ptr + (row * LATENT)[:, None] + gl.arange(0, CHUNK, gl.SliceLayout(0, MMA))[None, :]
    gl.store(values, o0, mask=in_use[:, None])
    gl.store(values + CHUNK, o1, mask=in_use[:, None])


@gluon.jit
def _kept(state_ptr, acc_ptr, row, wanted, LATENT: gl.constexpr, CHUNK: gl.constexpr, MMA: gl.constexpr):
    """Read a split's state and one chunk of values, or empty ones. The reads bypass L1, which may hold older ones."""
    m = gl.load(state_ptr + row * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
    z = gl.load(state_ptr + row * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
    columns = gl.arange(0, CHUNK, gl.SliceLayout(0, MMA))[None, :]
    there = wanted[:, None] & (columns >= 0)
    a = gl.load(acc_ptr + (row * LATENT)[:, None] + columns, mask=there, other=0.0, cache_modifier=".cg")
    return m, z, a


@gluon.jit
def _merge_one(m, z, a, m1, z1, a1):
    """Merge a later split's state into an earlier one's, as ``split.merge`` does."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    old, new = gl.exp2(m - finite), gl.exp2(m1 - finite)
    a = gl.fma(a, gl.expand_dims(old, 1) + gl.zeros_like(a), a1 * new[:, None])
    return top, gl.fma(z, old, z1 * new), a


@gluon.jit
def _merge_kept(state_ptr, acc_ptr, row, in_use, stride, splits, ROWS: gl.constexpr, LATENT: gl.constexpr,
                CHUNK: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Merge a chunk of a tile's kept splits in order: (sums, values). Two of them are read together.

    row [ROWS]: rows of split 0 in the workspace.
    """
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    a = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
    for split in range(0, splits, 2):
        at = row + split * stride
        first = _kept(state_ptr, acc_ptr, at, in_use, LATENT, CHUNK, MMA)
        second = _kept(state_ptr, acc_ptr, at + stride, in_use & (split + 1 < splits), LATENT, CHUNK, MMA)
        m, z, a = _merge_one(m, z, a, first[0], first[1], first[2])
        m, z, a = _merge_one(m, z, a, second[0], second[1], second[2])
    return z, a


@gluon.jit
def _store(out_ptr, row, in_use, sees, z, a, LATENT: gl.constexpr, CHUNK: gl.constexpr, MMA: gl.constexpr):
    """Write a chunk of the outputs of rows ``row``."""
    share = 1.0 / gl.where(sees, z, 1.0)
    to = out_ptr + (row * LATENT)[:, None] + gl.arange(0, CHUNK, gl.SliceLayout(0, MMA))[None, :]
    value = gl.where(sees[:, None], a * share[:, None], 0.0)
    gl.store(to, value.to(out_ptr.dtype.element_ty), mask=in_use[:, None])


@gluon.jit
def _add_items(group: gl.constexpr, q_ptr, held, bars, out_ptr, positions_ptr, work, workspace, HEADS: gl.constexpr,
               GROUP: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, LATENT: gl.constexpr,
               CHUNKS: gl.constexpr, CHUNK: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr,
               BLOCKS: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr, TOKENS: gl.constexpr,
               FIRST: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load queries of every item, add up the values of two chunks and write the outputs of tiles that are complete.

    The part of one warp group, 0 or 1.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    q, k, p, _, factors = held
    full, _, free, ready, taken, loaded = bars
    work_ptr, total = work
    state_ptr, acc_ptr, arrivals_ptr = workspace
    follow(OVERLAP)
    turn, step_turn = gl.to_tensor(0), gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, place_of, length, first, last, begin, end = _item(
            work_ptr, item, BLOCKS, PARTS, PIECES, VALUES, GROUP, ROWS
        )
        own, head, part = place_of
        _load_queries(group, q_ptr, q, loaded, first, last, head, HEADS, GROUP, ROWS, CHUNKS, CHUNK)
        tile, partial = gl.load(entry + 2, cache_modifier=".cg"), gl.load(entry + 6, cache_modifier=".cg")
        row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        token = first + row // GROUP
        in_use = token < last
        position = gl.load(positions_ptr + token, mask=in_use, other=-1)
        index = token.to(gl.int64) * HEADS + head * GROUP + row % GROUP
        kept = index + (partial.to(gl.int64) * TOKENS - tile) * HEADS  # rows of split 0 in the workspace
        at = own + 2 * group
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
        a0 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
        a1 = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
        for split in range(begin, end):
            turn, step_turn, m1, z1, o0, o1 = _split_values(
                turn, step_turn, split, length, at, k, p, factors, full, free, ready, taken, KEYS, SPLIT, ROWS,
                CHUNKS, CHUNK, STAGES, MMA,
            )  # fmt: skip
            if partial >= 0:
                to = kept + split * (TOKENS * HEADS)
                _keep(state_ptr, acc_ptr + at * CHUNK, to, in_use, m1, z1, o0, o1, LATENT, CHUNK, MMA)
            else:
                m, z, a0, a1 = _merge(m, z, a0, a1, m1, z1, o0, o1)
        sees = position >= FIRST
        to = out_ptr + at * CHUNK
        if partial < 0:
            _store(to, index, in_use, sees, z, a0, LATENT, CHUNK, MMA)
            _store(to + CHUNK, index, in_use, sees, z, a1, LATENT, CHUNK, MMA)
        else:
            counter = gl.load(entry + 7, cache_modifier=".cg") + own // VALUES
            word = arrivals_ptr + (counter * TOKENS + part) * BLOCKS + head
            if _complete(word, end - begin, (length + SPLIT - 1) // SPLIT, group):
                for i in gl.static_range(2):
                    z, a0 = _merge_kept(
                        state_ptr, acc_ptr + (at + i) * CHUNK, kept, in_use, TOKENS * HEADS,
                        (length + SPLIT - 1) // SPLIT, ROWS, LATENT, CHUNK, MMA,
                    )  # fmt: skip
                    _store(to + i * CHUNK, index, in_use, sees, z, a0, LATENT, CHUNK, MMA)


@gluon.jit
def _complete(word, mine, splits, group: gl.constexpr):
    """Add this group's splits to its half of a count's word. True for the last one to arrive, which resets its half."""
    block_barrier()  # all of the group's stores come before its arrival
    arrived = gl.atomic_add(word, mine << (16 * group), sem="acq_rel", scope="gpu")
    last = ((arrived >> (16 * group)) & 65535) + mine == splits
    if last:
        gl.atomic_add(word, -(splits << (16 * group)), sem="relaxed", scope="gpu")
    return last


@overlapping(reads_early=True)
@gluon.jit
def latent_round_kernel(
    q_ptr, desc, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr, tokens,
    max_pages, scale,
    HEADS: gl.constexpr, BLOCKS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr,
    TOKENS: gl.constexpr, PARTS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr,
    CHUNK: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr,
    ADDS: gl.constexpr, WEIGHS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Share items × parts of a tile × blocks of heads × pieces of VALUES chunks among a fixed number of programs.

    tokens: tokens of the pass. ADDS, WEIGHS: registers of a thread of the groups. The work list and page tables are
    read before the kernel ahead has ended: see ``kernels/overlap.py``.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    GROUP: gl.constexpr = HEADS // BLOCKS
    CHUNKS: gl.constexpr = (LATENT + ROPE) // CHUNK
    PIECES: gl.constexpr = LATENT // (VALUES * CHUNK)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    held = rooms(DTYPE, ROWS, KEYS, CHUNK, CHUNKS, STAGES)
    bars = barriers(STAGES, KEYS // PAGE)
    work = work_ptr, gl.load(count_ptr, cache_modifier=".cg") * (PARTS * BLOCKS * PIECES)
    where = desc, held[1], bars[0], bars[1], bars[2], table_ptr, max_pages, tokens
    workspace = state_ptr, acc_ptr, arrivals_ptr
    gl.warp_specialize(
        [
            (_add_items, (0, q_ptr, held, bars, out_ptr, positions_ptr, work, workspace, HEADS, GROUP, KEYS, SPLIT,
                          ROWS, LATENT, CHUNKS, CHUNK, VALUES, STAGES, BLOCKS, PARTS, PIECES, TOKENS, FIRST,
                          OVERLAP)),
            (_add_items, (1, q_ptr, held, bars, out_ptr, positions_ptr, work, workspace, HEADS, GROUP, KEYS, SPLIT,
                          ROWS, LATENT, CHUNKS, CHUNK, VALUES, STAGES, BLOCKS, PARTS, PIECES, TOKENS, FIRST,
                          OVERLAP)),
            (_weigh_items, (held, bars, positions_ptr, work, scale, DTYPE, GROUP, KEYS, SPLIT, ROWS, CHUNKS, VALUES,
                            STAGES, BLOCKS, PARTS, PIECES, FIRST, OVERLAP)),
            (_load_pages, (0, where, work, PAGE, KEYS, SPLIT, STAGES, CHUNKS, VALUES, CHUNK, BLOCKS, PARTS, PIECES,
                           GROUP, ROWS, OVERLAP)),
            (_load_pages, (1, where, work, PAGE, KEYS, SPLIT, STAGES, CHUNKS, VALUES, CHUNK, BLOCKS, PARTS, PIECES,
                           GROUP, ROWS, OVERLAP)),
            (_load_pages, (2, where, work, PAGE, KEYS, SPLIT, STAGES, CHUNKS, VALUES, CHUNK, BLOCKS, PARTS, PIECES,
                           GROUP, ROWS, OVERLAP)),
            (_load_pages, (3, where, work, PAGE, KEYS, SPLIT, STAGES, CHUNKS, VALUES, CHUNK, BLOCKS, PARTS, PIECES,
                           GROUP, ROWS, OVERLAP)),
        ],
        [4, 4, 1, 1, 1, 1],
        [ADDS, WEIGHS, 24, 24, 24, 24],
    )  # fmt: skip
