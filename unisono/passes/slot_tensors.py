"""The state of running requests as passes see it."""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.sampling.pipeline import EditFields


class SlotTensors(EditFields, Protocol):
    """The state of running requests that passes read and write, a row for each slot; see ``engine/slots.py``.

    padding: the slot of rows that no request fills. page_table [tables, pages]; the others [S].
    """

    padding: int
    max_length: torch.Tensor
    max_drafts: torch.Tensor
    last_token: torch.Tensor
    page_table: torch.Tensor
