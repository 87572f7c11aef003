"""Attention of few rows on Hopper for heads of 256 and 512, with a window or without: the bits of ``triton_kernels``.

As ``gluon_rounds.py``, with three differences. A row is PIECES pieces of 64 columns, and a tile is walked by several
programs where its rows' outputs would not fit into registers. Keys and values of a step are too large to be held three
times, so they take turns in one ring of stages: while a step's values are multiplied, the next keys arrive. Keys before
a tile's window are skipped by whole steps; a step without a visible key changes no bit of a state.

Shapes: N rows, padded to a power of two from 8 on; D = 64 PIECES.
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

from unisono.kernels.attention.gluon_rounds import forget_values, load_queries, tile_rows
from unisono.kernels.gemm.fp8_quantize import scale_for, scaled_by
from unisono.kernels.hopper import block_barrier, order_loads, stage_barriers
from unisono.kernels.overlap import follow, overlapping


@gluon.jit
def _and(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005


@gluon.jit
def _item(work_ptr, positions_ptr, item, window, KV_HEADS: gl.constexpr, PARTS: gl.constexpr, EACH: gl.constexpr,
          KEYS: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Read an item: its entry of the work list, KV head, part, length, first token, first key seen, first and end step.

    EACH: tokens of a part. The first key is a lower bound: that of the part's first token. The reads bypass L1.
    """
    entry, part = work_ptr + item // (KV_HEADS * PARTS) * 8, item // KV_HEADS % PARTS
    length = gl.load(entry + 1, cache_modifier=".cg")
    first = gl.load(entry + 2, cache_modifier=".cg") + part * EACH
    low = gl.to_tensor(0)
    if window is not None:
        inside = first < gl.load(entry + 3, cache_modifier=".cg")
        low = gl.load(positions_ptr + first, mask=inside, other=-1, cache_modifier=".cg") - window + 1
        low = gl.maximum(low, 0)
    begin = gl.load(entry + 4, cache_modifier=".cg") * (SPLIT // KEYS)
    end = gl.minimum(gl.load(entry + 5, cache_modifier=".cg") * (SPLIT // KEYS), (length + KEYS - 1) // KEYS)
    return entry, item % KV_HEADS, part, length, first, low, gl.maximum(begin, low // KEYS), end


@gluon.jit
def _load_pages(which, k_desc, v_desc, kv, full, free, table_ptr, positions_ptr, work_ptr, total, max_pages, tokens,
                window, KV_HEADS: gl.constexpr, PARTS: gl.constexpr, EACH: gl.constexpr,
                PAGE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                PIECES: gl.constexpr, PIECE: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load page ``which`` of every step's keys, then of its values, as stages become free. The part of one warp.

    tokens: tokens of the pass. Steps that may hold their keys wait for the kernel that writes them.
    """
    pages: gl.constexpr = KEYS // PAGE
    order_loads()
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, _, length, _, _, begin, end = _item(
            work_ptr, positions_ptr, item, window, KV_HEADS, PARTS, EACH, KEYS, SPLIT
        )  # fmt: skip
        pages_ptr = table_ptr + gl.load(entry, cache_modifier=".cg").to(gl.int64) * max_pages
        upcoming = gl.load(pages_ptr + gl.minimum(begin * pages + which, max_pages - 1), cache_modifier=".cg")
        written = gl.maximum(length - tokens, 0) // KEYS
        for step in range(begin, end):
            if step >= written:
                follow(OVERLAP, True)
            row = (upcoming * KV_HEADS + head) * PAGE
            ahead = gl.minimum((step + 1) * pages + which, max_pages - 1)
            upcoming = gl.load(pages_ptr + ahead, cache_modifier=".cg")
            for operand in gl.static_range(2):
                stage = turn % STAGES
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, PIECES * PAGE * PIECE * 2)
                for i in gl.static_range(PIECES):
                    place, at = kv.index(stage * PIECES + i).slice(which * PAGE, PAGE), [row, i * PIECE]
                    if operand == 0:
                        tma.async_copy_global_to_shared(k_desc, at, bar, place)
                    else:
                        tma.async_copy_global_to_shared(v_desc, at, bar, place)
                turn += 1
    follow(OVERLAP, True)


@gluon.jit
def _empty(ROWS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, MMA: gl.constexpr):
    """State of rows that have seen no key: maxima [ROWS], sums (in equal rows) and pieces of values [PIECE, ROWS]."""
    zeros = gl.zeros([PIECE, ROWS], gl.float32, MMA)
    values = ()
    for _ in gl.static_range(PIECES):
        values = _and(values, zeros)
    return gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, MMA)), zeros, values


@gluon.jit
def _merged(m, z, values, m1, z1, values1, PIECES: gl.constexpr):
    """Merge a later split's state into an earlier one's, as ``split.merge`` does."""
    top = gl.maximum(m, m1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    old = gl.expand_dims(gl.exp2(m - finite), 0) + gl.zeros_like(z)
    new = gl.expand_dims(gl.exp2(m1 - finite), 0) + gl.zeros_like(z)
    found = ()
    for i in gl.static_range(PIECES):
        found = _and(found, gl.fma(values[i], old, values1[i] * new))
    return top, gl.fma(z, old, z1 * new), found


@gluon.jit
def _step(step, turn, low, length, position, window, q, p, kv, full, free, ones, m, z, values, scale,
          KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
          MMA: gl.constexpr):  # fmt: skip
    """Attend a step's keys once they are loaded; returns the split's new state. turn: of the keys' stage."""
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    s = warpgroup_mma_init(gl.zeros([KEYS, ROWS], gl.float32, MMA))
    s = warpgroup_mma(kv.index(stage * PIECES), q.index(0).permute([1, 0]), s, use_acc=False, is_async=True)
    for i in gl.static_range(1, PIECES):
        s = warpgroup_mma(kv.index(stage * PIECES + i), q.index(i).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(free.index(stage))
    keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, MMA))
    visible = keys[:, None] <= position[None, :]
    if window is not None:
        visible = visible & (keys[:, None] > (position - window)[None, :])
    s = gl.where(visible, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 0) * scale)
    finite = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.exp2(gl.fma(s, scale, -finite[None, :])).to(q.dtype)
    shrink = gl.exp2(m - finite)[None, :]
    p.permute([1, 0]).store(weights)
    stage = (turn + 1) % STAGES
    mbarrier.wait(full.index(stage), (turn + 1) // STAGES & 1)
    if ((step + 1) * KEYS > length) | (step * KEYS < low):
        forget_values(step, length, kv, stage * PIECES, PIECES, low, KEYS)
    fence_async_shared()
    block_barrier()
    sums = (warpgroup_mma(ones, p.permute([1, 0]), z * shrink, is_async=True),)
    for i in gl.static_range(PIECES):
        piece = kv.index(stage * PIECES + i).permute([1, 0])
        product = warpgroup_mma(piece, p.permute([1, 0]), values[i] * shrink, is_async=True)
        sums = _and(sums, product)
    sums = warpgroup_mma_wait(0, sums)
    mbarrier.arrive(free.index(stage))
    values = ()
    for i in gl.static_range(PIECES):
        values = _and(values, sums[i + 1])
    return top, sums[0], values


@gluon.jit
def _places(row_of, own, HEADS: gl.constexpr, GROUP: gl.constexpr, CAPACITY: gl.constexpr, ROWS: gl.constexpr,
            PIECES: gl.constexpr, PIECE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Addresses of a split's maxima and values in the workspace, and the masks of rows it has room for.

    row_of: the split's row for the KV head's first query head at the tile's first token, of rows for each place, token
    of a tile and query head, as in ``attention_kernel``. own: the part's first row in the tile.
    """
    row = own + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    dims = gl.arange(0, PIECE, gl.SliceLayout(1, MMA))
    fits = row < CAPACITY
    at = row_of + row // GROUP * HEADS + row % GROUP
    return at * 2, at[None, :] * (PIECES * PIECE) + dims[:, None], fits, fits[None, :] & (dims >= 0)[:, None]


@gluon.jit
def _keep(state_ptr, acc_ptr, row_of, own, m, z, values, HEADS: gl.constexpr, GROUP: gl.constexpr,
          CAPACITY: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr,
          MMA: gl.constexpr):  # fmt: skip
    """Write a split's state to the workspace."""
    state, at, fits, there = _places(row_of, own, HEADS, GROUP, CAPACITY, ROWS, PIECES, PIECE, MMA)
    dims = gl.arange(0, PIECE, gl.SliceLayout(1, MMA))
    gl.store(state_ptr + state, m, mask=fits)
    gl.store(state_ptr + (state + 1)[None, :] + (dims * 0)[:, None], z, mask=there & (dims == 0)[:, None])
    for i in gl.static_range(PIECES):
        gl.store(acc_ptr + at + i * PIECE, values[i], mask=there)


@gluon.jit
def _kept(state_ptr, acc_ptr, row_of, wanted, own, HEADS: gl.constexpr, GROUP: gl.constexpr, CAPACITY: gl.constexpr,
          ROWS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Read a state that :func:`_keep` has written, or an empty one. The reads bypass L1, which may hold an older
    layer's."""
    state, at, fits, there = _places(row_of, own, HEADS, GROUP, CAPACITY, ROWS, PIECES, PIECE, MMA)
    fits, there = fits & wanted, there & wanted
    m = gl.load(state_ptr + state, mask=fits, other=float("-inf"), cache_modifier=".cg")
    z = gl.load(state_ptr + state + 1, mask=fits, other=0.0, cache_modifier=".cg")
    values = ()
    for i in gl.static_range(PIECES):
        piece = gl.load(acc_ptr + at + i * PIECE, mask=there, other=0.0, cache_modifier=".cg")
        values = _and(values, piece)
    return m, gl.expand_dims(z, 0) + gl.zeros([PIECE, ROWS], gl.float32, MMA), values


@gluon.jit
def _merge_kept(state_ptr, acc_ptr, row_of, splits, own, HEADS: gl.constexpr, GROUP: gl.constexpr,
                AT_ONCE: gl.constexpr, CAPACITY: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr,
                PIECE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Merge the states of a tile's splits in order, from ``row_of`` on; AT_ONCE of them are read together."""
    TOKENS: gl.constexpr = CAPACITY // GROUP
    m, z, values = _empty(ROWS, PIECES, PIECE, MMA)
    for start in range(0, splits, AT_ONCE):
        read = ()
        for i in gl.static_range(AT_ONCE):
            at = row_of + (start + i) * (TOKENS * HEADS)
            one = _kept(state_ptr, acc_ptr, at, start + i < splits, own, HEADS, GROUP, CAPACITY, ROWS, PIECES, PIECE,
                        MMA)  # fmt: skip
            read = _and(read, one)
        for i in gl.static_range(AT_ONCE):
            m, z, values = _merged(m, z, values, read[i][0], read[i][1], read[i][2], PIECES)
    return z, values


@gluon.jit
def _store_wide(outs, q, first, last, head, position, z, values, HEADS: gl.constexpr, GROUP: gl.constexpr,
                ROWS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Write the outputs of a part's rows, rounded to the queries' dtype, and quantised if outputs are e4m3.

    They replace the queries in shared memory first, so that a row's elements are stored together. outs: (outputs,
    scales, tokens, padded tokens); the last three are for e4m3 outputs, of which two pieces share a scale.
    """
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_ptr, scales_ptr, tokens, padded = outs
    kind: gl.constexpr = out_ptr.dtype.element_ty
    sees = (position >= 0)[None, :] & (gl.arange(0, PIECE, gl.SliceLayout(1, MMA)) >= 0)[:, None]
    share = 1.0 / gl.where(sees, z, 1.0)
    block_barrier()  # all warps have multiplied the queries
    for i in gl.static_range(PIECES):
        q.index(i).permute([1, 0]).store(gl.where(sees, values[i] * share, 0.0).to(q.dtype))
    block_barrier()
    token, own, in_use = tile_rows(first, last, head, HEADS, GROUP, ROWS, gl.SliceLayout(1, BY_ROW))
    dims = gl.arange(0, PIECE, gl.SliceLayout(0, BY_ROW))
    to = out_ptr + ((token.to(gl.int64) * HEADS + own) * (PIECES * PIECE))[:, None] + dims[None, :]
    there = in_use[:, None] & (dims >= 0)[None, :]
    for group in gl.static_range(PIECES // 2):
        a0, a1 = q.index(2 * group).load(BY_ROW), q.index(2 * group + 1).load(BY_ROW)
        at = to + 2 * group * PIECE
        if kind == q.dtype:
            gl.store(at, a0, mask=there)
            gl.store(at + PIECE, a1, mask=there)
        else:
            a0, a1 = a0.to(gl.float32), a1.to(gl.float32)
            scale = scale_for(gl.maximum(gl.max(gl.abs(a0), 1), gl.max(gl.abs(a1), 1)))
            scale_at = scales_ptr + (own * (PIECES // 2) + group) * padded + token
            gl.store(scale_at, scale, mask=in_use)
            gl.store(at, scaled_by(a0, scale).to(kind), mask=there)
            gl.store(at + PIECE, scaled_by(a1, scale).to(kind), mask=there)
            for i in gl.static_range(1, 4):  # the padding, which follows the last token
                beyond = in_use & (token == tokens - 1) & (tokens - 1 + i < padded)
                gl.store(scale_at + i, scale_for(gl.zeros_like(scale)), mask=beyond)
                after, nothing = there & beyond[:, None], gl.zeros_like(a0).to(kind)
                gl.store(at + i * HEADS * PIECES * PIECE, nothing, mask=after)
                gl.store(at + (i * HEADS * PIECES + 1) * PIECE, nothing, mask=after)


@gluon.jit
def _attend_items(q_ptr, q, p, kv, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr, outs,
                  window, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PARTS: gl.constexpr, EACH: gl.constexpr,
                  TOKENS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, AT_ONCE: gl.constexpr,
                  ROWS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr,
                  OVERLAP: gl.constexpr, MERGE: gl.constexpr):  # fmt: skip
    """Attend every item of this program, and merge a tile's splits if it is the last. The warp group's part."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUP: gl.constexpr = HEADS // KV_HEADS
    CAPACITY: gl.constexpr = TOKENS * GROUP
    STEPS: gl.constexpr = SPLIT // KEYS
    ones = gl.full([PIECE, KEYS], 1.0, q.dtype, gl.DotOperandLayout(0, MMA, 2))
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        entry, head, part, length, first, low, begin, end = _item(
            work_ptr, positions_ptr, item, window, KV_HEADS, PARTS, EACH, KEYS, SPLIT
        )  # fmt: skip
        last = gl.minimum(gl.load(entry + 3, cache_modifier=".cg"), first + EACH)
        first_split, end_split = gl.load(entry + 4, cache_modifier=".cg"), gl.load(entry + 5, cache_modifier=".cg")
        partial, counter = gl.load(entry + 6, cache_modifier=".cg"), gl.load(entry + 7, cache_modifier=".cg")
        skipped = gl.load(work_ptr + counter * 8 + 4, cache_modifier=".cg")  # splits that the plan leaves out
        follow(OVERLAP, True)
        token, _, in_use = tile_rows(first, last, head, HEADS, GROUP, ROWS, gl.SliceLayout(0, MMA))
        position, own = gl.load(positions_ptr + token, mask=in_use, other=-1), part * EACH * GROUP
        row_of = (partial - skipped).to(gl.int64) * (TOKENS * HEADS) + head * GROUP  # of split 0
        load_queries(q_ptr, q, first, last, head, HEADS, GROUP, ROWS, PIECES, PIECE)
        fence_async_shared()
        block_barrier()
        m, z, values = _empty(ROWS, PIECES, PIECE, MMA)
        part_m, part_z, part_values = _empty(ROWS, PIECES, PIECE, MMA)
        for step in range(begin, end):
            if (step % STEPS == 0) & (step > begin):
                if partial >= 0:
                    _keep(state_ptr, acc_ptr, row_of + (step // STEPS - 1) * (TOKENS * HEADS), own, part_m, part_z,
                          part_values, HEADS, GROUP, CAPACITY, ROWS, PIECES, PIECE, MMA)  # fmt: skip
                else:
                    m, z, values = _merged(m, z, values, part_m, part_z, part_values, PIECES)
                part_m, part_z, part_values = _empty(ROWS, PIECES, PIECE, MMA)
            part_m, part_z, part_values = _step(
                step, turn, low, length, position, window, q, p, kv, full, free, ones, part_m, part_z, part_values,
                scale, KEYS, ROWS, STAGES, PIECES, MMA,
            )  # fmt: skip
            turn += 2
        m, z, values = _merged(m, z, values, part_m, part_z, part_values, PIECES)
        if partial < 0:
            _store_wide(outs, q, first, last, head, position, z, values, HEADS, GROUP, ROWS, PIECES, PIECE, MMA)
        else:
            _keep(state_ptr, acc_ptr, row_of + (end_split - 1) * (TOKENS * HEADS), own, m, z, values, HEADS, GROUP,
                  CAPACITY, ROWS, PIECES, PIECE, MMA)  # fmt: skip
            if MERGE:
                block_barrier()  # all of the group's stores come before its arrival
                splits, mine = (length + SPLIT - 1) // SPLIT, end_split - first_split
                since = gl.maximum(skipped, low // SPLIT)
                arrivals = arrivals_ptr + (counter * TOKENS + part) * KV_HEADS + head
                if gl.atomic_add(arrivals, mine, sem="acq_rel", scope="gpu") + mine == splits - skipped:
                    gl.store(arrivals, 0)
                    z, values = _merge_kept(state_ptr, acc_ptr, row_of + since * (TOKENS * HEADS), splits - since, own,
                                            HEADS, GROUP, AT_ONCE, CAPACITY, ROWS, PIECES, PIECE, MMA)  # fmt: skip
                    _store_wide(outs, q, first, last, head, position, z, values, HEADS, GROUP, ROWS, PIECES, PIECE, MMA)
    follow(OVERLAP, True)


@overlapping(reads_early=True, leads=True)
@gluon.jit
def wide_round_attention_kernel(
    q_ptr, k_desc, v_desc, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    scales_ptr, tokens, padded, max_pages, window, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, MERGE: gl.constexpr = True,
):  # fmt: skip
    """Share the work list × parts of a tile × KV heads among programs; see ``gluon_rounds.round_attention_kernel``.

    window: positions a token sees, or None. MERGE: cut tiles are merged here, not by the next kernel. Positions, the
    work list and page tables are read before the kernel ahead has ended: they are older than the products before it.
    """
    gl.static_assert(KEYS == 4 * PAGE, "a warp for each page of a step")
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    EACH: gl.constexpr = ROWS // (HEADS // KV_HEADS) if PARTS > 1 else TOKENS
    q = gl.allocate_shared_memory(DTYPE, [PIECES, ROWS, PIECE], SHARED)
    p = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SHARED)
    kv = gl.allocate_shared_memory(DTYPE, [STAGES * PIECES, KEYS, PIECE], SHARED)
    full, free = stage_barriers(STAGES, KEYS // PAGE, 1)
    fence_async_shared()
    block_barrier()
    total = gl.load(count_ptr, cache_modifier=".cg") * (KV_HEADS * PARTS)
    outs = out_ptr, scales_ptr, tokens, padded
    gl.warp_specialize(
        [
            (_attend_items, (
                q_ptr, q, p, kv, full, free, positions_ptr, work_ptr, total, arrivals_ptr, state_ptr, acc_ptr, outs,
                window, scale, HEADS, KV_HEADS, PARTS, EACH, TOKENS, KEYS, SPLIT, AT_ONCE, ROWS, STAGES, PIECES,
                PIECE, OVERLAP, MERGE)),
            (_load_pages, (0, k_desc, v_desc, kv, full, free, table_ptr, positions_ptr, work_ptr, total, max_pages,
                           tokens, window, KV_HEADS, PARTS, EACH, PAGE, KEYS, SPLIT, STAGES, PIECES, PIECE,
                           OVERLAP)),
            (_load_pages, (1, k_desc, v_desc, kv, full, free, table_ptr, positions_ptr, work_ptr, total, max_pages,
                           tokens, window, KV_HEADS, PARTS, EACH, PAGE, KEYS, SPLIT, STAGES, PIECES, PIECE,
                           OVERLAP)),
            (_load_pages, (2, k_desc, v_desc, kv, full, free, table_ptr, positions_ptr, work_ptr, total, max_pages,
                           tokens, window, KV_HEADS, PARTS, EACH, PAGE, KEYS, SPLIT, STAGES, PIECES, PIECE,
                           OVERLAP)),
            (_load_pages, (3, k_desc, v_desc, kv, full, free, table_ptr, positions_ptr, work_ptr, total, max_pages,
                           tokens, window, KV_HEADS, PARTS, EACH, PAGE, KEYS, SPLIT, STAGES, PIECES, PIECE,
                           OVERLAP)),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip
