"""Triton kernels of attention: the walk over KV splits, and the plan that divides it among programs.

Launched only by ``kernels/attention/paged.py``, whose docstring explains why the bits are invariant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.attention.e4m3 import begin_e4m3, factors, finish_e4m3, in_order, side_by_side, walk_halves
from unisono.kernels.attention.split import LOG2_E, find_keys, hide, keep, merge, nothing, tiles, values, weigh
from unisono.kernels.gemm.fp8_quantize import scaled_by, scales_of
from unisono.kernels.overlap import follow, overlapping, publish


@triton.jit
def _walk(
    q, position, pages_ptr, k_ptr, v_ptr, scales, page_stride, begin, end, low, window, scale, m, z, acc,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr, TO_CAP: tl.constexpr, workspace,
):  # fmt: skip
    """Attend keys ``begin … end`` in steps of KEYS and merge each split into the state (m, z, acc).

    ``begin`` is a multiple of KEYS. Keys below ``low`` and from ``end`` on are seen by no row of the tile and may
    be stale, NaN included: they are not read. MASKED False promises that every row sees every key.
    TO_CAP > 0 soft-caps the scores: tanh(TO_CAP · score) takes the place of each score, and ``scale`` holds the cap.
    A tile with a place in the ``workspace`` (or None) leaves each split but the last there instead.
    scales: None, or the arguments of ``e4m3.factors``; q and acc then have their columns side by side.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    PACKED: tl.constexpr = 1 if scales is None else 2  # elements of a row that one of memory holds
    dims = tl.arange(0, DIM // PACKED)
    ones = tl.full([KEYS, 8], 1.0, q.dtype)
    part_m, _, part_acc = nothing(ROWS, DIM)
    part_z = tl.zeros([ROWS, 8], tl.float32)  # eight equal columns
    for start in tl.range(begin, end, KEYS):
        if start % SPLIT == 0 and start > begin:  # a split is complete; the last one is merged below
            z1 = tl.max(part_z, 1)
            if workspace is None:
                m, z, acc = merge(m, z, acc, part_m, z1, part_acc)
            elif workspace[-1] > 0:
                kept = part_acc if scales is None else in_order(part_acc)
                keep(workspace, start // SPLIT - 1, part_m, z1, kept, HEAD_DIM)
            else:
                m, z, acc = merge(m, z, acc, part_m, z1, part_acc)
            part_m, _, part_acc = nothing(ROWS, DIM)
            part_z = tl.zeros([ROWS, 8], tl.float32)
        keys, known, offset = find_keys(
            pages_ptr, start, end, low, page_stride, HEAD_DIM // PACKED, DIM // PACKED, PAGE, KEYS,
            WINDOW or FIRST > 0, MASKED,
        )  # fmt: skip
        k, v = tiles(k_ptr, v_ptr, offset, known, dims, HEAD_DIM // PACKED, MASKED)
        if scales is not None:
            k_factor, v_factor = factors(scales, pages_ptr, start, low, end, known, PAGE, KEYS, MASKED)
            k, v = side_by_side(k, k_factor, q.dtype), side_by_side(v, v_factor, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = hide(scores, keys, position, window, WINDOW, FIRST, MASKED, TO_CAP)
        part_m, p, shrink = weigh(scores, scale, part_m, q.dtype)
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        part_acc = tl.dot(p, v, part_acc * shrink, input_precision="ieee")
    return merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)


@triton.jit
def _attend(
    q, position, pages_ptr, k_ptr, v_ptr, scales, page_stride, begin, end, low, window, scale,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, TO_CAP: tl.constexpr, CUT: tl.constexpr, workspace,
):  # fmt: skip
    """Walk the keys of an item of the work list: the state (m, z, acc) of a tile's rows; see :func:`_walk`.

    In a tile that is not CUT only the keys of the last visible split need masks.
    """
    FEW: tl.constexpr = q.shape[0] < 64
    walk: tl.constexpr = walk_halves if FEW and scales is not None else _walk
    if scales is None:
        m, z, acc = nothing(q.shape[0], q.shape[1])
    else:
        q, m, z, acc = begin_e4m3(q, FEW)
    if not CUT:
        end = tl.minimum(end, tl.max(position) + 1)
        if not WINDOW and FIRST == 0:
            masked = (tl.min(tl.where(position >= 0, position, end - 1)) + 1) // SPLIT * SPLIT
            m, z, acc = walk(
                q, position, pages_ptr, k_ptr, v_ptr, scales, page_stride, begin, masked, low, window, scale,
                m, z, acc, HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, FIRST, False, TO_CAP, workspace,
            )  # fmt: skip
            begin = masked
    m, z, acc = walk(
        q, position, pages_ptr, k_ptr, v_ptr, scales, page_stride, begin, end, low, window, scale,
        m, z, acc, HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, FIRST, True, TO_CAP, workspace,
    )  # fmt: skip
    if scales is not None:
        acc = finish_e4m3(acc, FEW)
    return m, z, acc


@triton.jit
def _rows(positions_ptr, first, last, head, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Rows of a tile, one per (token, query head of the group): mask, index into [tokens, Hq], position."""
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    index = token.to(tl.int64) * HEADS + head * GROUP + row % GROUP
    return token < last, index, tl.load(positions_ptr + token, mask=token < last, other=-1)


@triton.jit
def _both_ways(until_ptr, position, window, first, last, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Last position that each row of a tile sees [ROWS], and its window from there back [ROWS, 1]: it begins where the
    window of its own position does.
    """
    token = first + tl.arange(0, ROWS) // GROUP
    until = tl.load(until_ptr + token, mask=token < last, other=-1)
    return until, (window + until - position)[:, None]


@triton.jit
def _queries(q_ptr, index, in_use, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    offset, mask = values(index, in_use, HEAD_DIM, DIM)
    return tl.load(q_ptr + offset, mask=mask, other=0.0)


@triton.jit
def _first_seen(position, window):
    """First key that any row of a tile sees; rows at position -1 see nothing."""
    return tl.maximum(tl.min(tl.where(position >= 0, position, 2**30)) - window + 1, 0)


@triton.jit
def _merge_sinks(sinks_ptr, index, in_use, m, z, acc, HEADS: tl.constexpr):
    """Merge each row's sink, after all splits: a key with the sink as score and zeros as value."""
    sink = tl.load(sinks_ptr + index % HEADS, mask=in_use, other=0.0)
    score = tl.fma(sink, tl.full(sink.shape, LOG2_E, tl.float32), 0.0)  # a plain product could be contracted in _merge
    return merge(m, z, acc, score, tl.full(sink.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32))


@triton.jit
def _store(
    outs, index, position, in_use, m, z, acc, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile's rows from their final state, with the sinks merged.

    outs: (outputs, sinks or None, scales, queries, tokens, padded); the last four are None unless outputs are e4m3.
    """
    out_ptr, sinks_ptr, scales_ptr, q_ptr, tokens, padded = outs
    if sinks_ptr is not None:
        m, z, acc = _merge_sinks(sinks_ptr, index, in_use, m, z, acc, HEADS)
    sees = position >= FIRST
    out = tl.where(sees[:, None], acc * (1.0 / tl.where(sees, z, 1.0))[:, None], 0.0)
    offset, mask = values(index, in_use, HEAD_DIM, DIM)
    if scales_ptr is None:
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        rounded = out.to(q_ptr.dtype.element_ty).to(tl.float32)
        _store_e4m3(out_ptr, scales_ptr, rounded, offset, index, in_use, tokens, padded, HEADS, HEAD_DIM)


@triton.jit
def _store_e4m3(
    out_ptr, scales_ptr, value, offset, index, in_use, tokens, padded, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Quantise rows [rows, HEAD_DIM]: the bits of ``quantize_fp8`` for groups of ``scale_columns(HEAD_DIM)``.

    The program with the last of ``tokens`` tokens also writes the padding after it, up to ``padded``: zeros.
    """
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = min(HEAD_DIM, 128)
    GROUPS: tl.constexpr = HEAD_DIM // COLUMNS  # of a row
    grouped = tl.reshape(value, (ROWS * GROUPS, COLUMNS))
    scale = scales_of(grouped)
    kind = out_ptr.dtype.element_ty
    of_row = index % HEADS * GROUPS * padded + index // HEADS
    at = of_row[:, None] + tl.arange(0, GROUPS)[None, :] * padded
    tl.store(out_ptr + offset, tl.reshape(scaled_by(grouped, scale).to(kind), (ROWS, HEAD_DIM)), mask=in_use[:, None])
    tl.store(scales_ptr + at, tl.reshape(scale, (ROWS, GROUPS)), mask=in_use[:, None])
    nothing = tl.zeros(value.shape, tl.float32)
    least = tl.reshape(scales_of(tl.zeros(grouped.shape, tl.float32)), (ROWS, GROUPS))
    for i in tl.static_range(1, 4):
        beyond = (in_use & (index // HEADS == tokens - 1) & (tokens - 1 + i < padded))[:, None]
        tl.store(out_ptr + offset + i * HEADS * HEAD_DIM, nothing.to(kind), mask=beyond)
        tl.store(scales_ptr + at + i, least, mask=beyond)


@triton.jit
def _merge_kept(
    positions_ptr, state_ptr, acc_ptr, outs, first, last, head, place, stride, first_split, end_split,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Merge splits ``first_split … end_split`` of a tile from the workspace, in order, and write its outputs.

    Splits are read ahead, in stages of 8 KiB or more. The reads bypass L1, which may hold an older layer's values.
    """
    AT_ONCE: tl.constexpr = max(2048 // (ROWS * DIM), 1)
    in_use, index, position = _rows(positions_ptr, first, last, head, HEADS, GROUP, ROWS)
    m, z, acc = nothing(ROWS, DIM)
    for start in tl.range(first_split, end_split, AT_ONCE, num_stages=4):
        for i in tl.static_range(AT_ONCE):
            wanted = in_use & (start + i < end_split)
            at = index + place + (start + i) * stride
            offset, mask = values(at, wanted, HEAD_DIM, DIM)
            m1 = tl.load(state_ptr + at * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            z1 = tl.load(state_ptr + at * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
            acc1 = tl.load(acc_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
            m, z, acc = merge(m, z, acc, m1, z1, acc1)
    _store(outs, index, position, in_use, m, z, acc, HEADS, HEAD_DIM, DIM, FIRST)


@triton.jit
def _place(partial, tile, skipped, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Place of split 0 of a tile in the workspace, if it had one: the plan gave places from split ``skipped`` (None: 0)
    on.
    """
    place = (partial.to(tl.int64) * TOKENS - tile) * HEADS
    if skipped is not None:
        place -= skipped.to(tl.int64) * (TOKENS * HEADS)
    return place


@triton.jit
def _complete(arrivals_ptr, mine, splits, skipped):
    """Add this program's splits to the tile's count. True for the last program to arrive, which resets the count.

    The tile has ``splits``, less the first ``skipped`` (or None), which the plan left out.
    """
    if skipped is not None:
        splits -= skipped
    tl.debug_barrier()  # all of the program's stores come before its arrival
    last = tl.atomic_add(arrivals_ptr, mine, sem="acq_rel") + mine == splits
    if last:
        tl.store(arrivals_ptr, 0)
    return last


@triton.jit
def _exponents(k_ptr, v_ptr, head, PAGE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Arguments of ``factors`` for a KV head: pointers to its words of four exponents, and the words per page."""
    return k_ptr + head * (PAGE // 4), v_ptr + head * (PAGE // 4), KV_HEADS * (PAGE // 4)


@triton.jit
def _work_item(work_ptr, i):
    """Read entry ``i`` of the work list. Volatile: otherwise the compiler would move the read after the wait for the
    count.
    """
    entry = work_ptr + i * 8
    slot, length = tl.load(entry, volatile=True), tl.load(entry + 1, volatile=True)
    first, last = tl.load(entry + 2, volatile=True), tl.load(entry + 3, volatile=True)
    first_split, end_split = tl.load(entry + 4, volatile=True), tl.load(entry + 5, volatile=True)
    partial, counter = tl.load(entry + 6, volatile=True), tl.load(entry + 7, volatile=True)
    return slot, length, first, last, first_split, end_split, partial, counter


@overlapping(reads_early=True, leads=True)
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    sinks_ptr, k_scales_ptr, v_scales_ptr, scales_ptr, until_ptr, tokens, padded, max_pages, page_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, TO_CAP: tl.constexpr, CUT: tl.constexpr,
    OVERLAP: tl.constexpr, CHUNKED: tl.constexpr = False, MERGE: tl.constexpr = True,
):  # fmt: skip
    """Share the work list × parts of a tile × KV heads among a fixed number of programs. Keys below FIRST are
    invisible.

    until_ptr: last position that each token sees, or None: its own. CHUNKED: it sees its chunk of ``window`` positions.

    Splits of a whole tile are merged in registers. Those of a cut tile go to the workspace: its last program merges
    them in order, or without MERGE the next kernel. Without CUT a tile needs no masks for keys that all its rows see.
    The plan's outputs are read before the kernel ahead has ended (:data:`unisono.kernels.overlap.READ_EARLY`).
    """
    outs = out_ptr, sinks_ptr, scales_ptr, q_ptr, tokens, padded
    GROUP: tl.constexpr = HEADS // KV_HEADS
    upcoming = _work_item(work_ptr, tl.program_id(0) // (PARTS * KV_HEADS))  # read ahead, here and below
    total = tl.load(count_ptr, volatile=True) * (PARTS * KV_HEADS)
    follow(OVERLAP, True)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        slot, length, tile, tile_end, first_split, end_split, partial, counter = upcoming
        upcoming = _work_item(work_ptr, tl.minimum(item + tl.num_programs(0), total - 1) // (PARTS * KV_HEADS))
        head, part = item % KV_HEADS, item // KV_HEADS % PARTS
        first = tile + part * (ROWS // GROUP)
        last = tl.minimum(first + ROWS // GROUP, tile_end)
        in_use, index, position = _rows(positions_ptr, first, last, head, HEADS, GROUP, ROWS)
        q, pages_ptr = _queries(q_ptr, index, in_use, HEAD_DIM, DIM), table_ptr + slot.to(tl.int64) * max_pages
        each: tl.constexpr = PAGE * HEAD_DIM if k_scales_ptr is None else PAGE * HEAD_DIM // 2  # e4m3 lies in pairs
        own_k_ptr, own_v_ptr = k_ptr + head * each, v_ptr + head * each
        exponents = None if k_scales_ptr is None else _exponents(k_scales_ptr, v_scales_ptr, head, PAGE, KV_HEADS)
        skipped = tl.load(work_ptr + counter * 8 + 4) if WINDOW and CUT else None  # splits that the plan leaves out
        place, stride = _place(partial, tile, skipped, TOKENS, HEADS), tl.where(partial >= 0, TOKENS * HEADS, 0)
        workspace = (state_ptr, acc_ptr, index + place, in_use, stride) if CUT else None
        begin, end, low = first_split * SPLIT, tl.minimum(end_split * SPLIT, length), FIRST
        if WINDOW:
            low = _first_seen(position, 1) // window * window if CHUNKED else _first_seen(position, window)
            low = tl.maximum(low, FIRST)
            begin = tl.maximum(begin, low // KEYS * KEYS)
        seen, reach = position, window
        if until_ptr is not None:
            seen, reach = _both_ways(until_ptr, position, window, first, last, GROUP, ROWS)
        if CHUNKED:
            reach = (position % window + 1)[:, None]
        m, z, acc = _attend(
            q, seen, pages_ptr, own_k_ptr, own_v_ptr, exponents, page_stride, begin, end, low, reach, scale,
            HEAD_DIM, PAGE, KEYS, SPLIT, WINDOW, FIRST, TO_CAP, CUT, workspace,
        )  # fmt: skip
        if partial < 0:
            _store(outs, index, position, in_use, m, z, acc, HEADS, HEAD_DIM, DIM, FIRST)
        elif CUT:
            keep(workspace, end_split - 1, m, z, acc, HEAD_DIM)
            if MERGE:
                arrivals = arrivals_ptr + (counter * TOKENS + part) * KV_HEADS + head
                if _complete(arrivals, end_split - first_split, tl.cdiv(length, SPLIT), skipped):
                    _merge_kept(positions_ptr, state_ptr, acc_ptr, outs, first, last, head, place, TOKENS * HEADS,
                                low // SPLIT, tl.cdiv(length, SPLIT), HEADS, GROUP, USED, HEAD_DIM, DIM,
                                FIRST)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_tokens", "partials", "programs", "window"])
def plan_kernel(
    slots_ptr, kv_len_ptr, query_start_ptr, work_ptr, count_ptr, arrivals_ptr, rows, num_tokens, partials, programs,
    window,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tiles of row ``row``, last tokens first, each whole or in pieces. One program per row.

    WIDTH 0: rows begin at ``query_start``, and one more program lists the tokens that belong to no row.
    """
    row = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    if WIDTH:
        start, stop = each * WIDTH, each * WIDTH + WIDTH
    else:
        start = tl.load(query_start_ptr + each, mask=each <= rows, other=num_tokens)
        stop = tl.load(query_start_ptr + each + 1, mask=each < rows, other=num_tokens)
    length = tl.load(kv_len_ptr + each, mask=each < rows, other=0)
    splits = (length + SPLIT - 1) // SPLIT
    if window is not None:  # only from the first split that the row's first token sees
        skipped = tl.maximum(length - (stop - start) - window + 1, 0) // SPLIT
        splits -= skipped
    tiles = tl.where(each < tl.num_programs(0), (stop - start + TOKENS - 1) // TOKENS, 0)
    share = tl.maximum((tl.sum(tiles * splits) * KV_HEADS + programs - 1) // programs, 1)
    room = tl.cumsum(tl.where(splits > share, tiles * splits, 0))
    cut = (splits > share) & (room <= partials)
    pieces = tl.where(cut, (splits + share - 1) // share, 1)
    items = tiles * pieces
    if row == 0:
        tl.store(count_ptr, tl.sum(items))

    me = each == row
    at = tl.sum(tl.where(each < row, items, 0))
    count, per_tile = tl.sum(tl.where(me, items, 0)), tl.sum(tl.where(me, pieces, 0))
    first, last = tl.sum(tl.where(me, start, 0)), tl.sum(tl.where(me, stop, 0))
    partial = tl.sum(tl.where(me, tl.where(cut, room - tiles * splits, -1), 0))
    own_length, own_splits = tl.sum(tl.where(me, length, 0)), tl.sum(tl.where(me, splits, 0))
    slot = tl.load(slots_ptr + row, mask=row < rows, other=0)
    size = (own_splits + per_tile - 1) // per_tile
    own_skipped = 0
    if window is not None:
        own_skipped = tl.sum(tl.where(me, skipped, 0))
    for base in range(0, count, 32):
        i = base + tl.arange(0, 32)
        tile, piece = (count - 1 - i) // per_tile, i % per_tile
        entry, mask = work_ptr + (at + i) * 8, i < count
        tl.store(entry, tl.zeros_like(i) + slot, mask=mask)
        tl.store(entry + 1, tl.zeros_like(i) + own_length, mask=mask)
        tl.store(entry + 2, first + tile * TOKENS, mask=mask)
        tl.store(entry + 3, tl.minimum(first + tile * TOKENS + TOKENS, last), mask=mask)
        tl.store(entry + 4, own_skipped + tl.minimum(piece * size, own_splits), mask=mask)
        tl.store(entry + 5, own_skipped + tl.minimum(piece * size + size, own_splits), mask=mask)
        tl.store(entry + 6, tl.where(partial < 0, -1, partial + tile * own_splits), mask=mask)
        tl.store(entry + 7, at + i - piece, mask=mask)
    for base in range(at * TOKENS * KV_HEADS, (at + count) * TOKENS * KV_HEADS, 128):
        i = base + tl.arange(0, 128)
        tl.store(arrivals_ptr + i, tl.zeros_like(i), mask=i < (at + count) * TOKENS * KV_HEADS)
    publish()
