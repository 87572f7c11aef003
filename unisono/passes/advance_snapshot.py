"""Advance of a request's recurrent snapshots to its last page end, when it ends.

A round advances recurrent state to the page end before its first token, because the other tokens may be rejected. The
tokens committed by a request's last round may reach the next page end. Their inputs are buffered, so the recurrent
state can follow without a pass of the model. The prefix cache then has a snapshot at the same positions as without
drafts.
"""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import ALL
from unisono.kv.store import StateStore
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AdvancesSnapshot


def advance_snapshots(model: Decoder, store: StateStore, slot: int, position: int) -> None:
    """Advance the snapshots of a slot's recurrent state to ``position`` tokens, a multiple of PAGE_SIZE.

    The inputs of all tokens up to there must be buffered.
    """
    row, at = (torch.full((1,), number, dtype=torch.int32, device=store.device) for number in (slot, position))
    no_tokens = torch.zeros(2, dtype=torch.int32, device=store.device)
    inputs = AttentionInputs(row, row[:0], row[:0], at, store.page_tables[ALL], None, no_tokens)
    recurrent = RecurrentPass(row, store.snapshot_positions.index_select(0, row), at, at, at)
    context = ForwardContext({ALL: inputs}, recurrent=recurrent)
    for layer, state in zip(model.layers, store.view("target").tree, strict=True):
        if isinstance(layer.mixer, AdvancesSnapshot):
            layer.mixer.advance(context, state)
    recurrent.advance(store.snapshot_positions)
