"""Page tables on the device: pages added in a round, and KV slot mappings for further page tables.

Owns the ops ``grow_pages`` and ``group_slot_mapping``. The engine calls them inside a round or an extend pass.

Shapes: R rows, T tokens, S page-table rows, MP pages per row, P page size, G maximum pages added to a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, Mutated, empty_like, ints, op

NEVER = tl.constexpr(2**31 - 1)

TOKENS_PER_PROGRAM = 128


@triton.jit
def _grow_pages_kernel(table, table_stride, slots, columns, pages, count, growth, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    column = tl.load(columns + i, mask=inside, other=-1)
    slot = tl.load(slots + i // growth, mask=inside, other=0)
    page = tl.load(pages + i, mask=inside, other=0)
    tl.store(table + slot.to(tl.int64) * table_stride + column, page, mask=inside & (column >= 0))


@triton.jit
def _group_slot_mapping_kernel(
    page_table, tables, positions, slot_mapping, query_start, out, max_pages, R, T, W,
    PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    if query_start is None:
        row = t // W
    else:
        r = tl.arange(0, BLOCK_R)
        ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER)
        row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    given = tl.load(slot_mapping + t, mask=t < T, other=0)
    written = given >= PAGE
    at = tl.load(positions + t, mask=written, other=0)
    table = tl.load(tables + row, mask=written, other=0).to(tl.int64)
    page = tl.load(page_table + table * max_pages + at // PAGE, mask=written, other=0)
    tl.store(out + t, tl.where(written, page * PAGE + at % PAGE, given), mask=t < T)


def launch_grow_pages(
    page_table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor
) -> None:
    """Triton implementation of :func:`grow_pages`."""
    count, block = columns.numel(), 128
    grid = (triton.cdiv(count, block),)
    _grow_pages_kernel[grid](
        page_table, page_table.stride(0), slots, columns, pages, count, columns.shape[1], BLOCK=block, num_warps=4
    )


def launch_group_slot_mapping(
    page_table: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
    query_start: torch.Tensor | None, page_size: int,
) -> torch.Tensor:  # fmt: skip
    """Triton implementation of :func:`group_slot_mapping`."""
    out, tokens, rows = torch.empty_like(positions), positions.shape[0], tables.shape[0]
    _group_slot_mapping_kernel[(max(triton.cdiv(tokens, TOKENS_PER_PROGRAM), 1),)](
        page_table, tables, positions, slot_mapping, query_start, out,
        page_table.stride(0), rows, tokens, max(tokens // rows, 1),
        PAGE=page_size, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_R=triton.next_power_of_2(rows),
    )  # fmt: skip
    return out


@op(cuda=launch_grow_pages)
def grow_pages(
    page_table: Mutated[torch.Tensor], slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor
) -> None:
    """Write ``pages [R, G]`` into ``page_table [S, MP]`` at ``(slots [R], columns [R, G])``; column -1 writes nothing.

    All int32. Writing the same page again changes nothing, so a batch may be loaded twice.
    """
    new = columns >= 0
    if not new.any():
        return
    rows = slots.long()[:, None].expand_as(columns)
    page_table[rows[new], columns[new].long()] = pages[new]


@op(cuda=launch_group_slot_mapping, meta=lambda positions: empty_like(positions))
def group_slot_mapping(
    page_table: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
    query_start: torch.Tensor | None, page_size: int,
) -> torch.Tensor:  # fmt: skip
    """Slot mapping [T] of a pass's tokens for another page table: page · P + offset.

    page_table [S, MP]: the other table. tables [R]: row of it for each row of the pass. positions, slot_mapping [T]:
    outputs of ``round_inputs``, ``extend_inputs``, ``draft_inputs``, ``draft_extend_inputs``, ``catch_up`` or
    ``catch_up_extend`` for the first table, whose page size is the same. query_start [R + 1]: first token of each row;
    None for rows of equal width. All int32.

    A token that writes to padding page 0 in the first table (padding, or at or beyond ``max_length``) stays there.
    """
    tokens, rows = positions.shape[0], tables.shape[0]
    t = torch.arange(tokens, dtype=torch.int32)
    if query_start is None:
        row = t // max(tokens // rows, 1)
    else:
        row = torch.searchsorted(query_start[1:].contiguous(), t, right=True).clamp_max(rows - 1)
    written = slot_mapping >= page_size
    at = positions.where(written, 0)
    page = page_table[tables[row].long(), (at // page_size).long()]
    return (page * page_size + at % page_size).where(written, slot_mapping)


_MAPPING = ints("page_table tables positions slot_mapping out", "max_pages R T W")

AOT: list[AotCase] = [
    AotCase(_grow_pages_kernel, ints("table slots columns pages", "table_stride count growth"), {"BLOCK": 128}),
    AotCase(
        _group_slot_mapping_kernel,
        _MAPPING,
        {"query_start": None, "PAGE": 16, "BLOCK_T": TOKENS_PER_PROGRAM, "BLOCK_R": 64},
    ),
    AotCase(
        _group_slot_mapping_kernel,
        _MAPPING | {"query_start": "*i32"},
        {"PAGE": 16, "BLOCK_T": TOKENS_PER_PROGRAM, "BLOCK_R": 64},
    ),
]
