"""Page-table growth inside a round: the host's newly reserved pages reach the device with the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, register


@triton.jit
def _grow_pages_kernel(table, table_stride, slots, columns, pages, count, growth, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    column = tl.load(columns + i, mask=inside, other=-1)
    slot = tl.load(slots + i // growth, mask=inside, other=0)
    page = tl.load(pages + i, mask=inside, other=0)
    tl.store(table + slot.to(tl.int64) * table_stride + column, page, mask=inside & (column >= 0))


def launch_grow_pages(
    page_table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor
) -> None:
    """Triton implementation of :func:`grow_pages`."""
    count, block = columns.numel(), 128
    grid = (triton.cdiv(count, block),)
    _grow_pages_kernel[grid](
        page_table, page_table.stride(0), slots, columns, pages, count, columns.shape[1], BLOCK=block, num_warps=4
    )


def grow_pages_cpu(page_table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """CPU twin of :func:`grow_pages`."""
    rows = slots.long()[:, None].expand_as(columns)
    new = columns >= 0
    page_table[rows[new], columns[new].long()] = pages[new]


define("grow_pages(Tensor(a!) page_table, Tensor slots, Tensor columns, Tensor pages) -> ()")
register("grow_pages", cuda=launch_grow_pages, cpu=grow_pages_cpu, meta=lambda *args: None)


def grow_pages(page_table: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """Write ``pages [R, G]`` into ``page_table [S, MP]`` at ``(slots [R], columns [R, G])``; column -1 writes nothing.

    All int32. Writing the same page again changes nothing, so a batch may be loaded twice.
    """
    torch.ops.unisono.grow_pages(page_table, slots, columns, pages)


AOT = [
    AotCase(
        _grow_pages_kernel,
        {
            "table": "*i32",
            "table_stride": "i32",
            "slots": "*i32",
            "columns": "*i32",
            "pages": "*i32",
            "count": "i32",
            "growth": "i32",
        },
        {"BLOCK": 128},
    )
]
