"""Attention by requests (``--enable-dp-attention``): the part of a pass whose pages this rank holds.

All ranks run the same passes over the same requests. A page table has ids of all ranks' pages, rank r's from r · P on,
and a request's pages are on one rank. To the attention of any other rank its tokens are padding: they see nothing and
are written to the padding page. Rows do not depend on each other, so a rank's rows have the bits of an undivided pass.

Shapes: T tokens, R rows (requests), MP pages per request, P pages of a rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unisono.attention.base import AttentionInputs
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE


def own_inputs(inputs: AttentionInputs, rank: int, pages: int) -> tuple[AttentionInputs, torch.Tensor]:
    """Inputs of a pass on one rank, with page ids and cache slots of its own, and the rank of each token [T] int32.

    pages: P. The page table of the result has a row for each of the pass's.
    """
    first = rank * pages
    table = inputs.page_table.index_select(0, inputs.slots)
    owners = table[:, 0].div(pages, rounding_mode="floor")
    owner = owners.index_select(0, _rows(inputs))
    others, foreign = owners != rank, owner != rank
    local = inputs.slot_mapping - first * PAGE_SIZE
    mapping = torch.where(foreign | (local < 0), inputs.slot_mapping % PAGE_SIZE, local)  # of the padding page
    own = replace(
        inputs,
        slots=torch.arange(len(owners), dtype=torch.int32, device=owners.device),
        positions=inputs.positions.masked_fill(foreign, -1),
        slot_mapping=mapping,
        kv_len=inputs.kv_len.masked_fill(others, 0),
        page_table=(table - first).clamp(min=PADDING_PAGE).masked_fill(others[:, None], PADDING_PAGE),
        plan=None,
    )
    return own, owner


def _rows(inputs: AttentionInputs) -> torch.Tensor:
    """Row of each token [T] int64; the last one for padding after all rows."""
    rows, tokens = inputs.slots.shape[0], inputs.positions.shape[0]
    each = torch.arange(tokens, dtype=torch.int32, device=inputs.slots.device)
    if inputs.query_start is None:
        assert inputs.width is not None
        return each.div(inputs.width, rounding_mode="floor").long()
    return torch.searchsorted(inputs.query_start[1:].contiguous(), each, right=True).clamp(max=rows - 1)
