"""DP attention (``--enable-dp-attention``): the local tokens of one attention-DP rank in a pass.

All ranks run the same passes over the same requests. The pages of a request are on one rank, and the page ids of rank r
begin at r · P. On each rank the tokens of the other ranks' requests become padding: they see nothing and are written to
the padding page. A row does not depend on other rows, so local tokens have the bits of an undivided pass.

Shapes: T tokens, R rows (requests), S slots, MP pages per request, P pages of a rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unisono.attention.base import AttentionInputs
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE


def local_inputs(inputs: AttentionInputs, rank: int, pages: int) -> tuple[AttentionInputs, torch.Tensor]:
    """Return the attention inputs of a pass on one rank, and the attention-DP rank of each token [T] int32.

    inputs: with page ids of all ranks. pages: P. The result has page ids and cache slots of the rank, and a page table
    [R, MP] with one row per row of the pass.
    """
    table = inputs.page_table.index_select(0, inputs.slots)
    row_ranks = table[:, 0].div(pages, rounding_mode="floor")
    token_ranks = row_ranks.index_select(0, _rows(inputs))
    remote_rows, remote = row_ranks != rank, token_ranks != rank
    slots = inputs.slot_mapping - rank * pages * PAGE_SIZE
    padded = remote | (slots < 0)  # tokens after all rows have slots of page 0
    table = table - rank * pages
    # A slot's columns beyond its pages keep ids of earlier requests, which can be another rank's.
    missing = remote_rows[:, None] | (table < 0) | (table >= pages)
    local = replace(
        inputs,
        slots=torch.arange(len(row_ranks), dtype=torch.int32, device=row_ranks.device),
        positions=inputs.positions.masked_fill(remote, -1),
        slot_mapping=torch.where(padded, inputs.slot_mapping % PAGE_SIZE, slots),  # of the padding page
        kv_len=inputs.kv_len.masked_fill(remote_rows, 0),
        page_table=table.masked_fill(missing, PADDING_PAGE),
        plan=None,
    )
    return local, token_ranks


def _rows(inputs: AttentionInputs) -> torch.Tensor:
    """Row of each token [T] int64; the last row for padding after all rows."""
    rows, tokens = inputs.slots.shape[0], inputs.positions.shape[0]
    each = torch.arange(tokens, dtype=torch.int32, device=inputs.slots.device)
    if inputs.query_start is None:
        assert inputs.width is not None
        return each.div(inputs.width, rounding_mode="floor").long()
    return torch.searchsorted(inputs.query_start[1:].contiguous(), each, right=True).clamp(max=rows - 1)
