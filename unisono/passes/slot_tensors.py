"""The state of running requests as passes see it."""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.sampling.pipeline import EditFields


class SlotTensors(EditFields, Protocol):
    """The state of running requests that passes read and write, a row for each slot; see ``engine/worker/slots.py``.

    padding: the slot of rows that no request fills. page_table [tables, pages]; the others [S]. rotary_delta: what a
    generated token's position on each rotary axis is more than its absolute one; None in models that see nothing.
    """

    padding: int
    max_length: torch.Tensor
    max_drafts: torch.Tensor
    last_token: torch.Tensor
    page_table: torch.Tensor
    rotary_delta: torch.Tensor | None


def rotary_positions(slots: SlotTensors, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """The positions that the tokens of a round turn by [R · W] int32; None where they are the absolute ones.

    rows [R]: slots. positions [R · W] int32: absolute, -1 for padding, which stays below 0 or turns at random.
    """
    if slots.rotary_delta is None:
        return None
    return (positions.view(rows.shape[0], -1) + slots.rotary_delta.index_select(0, rows)[:, None]).flatten()
