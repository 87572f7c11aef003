"""The passes of the engine as programs: ``extend`` for prompts, ``round`` for everything after.

A round takes every request from n committed tokens to n + 1 + a, where a drafts were accepted; with
k = 0 that is plain decoding. An extend pass computes prompt tokens and, for rows whose prompt ends in
it, does what a round of width 1 does: sample, commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.attention.base import AttentionBackend, AttentionInputs
from unisono.cache.kv import PAGE_SIZE
from unisono.cache.pages import pages_for
from unisono.drafters.base import Drafter
from unisono.engine.slots import Slots
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import commit, extend_inputs, round_inputs
from unisono.models.decoder import Decoder
from unisono.program import Buffers, Field, Program, Schema
from unisono.sampling.pipeline import pick

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Parts:
    """What a pass is made of. ``kv`` holds (keys, values) of each layer."""

    model: Decoder
    attention: AttentionBackend
    drafter: Drafter
    slots: Slots
    kv: Layers

    @property
    def width(self) -> int:
        return 1 + self.drafter.num_drafts


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width) + 1


def round_program(parts: Parts) -> Program:
    """Draft, verify, sample, accept and commit for ``rows`` requests, ``width`` tokens each."""
    slots, growth = parts.slots, growth_columns(parts.width)
    schema = Schema(
        (
            Field("slots", torch.int32, ("rows",), pad=slots.padding),
            Field("columns", torch.int32, ("rows", growth), pad=-1),
            Field("pages", torch.int32, ("rows", growth)),
            Field("result", torch.int32, ("rows", parts.width + 2), output=True),
        )
    )

    def run(b: Buffers) -> None:
        width = b.shape.width
        grow_pages(slots.page_table, b.slots, b.columns, b.pages)
        drafts = torch.full((b.shape.rows, width - 1), -1, dtype=torch.int32, device=b.device)
        parts.drafter.propose(b.slots, drafts)
        token_ids, positions, kv_slots, kv_len = round_inputs(
            b.slots, drafts, slots.length, slots.limit, slots.status, slots.last_token, slots.page_table, PAGE_SIZE
        )
        inputs = AttentionInputs(
            slots=b.slots,
            positions=positions,
            kv_slots=kv_slots,
            kv_len=kv_len,
            page_table=slots.page_table,
            width=width,
            query_start=None,
        )
        hidden = parts.model(token_ids, inputs, parts.kv)
        picks = pick(parts.model.logits(hidden), b.slots, width, slots)
        b.result.copy_(_commit(picks.view(-1, width), drafts, b.slots, slots))
        parts.drafter.observe(b.slots, b.result)

    return Program("round", schema, run)


def _commit(picks: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor, slots: Slots) -> torch.Tensor:
    return commit(
        picks, drafts, rows, slots.length, slots.limit, slots.status, slots.last_token, slots.stop_ids, slots.history
    )


def extend_program(parts: Parts, max_rows: int) -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    ``sample_slots`` names the slot of each row that ends its prompt here, else the padding slot;
    ``last`` is the index of that row's last token.
    """
    slots = parts.slots
    schema = Schema(
        (
            Field("token_ids", torch.int32, ("rows",)),
            Field("slots", torch.int32, (max_rows,), pad=slots.padding),
            Field("query_start", torch.int32, (max_rows + 1,)),
            Field("start", torch.int32, (max_rows,)),
            Field("sample_slots", torch.int32, (max_rows,), pad=slots.padding),
            Field("last", torch.int32, (max_rows,)),
            Field("result", torch.int32, (max_rows, 3), output=True),
        )
    )

    def run(b: Buffers) -> None:
        positions, kv_slots, kv_len = extend_inputs(
            b.slots, b.query_start, b.start, slots.page_table, PAGE_SIZE, b.shape.rows
        )
        inputs = AttentionInputs(
            slots=b.slots,
            positions=positions,
            kv_slots=kv_slots,
            kv_len=kv_len,
            page_table=slots.page_table,
            width=None,
            query_start=b.query_start,
        )
        hidden = parts.model(b.token_ids, inputs, parts.kv)
        parts.drafter.observe_prompt(b.slots, b.token_ids, positions)
        picks = pick(parts.model.logits(hidden.index_select(0, b.last)), b.sample_slots, 1, slots)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        b.result.copy_(_commit(picks.view(-1, 1), drafts, b.sample_slots, slots))

    return Program("extend", schema, run)
