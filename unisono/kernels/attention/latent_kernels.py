"""Triton kernel of latent attention: the walk of ``triton_kernels`` over pages whose rows are keys and values at once.

A row is a latent, which all heads read as key and as value, and a rotated part, which they read as key alone. Launched
only by ``kernels/attention/latent.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.attention.e4m3 import finish_e4m3
from unisono.kernels.attention.latent_e4m3 import begin_latents, walk_latents
from unisono.kernels.attention.split import find_keys, hide, keep, merge, nothing, weigh
from unisono.kernels.attention.triton_kernels import _complete, _merge_kept, _place, _rows, _store, _work_item
from unisono.kernels.overlap import follow


@triton.jit
def _latent_walk(
    q, q_rope, position, pages_ptr, cache_ptr, column, page_stride, begin, end, scale, m, z, acc,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    FIRST: tl.constexpr, MASKED: tl.constexpr, workspace,
):  # fmt: skip
    """Attend keys ``begin … end`` in steps of KEYS and merge each split into the state, as ``triton_kernels._walk``.

    acc has the columns of the values from ``column`` on.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    COLUMNS: tl.constexpr = acc.shape[1]
    TURNED: tl.constexpr = q_rope.shape[1]
    dims, turned = tl.arange(0, DIM), tl.arange(0, TURNED)
    ones = tl.full([KEYS, 8], 1.0, q.dtype)
    part_m, _, part_acc = nothing(ROWS, COLUMNS)
    part_z = tl.zeros([ROWS, 8], tl.float32)  # eight equal columns
    for start in tl.range(begin, end, KEYS):
        if start % SPLIT == 0 and start > begin:  # a split is complete; the last one is merged below
            z1 = tl.max(part_z, 1)
            if workspace is None:
                m, z, acc = merge(m, z, acc, part_m, z1, part_acc)
            elif workspace[-1] > 0:
                keep(workspace, start // SPLIT - 1, part_m, z1, part_acc, LATENT)
            else:
                m, z, acc = merge(m, z, acc, part_m, z1, part_acc)
            part_m, _, part_acc = nothing(ROWS, COLUMNS)
            part_z = tl.zeros([ROWS, 8], tl.float32)
        keys, known, offset = find_keys(
            pages_ptr, start, end, FIRST, page_stride, LATENT + ROPE, DIM, PAGE, KEYS, FIRST > 0, MASKED
        )
        _again, _known, apart = find_keys(
            pages_ptr, start, end, FIRST, page_stride, LATENT + ROPE, TURNED, PAGE, KEYS, FIRST > 0, MASKED
        )
        valid, valid_rope = (dims < LATENT)[None, :], (turned < ROPE)[None, :]
        if MASKED:
            valid, valid_rope = valid & known[:, None], valid_rope & known[:, None]
        latent = tl.load(cache_ptr + offset, mask=valid, other=0)
        rope = tl.load(cache_ptr + LATENT + apart, mask=valid_rope, other=0)
        values = latent
        if COLUMNS < DIM:
            _once_more, _known_too, some = find_keys(
                pages_ptr, start, end, FIRST, page_stride, LATENT + ROPE, COLUMNS, PAGE, KEYS, FIRST > 0, MASKED
            )
            if MASKED:
                values = tl.load(cache_ptr + column + some, mask=known[:, None] & (some >= 0), other=0)
            else:
                values = tl.load(cache_ptr + column + some)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = hide(scores, keys, position, 0, False, FIRST, MASKED, 0.0)
        part_m, p, shrink = weigh(scores, scale, part_m, q.dtype)
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        part_acc = tl.dot(p, values, part_acc * shrink, input_precision="ieee")
    return merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)


@triton.jit
def _walk(
    q, q_rope, position, pages_ptr, caches, column, begin, end, scale, m, z, acc, LATENT: tl.constexpr,
    ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr,
    MASKED: tl.constexpr, workspace,
):  # fmt: skip
    """Walk keys ``begin … end`` of plain or e4m3 pages. caches: (rows, rotated parts, scales, their strides)."""
    cache_ptr, rope_ptr, scales_ptr, page_stride, rope_stride = caches
    if scales_ptr is None:
        m, z, acc = _latent_walk(
            q, q_rope, position, pages_ptr, cache_ptr, column, page_stride, begin, end, scale, m, z, acc,
            LATENT, ROPE, PAGE, KEYS, SPLIT, FIRST, MASKED, workspace,
        )  # fmt: skip
    else:
        m, z, acc = walk_latents(
            q, q_rope, position, pages_ptr, cache_ptr, rope_ptr, scales_ptr, column, page_stride, rope_stride,
            begin, end, scale, m, z, acc, LATENT, ROPE, PAGE, KEYS, SPLIT, FIRST, MASKED, workspace,
        )  # fmt: skip
    return m, z, acc


@triton.jit
def _attend(
    q, q_rope, position, pages_ptr, caches, column, begin, end, scale, COLUMNS: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr,
    CUT: tl.constexpr, workspace,
):  # fmt: skip
    """State of a tile's rows after keys ``begin … end``; whole splits that all rows see are walked without masks."""
    e4m3: tl.constexpr = caches[2] is not None
    if e4m3:
        q, m, z, acc = begin_latents(q, COLUMNS)
    else:
        m, z, acc = nothing(q.shape[0], COLUMNS)
    if not CUT:
        end = tl.minimum(end, tl.max(position) + 1)
        if FIRST == 0:
            masked = (tl.min(tl.where(position >= 0, position, end - 1)) + 1) // SPLIT * SPLIT
            m, z, acc = _walk(
                q, q_rope, position, pages_ptr, caches, column, begin, masked, scale, m, z, acc, LATENT, ROPE, PAGE,
                KEYS, SPLIT, FIRST, False, workspace,
            )  # fmt: skip
            begin = masked
    m, z, acc = _walk(
        q, q_rope, position, pages_ptr, caches, column, begin, end, scale, m, z, acc, LATENT, ROPE, PAGE, KEYS, SPLIT,
        FIRST, True, workspace,
    )  # fmt: skip
    if e4m3:
        acc = finish_e4m3(acc, True)
    return m, z, acc


@triton.jit
def _complete_piece(arrivals_ptr, mine, splits, piece, PIECES: tl.constexpr):
    """Add this program's splits to its piece's part of a tile's count; see ``triton_kernels._complete``.

    A count is a word, of which each piece has as many bits.
    """
    if PIECES == 1:
        last = _complete(arrivals_ptr, mine, splits, None)
    else:
        BITS: tl.constexpr = 32 // PIECES
        tl.debug_barrier()  # all of the program's stores come before its arrival
        shift = piece * BITS
        arrived = tl.atomic_add(arrivals_ptr, mine << shift, sem="acq_rel")
        last = (arrived >> shift & (1 << BITS) - 1) + mine == splits
        if last:
            tl.atomic_add(arrivals_ptr, -(splits << shift))
    return last


@triton.jit
def latent_kernel(
    q_ptr, cache_ptr, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    rope_ptr, scales_ptr, max_pages, page_stride, rope_stride, scale,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    USED: tl.constexpr, PIECES: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr,
    CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Share the work list × parts of a tile × blocks of heads × pieces of values among a fixed number of programs.

    The heads are divided into BLOCKS, each of which reads the same keys. The columns of the values are divided into
    PIECES, each of which needs all scores. See ``triton_kernels.attention_kernel``. rope_ptr, scales_ptr: rotated parts
    and exponents of e4m3 latents, of which ``cache_ptr`` then has pairs (``latent_e4m3.py``); or None.
    """
    follow(OVERLAP)
    GROUP: tl.constexpr = HEADS // BLOCKS
    COLUMNS: tl.constexpr = DIM // PIECES
    dims, turned = tl.arange(0, DIM), tl.arange(0, TURNED)
    total = tl.load(count_ptr) * (PARTS * BLOCKS * PIECES)
    for turn in range(tl.program_id(0), total, tl.num_programs(0)):
        item, piece = turn // PIECES, turn % PIECES
        column = piece * COLUMNS
        outs = out_ptr + column, None, None, None, None, None
        slot, length, tile, tile_end, first_split, end_split, partial, counter = _work_item(
            work_ptr, item // (PARTS * BLOCKS)
        )
        head, part = item % BLOCKS, item // BLOCKS % PARTS
        first = tile + part * (ROWS // GROUP)
        last = tl.minimum(first + ROWS // GROUP, tile_end)
        in_use, index, position = _rows(positions_ptr, first, last, head, HEADS, GROUP, ROWS)
        row = q_ptr + index[:, None] * (LATENT + ROPE)
        q = tl.load(row + dims[None, :], mask=in_use[:, None] & (dims < LATENT)[None, :], other=0.0)
        q_rope = tl.load(row + LATENT + turned[None, :], mask=in_use[:, None] & (turned < ROPE)[None, :], other=0.0)
        pages_ptr = table_ptr + slot.to(tl.int64) * max_pages
        place, stride = _place(partial, tile, None, TOKENS, HEADS), tl.where(partial >= 0, TOKENS * HEADS, 0)
        workspace = (state_ptr, acc_ptr + column, index + place, in_use, stride) if CUT else None
        begin, end = first_split * SPLIT, tl.minimum(end_split * SPLIT, length)
        caches = cache_ptr, rope_ptr, scales_ptr, page_stride, rope_stride
        m, z, acc = _attend(
            q, q_rope, position, pages_ptr, caches, column, begin, end, scale, COLUMNS, LATENT, ROPE, PAGE, KEYS,
            SPLIT, FIRST, CUT, workspace,
        )  # fmt: skip
        if partial < 0:
            _store(outs, index, position, in_use, m, z, acc, HEADS, LATENT, COLUMNS, FIRST)
        elif CUT:
            keep(workspace, end_split - 1, m, z, acc, LATENT)
            arrivals = arrivals_ptr + (counter * TOKENS + part) * BLOCKS + head
            if _complete_piece(arrivals, end_split - first_split, tl.cdiv(length, SPLIT), piece, PIECES):
                _merge_kept(
                    positions_ptr, state_ptr, acc_ptr + column, outs, first, last, head, place, TOKENS * HEADS,
                    FIRST // SPLIT, tl.cdiv(length, SPLIT), HEADS, GROUP, USED, LATENT, COLUMNS, FIRST,
                )  # fmt: skip
