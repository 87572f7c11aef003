"""The passes of the engine as programs: ``extend`` for prompts, ``round`` for everything after.

A round takes every request from n committed tokens to n + 1 + a, where a drafts were accepted; with
k = 0 that is plain decoding. An extend pass computes prompt tokens and, for rows whose prompt ends in
it, does what a round of width 1 does: sample, commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.attention.base import AttentionInputs
from unisono.cache.kv import PAGE_SIZE
from unisono.cache.pages import pages_for
from unisono.drafters.base import Drafter, PromptPass, Verified
from unisono.engine.slots import Slots
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import commit, extend_inputs, force_drafts, limit_drafts, round_inputs
from unisono.models.decoder import Decoder
from unisono.program import Buffers, Field, Hidden, Program, Schema
from unisono.sampling.pipeline import DraftPicker, edit_and_pick

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Parts:
    """What a pass is made of. ``kv`` holds (keys, values) of each layer; ``picker`` is the drafter's ``host.pick``.

    forced: benchmarks only, the tokens that every round commits on average; None verifies in earnest.
    """

    model: Decoder
    drafter: Drafter
    slots: Slots
    picker: DraftPicker
    kv: Layers
    forced: float | None = None

    @property
    def width(self) -> int:
        return 1 + self.drafter.num_drafts

    def forward(self, token_ids: torch.Tensor, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target: hidden states [T, H] for the LM head, and what the drafter asked to see."""
        needs = self.drafter.needs
        hidden, aux = self.model(token_ids, inputs, self.kv, needs.aux_layers)
        return hidden, {Hidden.NULL: None, Hidden.AUX: aux}.get(needs.hidden, hidden)

    def commit(self, picks: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Accept and commit; see :func:`unisono.kernels.rounds.commit`."""
        s = self.slots
        return commit(picks, drafts, rows, s.length, s.limit, s.status, s.last_token, s.stop_ids, s.history)


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width + 1) + 1


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
        if width > 1:
            with parts.picker.seeing(drafts):
                parts.drafter.propose(b.slots, drafts)
            limit_drafts(drafts, b.slots, slots.max_drafts)
        token_ids, positions, kv_slots, kv_len = round_inputs(
            b.slots, drafts, slots.length, slots.limit, slots.status, slots.last_token, slots.page_table, PAGE_SIZE
        )
        inputs = AttentionInputs(b.slots, positions, kv_slots, kv_len, slots.page_table, width)
        hidden, seen = parts.forward(token_ids, inputs)
        picked = edit_and_pick(parts.model.logits(hidden), b.slots, width, drafts, slots)
        picks = picked.tokens.view(-1, width)
        if parts.forced is not None:
            force_drafts(drafts, picks, b.slots, slots.length, parts.forced)
        b.result.copy_(parts.commit(picks, drafts, b.slots))
        if width > 1:
            parts.drafter.observe(Verified(b.slots, b.result, picks, seen))

    return Program("round", schema, run)


def extend_program(parts: Parts, max_rows: int) -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    ``sample_slots`` names the slot of each row that ends its prompt here, else the padding slot;
    ``last`` is the index of that row's last token; ``next_ids`` the token after each, as far as it is known.
    """
    slots = parts.slots
    schema = Schema(
        (
            Field("token_ids", torch.int32, ("rows",)),
            Field("next_ids", torch.int32, ("rows",)),
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
        inputs = AttentionInputs(b.slots, positions, kv_slots, kv_len, slots.page_table, None, b.query_start)
        hidden, seen = parts.forward(b.token_ids, inputs)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        logits = parts.model.logits(hidden.index_select(0, b.last))
        picks = edit_and_pick(logits, b.sample_slots, 1, drafts, slots).tokens
        b.result.copy_(parts.commit(picks.view(-1, 1), drafts, b.sample_slots))
        if parts.width > 1:
            next_ids = _with_sampled(b.next_ids, b.last, picks, b.sample_slots != slots.padding)
            parts.drafter.observe_prompt(
                PromptPass(b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen)
            )

    return Program("extend", schema, run)


def _with_sampled(
    next_ids: torch.Tensor, last: torch.Tensor, picks: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """``next_ids [T]`` with ``picks [E]`` put at ``last [E]`` where ``sampled [E]``."""
    spare = next_ids.shape[0]  # rows that sample nothing write behind the end
    padded = torch.cat((next_ids, next_ids[:1]))
    return padded.index_copy(0, last.masked_fill(~sampled, spare).long(), picks)[:spare]
