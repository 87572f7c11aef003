"""Inputs of the passes in which a draft module catches up with the target's committed tokens, and a row scatter.

A module that reads hidden states has an *entry* for every position p ≥ 1: the token at p and the target's hidden state
of p - 1. Position 0 has no entry. The module keeps the entries' keys and values in a KV cache of its own, which the
target's page tables index. An entry depends on the tokens up to its own, as the target's keys do, so a cached page
serves every request that has the same tokens.

Owns the ops ``catch_up`` (the entries of a round), ``catch_up_extend`` (those of a prompt pass) and ``keep_rows``
(a row scatter that skips some rows). The first two only read slots. Drafters call each once per pass, inside the graph.

Shapes: R rows, W width, E rows of a prompt pass, T its tokens, S slots, MP pages per slot, P page size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op

NEVER = tl.constexpr(2**31 - 1)

ENTRIES_PER_PROGRAM = 128
KEEP_BLOCK = 1024


class CatchUp(NamedTuple):
    """Entries of a round, W per row; those after a row's committed tokens are padding. All int32.

    token_ids, positions (-1: padding), slot_mapping [R · W]; kv_len [R].
    last [R]: index of each row's last entry. owners [R]: its slot, or -1 if nothing was committed.
    pages [R · W]: the page that ends with the position before the entry's, or -1 if none does.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    kv_len: Tensor
    last: Tensor
    owners: Tensor
    pages: Tensor


class CatchUpExtend(NamedTuple):
    """Entries of a prompt pass, N = E + T: one per row that a cached page precedes, then one per token.

    As in CatchUp: token_ids, positions, slot_mapping [N]; last, owners [E]; pages [T], of the tokens' own positions.
    slots, kv_len [2 E] and query_start [2 E + 1] describe 2 E rows: the E leading entries, then each row's tokens.
    sources [E]: the page that ends before a row's leading entry; the padding page if the row has none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    slots: Tensor
    kv_len: Tensor
    query_start: Tensor
    last: Tensor
    owners: Tensor
    sources: Tensor
    pages: Tensor


@triton.jit
def _catch_up_kernel(
    slots, result, sampled, length, page_table, token_ids, positions, slot_mapping, kv_len, last, owners, pages,
    stride, max_pages, W, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    count = tl.load(result + row * (W + 2))
    end = tl.load(length + slot * stride)
    table = page_table + slot.to(tl.int64) * max_pages

    j = tl.arange(0, BLOCK_W)
    real = j < count
    at = end - count + j
    page = tl.load(table + at // PAGE, mask=real, other=0)
    starts_page = real & (at > 0) & (at % PAGE == 0)
    out = row * W + j
    tl.store(token_ids + out, tl.load(sampled + out, mask=real, other=0), mask=j < W)
    tl.store(positions + out, tl.where(real, at, -1), mask=j < W)
    tl.store(slot_mapping + out, tl.where(real, page * PAGE + at % PAGE, j % PAGE), mask=j < W)
    tl.store(pages + out, tl.load(table + at // PAGE - 1, mask=starts_page, other=-1), mask=j < W)
    tl.store(kv_len + row, tl.where(count > 0, end, 0))
    tl.store(last + row, row * W + tl.maximum(count - 1, 0))
    tl.store(owners + row, tl.where(count > 0, slot, -1))


@triton.jit
def _catch_up_extend_kernel(
    slots, query_start, start, given_ids, next_ids, given_positions, page_table,
    token_ids, positions, slot_mapping, row_slots, kv_len, row_start, last, owners, sources, pages,
    max_pages, E, T, PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_E)
    ends = tl.load(query_start + r + 1, mask=r < E, other=NEVER)
    if tl.program_id(0) == 0:
        begins = tl.load(query_start + r, mask=r < E, other=0)
        first = tl.load(start + r, mask=r < E, other=0)
        slot = tl.load(slots + r, mask=r < E, other=0)
        owns = (r < E) & (ends > begins)
        leads = owns & (first > 0) & (first % PAGE == 0)
        table = page_table + slot.to(tl.int64) * max_pages + first // PAGE
        page = tl.load(table, mask=leads, other=0)
        tl.store(token_ids + r, tl.load(given_ids + begins, mask=leads, other=0), mask=r < E)
        tl.store(positions + r, tl.where(leads, first, -1), mask=r < E)
        tl.store(slot_mapping + r, tl.where(leads, page * PAGE, r % PAGE), mask=r < E)
        tl.store(sources + r, tl.load(table - 1, mask=leads, other=0), mask=r < E)
        tl.store(row_slots + r, slot, mask=r < E)
        tl.store(row_slots + E + r, slot, mask=r < E)
        tl.store(kv_len + r, tl.where(leads, first + 1, 0), mask=r < E)
        tl.store(kv_len + E + r, tl.where(owns, first + ends - begins + 1, 0), mask=r < E)
        tl.store(row_start + r, r, mask=r < E)
        tl.store(row_start + E + r, E + begins, mask=r < E)
        tl.store(row_start + E + 1 + r, E + ends, mask=r == E - 1)
        tl.store(last + r, E + tl.maximum(ends - 1, 0), mask=r < E)
        tl.store(owners + r, tl.where(owns, slot, -1), mask=r < E)

    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.load(given_positions + t, mask=t < T, other=-1) + 1
    real = at > 0
    row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    table = page_table + tl.load(slots + row, mask=real, other=0).to(tl.int64) * max_pages + at // PAGE
    page = tl.load(table, mask=real, other=0)
    starts_page = real & (at % PAGE == 0)
    out = E + t
    tl.store(token_ids + out, tl.load(next_ids + t, mask=real, other=0), mask=t < T)
    tl.store(positions + out, tl.where(real, at, -1), mask=t < T)
    tl.store(slot_mapping + out, tl.where(real, page * PAGE + at % PAGE, t % PAGE), mask=t < T)
    tl.store(pages + t, tl.load(table - 1, mask=starts_page, other=-1), mask=t < T)


@triton.jit
def _keep_rows_kernel(out, rows, source, size, BLOCK: tl.constexpr):
    from_row = tl.program_id(0).to(tl.int64)
    to_row = tl.load(rows + from_row).to(tl.int64)
    if to_row >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + to_row * size + i, tl.load(source + from_row * size + i, mask=i < size), mask=i < size)


def _catch_up_meta(slots: Tensor, sampled: Tensor) -> CatchUp:
    rows, entries = slots.shape[0], sampled.numel()
    return CatchUp(*(slots.new_empty(n) for n in (entries, entries, entries, rows, rows, rows, entries)))


def launch_catch_up(
    slots: Tensor, result: Tensor, sampled: Tensor, length: Tensor, page_table: Tensor, page_size: int
) -> CatchUp:
    """Triton implementation of :func:`catch_up`."""
    out = _catch_up_meta(slots, sampled)
    rows, width = sampled.shape
    _catch_up_kernel[(rows,)](
        slots, result.contiguous(), sampled.contiguous(), length, page_table, *out,
        length.stride(0), page_table.stride(0), width,
        PAGE=page_size, BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


def _places_cpu(page_table: Tensor, slot: Tensor, at: Tensor, spare: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Compute slot_mapping of entries at positions ``at`` (-1: padding), and the pages that end right before them."""
    real, column = at >= 0, (at // page_size).clamp_min(0).long()
    slot_mapping = (page_table[slot, column] * page_size + at % page_size).where(real, spare % page_size)
    starts_page = (at > 0) & (at % page_size == 0)
    return slot_mapping, page_table[slot, (column - 1).clamp_min(0)].where(starts_page, -1)


def _catch_up_extend_meta(slots: Tensor, token_ids: Tensor) -> CatchUpExtend:
    rows, tokens = slots.shape[0], token_ids.shape[0]
    entries = rows + tokens
    sizes = (entries, entries, entries, 2 * rows, 2 * rows, 2 * rows + 1, rows, rows, rows, tokens)
    return CatchUpExtend(*(slots.new_empty(n) for n in sizes))


def launch_catch_up_extend(
    slots: Tensor, query_start: Tensor, start: Tensor, token_ids: Tensor, next_ids: Tensor, positions: Tensor,
    page_table: Tensor, page_size: int,
) -> CatchUpExtend:  # fmt: skip
    """Triton implementation of :func:`catch_up_extend`."""
    inputs = (slots, query_start, start, token_ids, next_ids, positions, page_table)
    out = _catch_up_extend_meta(slots, token_ids)
    rows, tokens = slots.shape[0], token_ids.shape[0]
    _catch_up_extend_kernel[(max(triton.cdiv(tokens, ENTRIES_PER_PROGRAM), 1),)](
        *inputs, *out, page_table.stride(0), rows, tokens,
        PAGE=page_size, BLOCK_T=ENTRIES_PER_PROGRAM, BLOCK_E=triton.next_power_of_2(rows),
    )  # fmt: skip
    return out


def launch_keep_rows(out: Tensor, rows: Tensor, source: Tensor) -> None:
    """Triton implementation of :func:`keep_rows`."""
    count, size = source.shape
    grid = (count, triton.cdiv(size, KEEP_BLOCK))
    _keep_rows_kernel[grid](out, rows, source.contiguous(), size, BLOCK=KEEP_BLOCK)


@op(cuda=launch_catch_up, meta=_catch_up_meta)
def catch_up(
    slots: Tensor, result: Tensor, sampled: Tensor, length: Tensor, page_table: Tensor, page_size: int
) -> CatchUp:
    """Compute the entries of the tokens that a round committed.

    slots [R], result [R, W + 2] of ``rounds.commit`` (count first), sampled [R, W], length [S] (including the committed
    tokens), page_table [S, MP]; all int32. Entry j of a row, j < count, is sampled[:, j] at
    position length - count + j, where the round's j-th hidden state is the one before it. Padding entries write
    to padding page 0.
    """
    slot, count = slots.long(), result[:, :1]
    end = length[slot][:, None]
    j = torch.arange(sampled.shape[1], dtype=torch.int32)
    real = j < count
    at = (end - count + j).where(real, -1)
    slot_mapping, pages = _places_cpu(page_table, slot[:, None], at, j, page_size)
    moved = real[:, 0]
    last = torch.arange(len(slots), dtype=torch.int32) * sampled.shape[1] + (result[:, 0] - 1).clamp_min(0)
    return CatchUp(
        sampled.where(real, 0).flatten(), at.flatten(), slot_mapping.flatten(), end[:, 0].where(moved, 0), last,
        slots.where(moved, -1), pages.flatten(),
    )  # fmt: skip


@op(cuda=launch_catch_up_extend, meta=_catch_up_extend_meta)
def catch_up_extend(
    slots: Tensor, query_start: Tensor, start: Tensor, token_ids: Tensor, next_ids: Tensor, positions: Tensor,
    page_table: Tensor, page_size: int,
) -> CatchUpExtend:  # fmt: skip
    """Compute the entries of a prompt pass, and the one that is missing after a prefix hit.

    slots, start [E], query_start [E + 1], token_ids, next_ids, positions [T] (-1: padding): the fields of
    ``drafters.base.PromptPass``; page_table [S, MP]; all int32. A token at p gives the entry of
    ``next_ids`` at p + 1. A row that begins at the start of a page also has a leading entry, for its own first token:
    after a cached prefix no other pass computes it, and in a chunked prompt it is computed again with the same bits.
    """
    rows, counts = slots.shape[0], query_start.diff()
    each, owns = torch.arange(rows, dtype=torch.int32), counts > 0
    first = start.where(owns & (start > 0) & (start % page_size == 0), -1)
    leads = first >= 0
    begins = query_start[:-1].where(leads, 0).long()
    lead_slots, sources = _places_cpu(page_table, slots.long(), first, each, page_size)

    t = torch.arange(token_ids.shape[0], dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), t, right=True).clamp_max(rows - 1)
    real = positions >= 0
    at = (positions + 1).where(real, -1)
    slot_mapping, pages = _places_cpu(page_table, slots[row].long(), at, t, page_size)
    return CatchUpExtend(
        torch.cat((token_ids[begins].where(leads, 0), next_ids.where(real, 0))),
        torch.cat((first, at)),
        torch.cat((lead_slots, slot_mapping)),
        torch.cat((slots, slots)),
        torch.cat(((first + 1), (start + counts + 1).where(owns, 0))),
        torch.cat((each, query_start + rows)),
        rows + (query_start[1:] - 1).clamp_min(0),
        slots.where(owns, -1),
        sources.clamp_min(0),
        pages,
    )


@op(cuda=launch_keep_rows)
def keep_rows(out: Mutated[Tensor], rows: Tensor, source: Tensor) -> None:
    """Scatter ``out[rows[i]] = source[i]`` for rows[i] ≥ 0: out [N, d] contiguous, rows [M] int32, source [M, d].

    Rows must not repeat, and out and source are of one dtype.
    """
    kept = rows >= 0
    out[rows[kept].long()] = source[kept]


AOT: list[AotCase] = [
    AotCase(
        _catch_up_kernel,
        ints(
            "slots result sampled length page_table token_ids positions slot_mapping kv_len last owners pages",
            "stride max_pages W",
        ),
        {"PAGE": 16, "BLOCK_W": 4},
        num_warps=1,
    ),
    AotCase(
        _catch_up_extend_kernel,
        ints(
            "slots query_start start given_ids next_ids given_positions page_table token_ids positions slot_mapping"
            " row_slots kv_len row_start last owners sources pages",
            "max_pages E T",
        ),
        {"PAGE": 16, "BLOCK_T": ENTRIES_PER_PROGRAM, "BLOCK_E": 32},
    ),
    *(
        AotCase(
            _keep_rows_kernel,
            {"out": f"*{dtype}", "rows": "*i32", "source": f"*{dtype}", "size": "i32"},
            {"BLOCK": KEEP_BLOCK},
        )
        for dtype in ("bf16", "i32")
    ),
]
