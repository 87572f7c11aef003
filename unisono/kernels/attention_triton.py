"""The Triton kernels of attention: one walk over KV splits, two ways to share it out, and the plans.

Launched only by kernels/attention.py, whose docstring says what makes the bits invariant.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(m, z, acc, m1, z1, acc1):
    """Merge a later split's (row max, row sum, weighted values) into an earlier one's. THE formula."""
    top = tl.maximum(m, m1)
    finite = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - finite), tl.exp2(m1 - finite)
    return top, tl.fma(z, old, z1 * new), tl.fma(acc, old[:, None], acc1 * new[:, None])


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of rows that have seen no key: max -inf, sum 0, values 0."""
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    return lowest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def _keep(workspace, split, m, z, acc, HEAD_DIM: tl.constexpr):
    """Write a split's state to the workspace, where a row of a tile has ``index + split · stride``."""
    state_ptr, acc_ptr, index, in_use, stride = workspace
    at = index + split * stride
    dims = tl.arange(0, acc.shape[1])
    tl.store(state_ptr + at * 2, m, mask=in_use)
    tl.store(state_ptr + at * 2 + 1, z, mask=in_use)
    tl.store(acc_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_use[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _walk(
    q, position, pages_ptr, k_ptr, v_ptr, page_stride, begin, end, low, window, scale, m, z, acc,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, workspace=None,
):  # fmt: skip
    """Attend keys ``begin … end`` in steps of KEYS and merge each split into the state (m, z, acc).

    ``begin`` is a multiple of KEYS. Keys below ``low`` and from ``end`` on are seen by no row of the tile and may
    be stale, NaN included: they are not read. MASKED False promises that every row sees every key.
    Given a ``workspace`` with room for the row, each split but the last goes there instead.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    dims = tl.arange(0, DIM)
    ones = tl.full([KEYS, 8], 1.0, q.dtype)
    part_m, _, part_acc = _nothing(ROWS, DIM)
    part_z = tl.zeros([ROWS, 8], tl.float32)  # eight equal columns
    for start in tl.range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        if MASKED:
            known = (keys >= low) & (keys < end)
            page = tl.load(pages_ptr + keys // PAGE, mask=known, other=0)
        else:
            page = tl.load(pages_ptr + keys // PAGE)
        offset = (page.to(tl.int64) * page_stride + keys % PAGE * HEAD_DIM)[:, None] + dims[None, :]
        if MASKED:
            valid = known[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offset, mask=valid, other=0.0)
            v = tl.load(v_ptr + offset, mask=valid, other=0.0)
        elif DIM == HEAD_DIM:
            k = tl.load(k_ptr + offset)
            v = tl.load(v_ptr + offset)
        else:
            k = tl.load(k_ptr + offset, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + offset, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = keys[None, :] <= position[:, None]
            if WINDOW:
                visible &= keys[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(part_m, tl.max(scores, 1) * scale)
        finite = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(tl.fma(scores, scale, -finite[:, None])).to(v.dtype)
        shrink = tl.exp2(part_m - finite)[:, None]
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        part_acc = tl.dot(p, v, part_acc * shrink, input_precision="ieee")
        part_m = top
        if (start + KEYS) % SPLIT == 0 and start + KEYS < end:  # the last split is merged below
            if workspace is None:
                m, z, acc = _merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)
            elif workspace[-1] > 0:
                _keep(workspace, start // SPLIT, part_m, tl.max(part_z, 1), part_acc, HEAD_DIM)
            else:
                m, z, acc = _merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)
            part_m, _, part_acc = _nothing(ROWS, DIM)
            part_z = tl.zeros([ROWS, 8], tl.float32)
    return _merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)


@triton.jit
def _rows(first, last, head, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """A tile's rows, one per (token, query head of the group): token, in use?, index into [T, Hq]."""
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    return token, token < last, token.to(tl.int64) * HEADS + head * GROUP + row % GROUP


@triton.jit
def _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    dims = tl.arange(0, DIM)
    sees = position >= 0
    out = tl.where(sees[:, None], acc * (1.0 / tl.where(sees, z, 1.0))[:, None], 0.0)
    mask = in_use[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + index[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def extend_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, tiles_ptr, count_ptr, out_ptr,
    max_pages, page_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, part of it, KV head). Later tiles, which see more keys, start first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    turn = tl.num_programs(0) - 1 - tl.program_id(0)
    head = turn % KV_HEADS
    tile = turn // (KV_HEADS * PARTS)
    slot = tl.load(tiles_ptr + tile * 3)
    first, last = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    first += turn // KV_HEADS % PARTS * (ROWS // GROUP)
    last = tl.minimum(first + ROWS // GROUP, last)
    if tile < tl.load(count_ptr):
        token, in_use, index = _rows(first, last, head, HEADS, GROUP, ROWS)
        dims = tl.arange(0, DIM)
        mask = in_use[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + index[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        position = tl.load(positions_ptr + token, mask=in_use, other=-1)
        end = tl.max(position) + 1
        earliest = tl.min(tl.where(position >= 0, position, end))
        pages_ptr = table_ptr + slot.to(tl.int64) * max_pages
        k_ptr += head * PAGE * HEAD_DIM
        v_ptr += head * PAGE * HEAD_DIM
        m, z, acc = _nothing(ROWS, DIM)
        if WINDOW:
            low = tl.maximum(earliest - window + 1, 0)
            begin = low // KEYS * KEYS
        else:
            low = 0
            begin = (earliest + 1) // SPLIT * SPLIT  # every row sees every key of the splits before
            m, z, acc = _walk(
                q, position, pages_ptr, k_ptr, v_ptr, page_stride, 0, begin, 0, window, scale, m, z, acc,
                HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, MASKED=False,
            )  # fmt: skip
        m, z, acc = _walk(
            q, position, pages_ptr, k_ptr, v_ptr, page_stride, begin, end, low, window, scale, m, z, acc,
            HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, MASKED=True,
        )  # fmt: skip
        _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM, DIM)


@triton.jit
def _merge_kept(
    positions_ptr, state_ptr, acc_ptr, out_ptr, first, last, head, partial, first_split, end_split,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Merge a tile's splits out of the workspace, in order, and write its outputs.

    Several are read at once to hide their latency; past L1, which may hold an older layer's.
    """
    AT_ONCE: tl.constexpr = 16 if ROWS * DIM <= 1024 else 4
    token, in_use, index = _rows(first, last, head, HEADS, GROUP, ROWS)
    position = tl.load(positions_ptr + token, mask=in_use, other=-1)
    dims = tl.arange(0, DIM)
    m, z, acc = _nothing(ROWS, DIM)
    for start in range(first_split, end_split, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            wanted = in_use & (start + i < end_split)
            at = index + (partial + start + i).to(tl.int64) * STRIDE
            mask = wanted[:, None] & (dims < HEAD_DIM)[None, :]
            m1 = tl.load(state_ptr + at * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            z1 = tl.load(state_ptr + at * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
            values = acc_ptr + at[:, None] * HEAD_DIM + dims[None, :]
            acc1 = tl.load(values, mask=mask, other=0.0, cache_modifier=".cg")
            m, z, acc = _merge(m, z, acc, m1, z1, acc1)
    _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM, DIM)


@triton.jit
def _round_item(work_ptr, i):
    entry = work_ptr + i * 6
    row, slot, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    return row, slot, length, tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr,
    state_ptr, acc_ptr, out_ptr, max_pages, page_stride, window, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the work list × query tiles × KV heads.

    A whole row is walked, merged and written at once. A piece of a row leaves its splits in the workspace; the
    program that completes a row's count merges all of them, in order, and sets the count back for the next layer.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    TILES: tl.constexpr = (WIDTH + TOKENS - 1) // TOKENS
    STRIDE: tl.constexpr = WIDTH * HEADS  # of a split in the workspace
    upcoming = _round_item(work_ptr, tl.program_id(0) // (TILES * KV_HEADS))  # read ahead, here and below
    total = tl.load(count_ptr) * (TILES * KV_HEADS)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row, slot, length, first_split, end_split, partial = upcoming
        upcoming = _round_item(work_ptr, tl.minimum(item + tl.num_programs(0), total - 1) // (TILES * KV_HEADS))
        head = item % KV_HEADS
        tile = item // KV_HEADS % TILES
        first = row * WIDTH + tile * TOKENS
        last = tl.minimum(first + TOKENS, row * WIDTH + WIDTH)
        token, in_use, index = _rows(first, last, head, HEADS, GROUP, ROWS)
        dims = tl.arange(0, DIM)
        mask = in_use[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + index[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        position = tl.load(positions_ptr + token, mask=in_use, other=-1)
        begin, end, low = first_split * SPLIT, tl.minimum(end_split * SPLIT, length), 0
        if WINDOW:
            low = tl.maximum(tl.min(tl.where(position >= 0, position, length)) - window + 1, 0)
            begin = tl.maximum(begin, low // KEYS * KEYS)
        cut = partial >= 0
        workspace = (
            state_ptr,
            acc_ptr,
            index + (partial - row).to(tl.int64) * STRIDE,
            in_use,
            tl.where(cut, STRIDE, 0),
        )
        m, z, acc = _nothing(ROWS, DIM)
        m, z, acc = _walk(
            q, position, table_ptr + slot.to(tl.int64) * max_pages, k_ptr + head * PAGE * HEAD_DIM,
            v_ptr + head * PAGE * HEAD_DIM, page_stride, begin, end, low, window, scale, m, z, acc,
            HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, MASKED=True, workspace=workspace,
        )  # fmt: skip
        if cut:
            _keep(workspace, end_split - 1, m, z, acc, HEAD_DIM)
            tl.debug_barrier()  # all of the program's stores come before its arrival
            count = arrivals_ptr + (row * WIDTH + tile) * KV_HEADS + head
            splits = (length + SPLIT - 1) // SPLIT
            arriving = end_split - first_split
            if tl.atomic_add(count, arriving, sem="acq_rel") + arriving == splits:
                tl.store(count, 0)
                _merge_kept(
                    positions_ptr, state_ptr, acc_ptr, out_ptr, first, last, head, partial - row, low // SPLIT, splits,
                    STRIDE, HEADS, GROUP, USED, HEAD_DIM, DIM,
                )  # fmt: skip
        else:
            _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=["rows", "partials", "programs"])
def plan_kernel(
    slots_ptr, kv_len_ptr, work_ptr, count_ptr, arrivals_ptr, rows, partials, programs,
    COUNTERS: tl.constexpr, KV_HEADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``row`` lists its row's work: whole rows come first, then the pieces of the others."""
    row = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    splits = (tl.load(kv_len_ptr + each, mask=each < rows, other=0) + SPLIT - 1) // SPLIT
    share = tl.maximum((tl.sum(splits) * KV_HEADS + programs - 1) // programs, 1)
    room = tl.cumsum(tl.where(splits > share, splits, 0))
    cut = (splits > share) & (room <= partials)
    pieces = tl.where(cut, (splits + share - 1) // share, 0)
    whole = ((each < rows) & ~cut).to(tl.int32)
    wholes = tl.sum(whole)
    if row == 0:
        tl.store(count_ptr, wholes + tl.sum(pieces))

    me, before = each == row, each < row
    count = tl.sum(tl.where(me, pieces, 0))
    at = wholes + tl.sum(tl.where(before, pieces, 0))
    partial = tl.sum(tl.where(me, room - splits, 0))
    slot, length = tl.load(slots_ptr + row), tl.load(kv_len_ptr + row)
    total = (length + SPLIT - 1) // SPLIT
    if count == 0:
        count, at, partial = 1, tl.sum(tl.where(before, whole, 0)), -1
    size = (total + count - 1) // count
    for start in range(0, count, 32):
        i = start + tl.arange(0, 32)
        entry = work_ptr + (at + i) * 6
        tl.store(entry, tl.zeros_like(i) + row, mask=i < count)
        tl.store(entry + 1, tl.zeros_like(i) + slot, mask=i < count)
        tl.store(entry + 2, tl.zeros_like(i) + length, mask=i < count)
        tl.store(entry + 3, tl.minimum(i * size, total), mask=i < count)
        tl.store(entry + 4, tl.minimum((i + 1) * size, total), mask=i < count)
        tl.store(entry + 5, tl.zeros_like(i) + partial, mask=i < count)
    for start in range(0, COUNTERS, 32):
        i = start + tl.arange(0, 32)
        tl.store(arrivals_ptr + row * COUNTERS + i, tl.zeros_like(i), mask=i < COUNTERS)


@triton.jit(do_not_specialize=["rows", "num_tokens", "tile_tokens"])
def extend_plan_kernel(
    slots_ptr, query_start_ptr, tiles_ptr, count_ptr, rows, num_tokens, tile_tokens, BLOCK: tl.constexpr
):
    """Program ``row`` lists its row's tiles; the last program, those of the tokens that belong to no row."""
    row = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    begin = tl.load(query_start_ptr + each, mask=each <= rows, other=num_tokens)
    end = tl.load(query_start_ptr + each + 1, mask=each < rows, other=num_tokens)
    tiles = (end - begin + tile_tokens - 1) // tile_tokens
    at = tl.sum(tl.where(each < row, tiles, 0))
    entries = tl.sum(tl.where(each == row, tiles, 0))
    slot = tl.load(slots_ptr + row, mask=row < rows, other=0)
    first, last = tl.load(query_start_ptr + row), num_tokens
    if row < rows:
        last = tl.load(query_start_ptr + row + 1)
    for start in range(0, entries, 32):
        i = start + tl.arange(0, 32)
        entry = tiles_ptr + (at + i) * 3
        tl.store(entry, tl.zeros_like(i) + slot, mask=i < entries)
        tl.store(entry + 1, first + i * tile_tokens, mask=i < entries)
        tl.store(entry + 2, tl.minimum(first + (i + 1) * tile_tokens, last), mask=i < entries)
    if row == 0:
        tl.store(count_ptr, tl.sum(tiles))
