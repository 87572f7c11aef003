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
def _walk(
    q, position, pages_ptr, k_ptr, v_ptr, page_stride, begin, end, low, window, scale, m, z, acc,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend keys ``begin … end`` in steps of KEYS and merge each split into the state (m, z, acc).

    ``begin`` is a multiple of KEYS. Keys below ``low`` and from ``end`` on are seen by no row of the tile and may
    be stale, NaN included: they are not read. MASKED False promises that every row sees every key.
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
        if (start + KEYS) % SPLIT == 0:
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
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, KV head). Later tiles, which see more keys, start first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    slot = tl.load(tiles_ptr + tile * 3)
    first, last = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
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
def _load_partial(state_ptr, acc_ptr, index, wanted, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Read a partial that another program wrote: past L1, which may hold an older layer's."""
    dims = tl.arange(0, DIM)
    m = tl.load(state_ptr + index * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
    z = tl.load(state_ptr + index * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
    mask = wanted[:, None] & (dims < HEAD_DIM)[None, :]
    offset = index[:, None] * HEAD_DIM + dims[None, :]
    return m, z, tl.load(acc_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_partials(
    state_ptr, acc_ptr, index, in_use, splits, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Merge a row's partials in order, reading four at a time to hide their latency."""
    m, z, acc = _nothing(ROWS, DIM)
    for i in range(0, splits, 4):
        m0, z0, acc0 = _load_partial(state_ptr, acc_ptr, index + i * stride, in_use, HEAD_DIM, DIM)
        second, third, fourth = in_use & (i + 1 < splits), in_use & (i + 2 < splits), in_use & (i + 3 < splits)
        m1, z1, acc1 = _load_partial(state_ptr, acc_ptr, index + (i + 1) * stride, second, HEAD_DIM, DIM)
        m2, z2, acc2 = _load_partial(state_ptr, acc_ptr, index + (i + 2) * stride, third, HEAD_DIM, DIM)
        m3, z3, acc3 = _load_partial(state_ptr, acc_ptr, index + (i + 3) * stride, fourth, HEAD_DIM, DIM)
        m, z, acc = _merge(m, z, acc, m0, z0, acc0)
        m, z, acc = _merge(m, z, acc, m1, z1, acc1)
        m, z, acc = _merge(m, z, acc, m2, z2, acc2)
        m, z, acc = _merge(m, z, acc, m3, z3, acc3)
    return z, acc


@triton.jit
def _entry(work_ptr, i):
    entry = work_ptr + i * 5
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr,
    state_ptr, acc_ptr, out_ptr, max_pages, page_stride, window, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the work list × query tiles × KV heads.

    A whole row is walked and written at once. A split's state goes to the workspace; the program that arrives
    last at its row's counter merges all of them, in order, and sets the counter back for the next layer.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    TILES: tl.constexpr = (WIDTH + TOKENS - 1) // TOKENS
    SHARES: tl.constexpr = TILES * KV_HEADS
    programs = tl.num_programs(0)
    upcoming = _entry(work_ptr, tl.program_id(0) // SHARES)  # read ahead: not after the count, nor after a walk
    total = tl.load(count_ptr) * SHARES
    for item in range(tl.program_id(0), total, programs):
        row, slot, length, split, partial = upcoming
        upcoming = _entry(work_ptr, tl.minimum(item + programs, total - 1) // SHARES)
        head = item % KV_HEADS
        tile = item // KV_HEADS % TILES
        first = row * WIDTH + tile * TOKENS
        last = tl.minimum(first + TOKENS, row * WIDTH + WIDTH)
        token, in_use, index = _rows(first, last, head, HEADS, GROUP, ROWS)
        dims = tl.arange(0, DIM)
        mask = in_use[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + index[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        position = tl.load(positions_ptr + token, mask=in_use, other=-1)
        begin, end, low = 0, length, 0
        if split >= 0:
            begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length)
        if WINDOW:
            low = tl.maximum(tl.min(tl.where(position >= 0, position, length)) - window + 1, 0)
            begin = tl.maximum(begin, low // KEYS * KEYS)
        m, z, acc = _nothing(ROWS, DIM)
        m, z, acc = _walk(
            q, position, table_ptr + slot.to(tl.int64) * max_pages, k_ptr + head * PAGE * HEAD_DIM,
            v_ptr + head * PAGE * HEAD_DIM, page_stride, begin, end, low, window, scale, m, z, acc,
            HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, MASKED=True,
        )  # fmt: skip
        if split < 0:
            _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM, DIM)
        else:
            stride = WIDTH * HEADS  # of a partial
            mine = index + (partial - row).to(tl.int64) * stride
            tl.store(state_ptr + mine * 2, m, mask=in_use)
            tl.store(state_ptr + mine * 2 + 1, z, mask=in_use)
            tl.store(acc_ptr + mine[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.debug_barrier()  # all of the program's stores come before its arrival
            counter = arrivals_ptr + (row * WIDTH + tile) * KV_HEADS + head
            splits = (length + SPLIT - 1) // SPLIT
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                begin_index = mine - split * stride
                z, acc = _merge_partials(state_ptr, acc_ptr, begin_index, in_use, splits, stride, ROWS, HEAD_DIM, DIM)
                _store(out_ptr, index, position, in_use, z, acc, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=["rows", "partials", "programs"])
def plan_kernel(
    slots_ptr, kv_len_ptr, work_ptr, count_ptr, arrivals_ptr, rows, partials, programs,
    COUNTERS: tl.constexpr, KV_HEADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``row`` lists its row's work: whole rows first, then the splits of the others."""
    row = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    splits = (tl.load(kv_len_ptr + each, mask=each < rows, other=0) + SPLIT - 1) // SPLIT
    share = tl.maximum(tl.sum(splits) * KV_HEADS // programs, 1)
    wanted = tl.cumsum(tl.where(splits > share, splits, 0))
    whole = ((splits <= share) | (wanted > partials)) & (each < rows)
    num_whole = tl.sum(whole.to(tl.int32))
    count = num_whole + tl.sum(tl.where(whole, 0, splits))

    is_whole = tl.sum(tl.where(each == row, whole.to(tl.int32), 0)) > 0
    partial = tl.sum(tl.where(each == row, wanted - splits, 0))
    entries = tl.sum(tl.where(each == row, splits, 0))
    at = num_whole + partial
    if is_whole:
        at = tl.sum(tl.where(each < row, whole.to(tl.int32), 0))
        entries = 1
    slot, length = tl.load(slots_ptr + row), tl.load(kv_len_ptr + row)
    for start in range(0, entries, 32):
        i = start + tl.arange(0, 32)
        entry = work_ptr + (at + i) * 5
        tl.store(entry, tl.zeros_like(i) + row, mask=i < entries)
        tl.store(entry + 1, tl.zeros_like(i) + slot, mask=i < entries)
        tl.store(entry + 2, tl.zeros_like(i) + length, mask=i < entries)
        tl.store(entry + 3, tl.where(is_whole, -1, i), mask=i < entries)
        tl.store(entry + 4, tl.where(is_whole, -1, partial + i), mask=i < entries)
    for start in range(0, COUNTERS, 32):
        i = start + tl.arange(0, 32)
        tl.store(arrivals_ptr + row * COUNTERS + i, tl.zeros_like(i), mask=i < COUNTERS)
    if row == 0:
        tl.store(count_ptr, count)


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
