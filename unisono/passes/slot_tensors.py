"""Device state of running requests, as read and written by passes."""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.sampling.pipeline import EditFields


class SlotTensors(EditFields, Protocol):
    """Device state of running requests, one row per slot; see ``engine/worker/slots.py``.

    padding: slot of rows without a request. page_table [tables, pages]; the other fields [S].
    rotary_delta: offset of generated tokens' rotary positions from their absolute ones; None in models without vision.
    """

    padding: int
    max_length: torch.Tensor
    max_drafts: torch.Tensor
    last_token: torch.Tensor
    page_table: torch.Tensor
    rotary_delta: torch.Tensor | None


def rotary_positions(slots: SlotTensors, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """Rotary positions of a round's tokens [R · W] int32; None if they equal the absolute ones.

    rows [R]: slots. positions [R · W] int32: absolute; -1 for padding, whose rotary positions are arbitrary.
    """
    if slots.rotary_delta is None:
        return None
    return (positions.view(rows.shape[0], -1) + slots.rotary_delta.index_select(0, rows)[:, None]).flatten()
