"""Triton kernel of latent attention: the walk of ``triton_kernels`` over pages whose rows are keys and values at once.

A row is a latent, which all heads read as key and as value, and a rotated part, which they read as key alone. Launched
only by ``kernels/attention/latent.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.attention.split import find_keys, hide, keep, merge, nothing, weigh
from unisono.kernels.attention.triton_kernels import _complete, _merge_kept, _place, _rows, _store, _work_item
from unisono.kernels.overlap import follow


@triton.jit
def _latent_walk(
    q, q_rope, position, pages_ptr, cache_ptr, page_stride, begin, end, scale, m, z, acc,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    FIRST: tl.constexpr, MASKED: tl.constexpr, workspace,
):  # fmt: skip
    """Attend keys ``begin … end`` in steps of KEYS and merge each split into the state, as ``triton_kernels._walk``."""
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    TURNED: tl.constexpr = q_rope.shape[1]
    dims, turned = tl.arange(0, DIM), tl.arange(0, TURNED)
    ones = tl.full([KEYS, 8], 1.0, q.dtype)
    part_m, _, part_acc = nothing(ROWS, DIM)
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
            part_m, _, part_acc = nothing(ROWS, DIM)
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
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = hide(scores, keys, position, 0, False, FIRST, MASKED, 0.0)
        part_m, p, shrink = weigh(scores, scale, part_m, q.dtype)
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        part_acc = tl.dot(p, latent, part_acc * shrink, input_precision="ieee")
    return merge(m, z, acc, part_m, tl.max(part_z, 1), part_acc)


@triton.jit
def latent_kernel(
    q_ptr, cache_ptr, table_ptr, positions_ptr, work_ptr, count_ptr, arrivals_ptr, state_ptr, acc_ptr, out_ptr,
    max_pages, page_stride, scale,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    USED: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr, CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Share the work list × parts of a tile × blocks of heads among a fixed number of programs.

    The heads are divided into BLOCKS, each of which reads the same keys. See ``triton_kernels.attention_kernel``.
    """
    follow(OVERLAP)
    outs = out_ptr, None, None, None, None, None
    GROUP: tl.constexpr = HEADS // BLOCKS
    dims, turned = tl.arange(0, DIM), tl.arange(0, TURNED)
    total = tl.load(count_ptr) * (PARTS * BLOCKS)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
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
        workspace = (state_ptr, acc_ptr, index + place, in_use, stride) if CUT else None
        begin, end = first_split * SPLIT, tl.minimum(end_split * SPLIT, length)
        m, z, acc = nothing(ROWS, DIM)
        if not CUT:
            end = tl.minimum(end, tl.max(position) + 1)
            if FIRST == 0:
                masked = (tl.min(tl.where(position >= 0, position, end - 1)) + 1) // SPLIT * SPLIT
                m, z, acc = _latent_walk(
                    q, q_rope, position, pages_ptr, cache_ptr, page_stride, begin, masked, scale, m, z, acc,
                    LATENT, ROPE, PAGE, KEYS, SPLIT, FIRST, False, workspace,
                )  # fmt: skip
                begin = masked
        m, z, acc = _latent_walk(
            q, q_rope, position, pages_ptr, cache_ptr, page_stride, begin, end, scale, m, z, acc,
            LATENT, ROPE, PAGE, KEYS, SPLIT, FIRST, True, workspace,
        )  # fmt: skip
        if partial < 0:
            _store(outs, index, position, in_use, m, z, acc, HEADS, LATENT, DIM, FIRST)
        elif CUT:
            keep(workspace, end_split - 1, m, z, acc, LATENT)
            arrivals = arrivals_ptr + (counter * TOKENS + part) * BLOCKS + head
            if _complete(arrivals, end_split - first_split, tl.cdiv(length, SPLIT), None):
                _merge_kept(
                    positions_ptr, state_ptr, acc_ptr, outs, first, last, head, place, TOKENS * HEADS,
                    FIRST // SPLIT, tl.cdiv(length, SPLIT), HEADS, GROUP, USED, LATENT, DIM, FIRST,
                )  # fmt: skip
