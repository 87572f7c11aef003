"""Moving a request's recurrences on to the last page end that it has reached, when it ends.

A round moves tails to the page end before its first token, for the others may be rejected. What the last round of a
request commits may reach the next page end; its inputs are remembered, so the tails can follow without a pass of the
model. The prefix cache then has a snapshot wherever it would have one without drafts.
"""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import PassContext
from unisono.kv.recurrent_state import TailPass
from unisono.kv.specs import ALL
from unisono.kv.store import StateStore
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import Settles


def settle_tails(model: Decoder, store: StateStore, slot: int, position: int) -> None:
    """Move the snapshots of a slot's recurrences on to ``position`` tokens, a multiple of PAGE_SIZE.

    The inputs of all tokens up to there must be remembered.
    """
    row, at = (torch.full((1,), number, dtype=torch.int32, device=store.device) for number in (slot, position))
    no_tokens = torch.zeros(2, dtype=torch.int32, device=store.device)
    inputs = AttentionInputs(row, row[:0], row[:0], at, store.page_tables[ALL], None, no_tokens)
    tails = TailPass(row, store.tail_positions.index_select(0, row), at, at, at)
    context = PassContext({ALL: inputs}, tails=tails)
    for layer, state in zip(model.layers, store.view("target").tree, strict=True):
        if isinstance(layer.mixer, Settles):
            layer.mixer.settle(context, state)
    tails.advance(store.tail_positions)
