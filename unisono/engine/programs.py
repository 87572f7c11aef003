"""The passes of the engine as programs: ``extend`` for prompts, ``round`` for everything after.

A round takes every request from n committed tokens to n + 1 + a, where a drafts were accepted; with
k = 0 that is plain decoding. An extend pass computes prompt tokens and, for rows whose prompt ends in
it, does what a round of width 1 does: sample, commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from unisono.attention.base import AttentionInputs
from unisono.cache.kv import PAGE_SIZE
from unisono.cache.pages import pages_for
from unisono.drafters.base import Drafter, PromptPass, Verified
from unisono.engine.needs import Overriding, extend_fields, overriding, return_hidden, round_fields
from unisono.engine.slots import Slots
from unisono.engine.tree import Tree
from unisono.kernels.logprobs import WORDS as LOGPROB_WORDS
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import commit, extend_inputs, force_drafts, limit_drafts, round_inputs
from unisono.models.decoder import Decoder
from unisono.program import Buffers, Field, Hidden, Logits, Needs, Program, Schema
from unisono.sampling.pipeline import DraftPicker, edit_and_pick, report_logprobs, report_prompt_logprobs

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


SCORED_TOKENS = 256
"""Prompt tokens whose logits exist at once where all of them are asked for."""


@dataclass(frozen=True)
class Parts:
    """What a pass is made of. ``kv`` holds (keys, values) of each layer; ``picker`` is the drafter's ``host.pick``.

    processed: report log-probabilities of what tokens were drawn from rather than of the model's own logits.
    forced: benchmarks only, the tokens that every round commits on average; None verifies in earnest.
    tree: where rounds try several paths for each request; None for a chain.
    """

    model: Decoder
    drafter: Drafter
    slots: Slots
    picker: DraftPicker
    kv: Layers
    processed: bool = False
    forced: float | None = None
    tree: Tree | None = None

    @property
    def width(self) -> int:
        return 1 + self.drafter.num_drafts

    @property
    def dtype(self) -> torch.dtype:
        """Of embeddings and hidden states."""
        return self.model.embed.weight.dtype

    def forward(
        self, token_ids: torch.Tensor, inputs: AttentionInputs, given: Overriding | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target: hidden states [T, H] for the LM head, and what the drafter asked to see."""
        needs = self.drafter.needs
        hidden, aux = self.model(token_ids, inputs, self.kv, needs.aux_layers, given)
        return hidden, {Hidden.NULL: None, Hidden.AUX: aux}.get(needs.hidden, hidden)

    def pick(
        self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, logprobs: torch.Tensor
    ) -> torch.Tensor:
        """The target's tokens [R, W] for logits [R * W, V]; fills ``logprobs [R, W, words]`` for rows that ask."""
        width = logprobs.shape[1]
        picked = edit_and_pick(logits, rows, width, drafts, self.slots)
        report_logprobs(logits, rows, width, picked, self.slots, self.processed, logprobs)
        return picked.tokens.view(-1, width)

    def score(self, hidden: torch.Tensor, b: Buffers) -> None:
        """Fill ``b.prompt_logprobs`` with those of the tokens behind ``b.score_rows``, a slice of logits at a time."""
        token = b.score_rows.clamp_min(0)
        row = torch.searchsorted(b.query_start[1:], token, right=True).clamp_max(b.slots.shape[0] - 1)
        slots = b.slots.index_select(0, row).masked_fill(b.score_rows < 0, self.slots.padding)
        next_ids = b.next_ids.index_select(0, token)
        for part in (slice(i, i + SCORED_TOKENS) for i in range(0, token.shape[0], SCORED_TOKENS)):
            logits, out = self.model.logits(hidden.index_select(0, token[part])), b.prompt_logprobs[part]
            report_prompt_logprobs(logits, slots[part], next_ids[part], self.slots, out)

    def commit(self, picks: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Accept and commit; see :func:`unisono.kernels.rounds.commit`."""
        s = self.slots
        return commit(picks, drafts, rows, s.length, s.limit, s.status, s.last_token, s.stop_ids, s.history)


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width + 1) + 1


def round_program(parts: Parts, needs: Needs | None = None) -> Program:
    """Draft, verify, sample, accept and commit for ``rows`` requests, ``width`` tokens each.

    needs: the drafter's, or more.
    """
    needs = needs or parts.drafter.needs
    slots, growth = parts.slots, growth_columns(parts.width)
    schema = Schema(
        (
            Field("slots", torch.int32, ("rows",), pad=slots.padding),
            Field("columns", torch.int32, ("rows", growth), pad=-1),
            Field("pages", torch.int32, ("rows", growth)),
            Field("result", torch.int32, ("rows", parts.width + 2), output=True),
            Field("drafted", torch.int32, ("rows",), output=True),
            Field("logprobs", torch.int32, ("rows", "width", LOGPROB_WORDS), output=True),
            *round_fields(needs, parts.model.config.hidden_size, parts.dtype),
        )
    )

    def run(b: Buffers) -> None:
        grow_pages(slots.page_table, b.slots, b.columns, b.pages)
        if parts.tree is None:
            _chain_round(parts, needs, b)
        else:
            _tree_round(parts, needs, parts.tree, b)

    return Program("round", schema, run, vary=partial(round_program, parts))


def _chain_round(parts: Parts, needs: Needs, b: Buffers) -> None:
    """One row of drafts for each request."""
    slots, width = parts.slots, b.shape.width
    drafts = torch.full((b.shape.rows, width - 1), -1, dtype=torch.int32, device=b.device)
    if width > 1:
        with parts.picker.seeing(drafts):
            parts.drafter.propose(b.slots, drafts)
        limit_drafts(drafts, b.slots, slots.max_drafts, b.drafted)
    picks, hidden, seen = _verify(parts, b.slots, b.slots, drafts, b.logprobs)
    return_hidden(b, needs, hidden)
    if parts.forced is not None:
        b.drafted.fill_(width - 1)
    b.result.copy_(parts.commit(picks, drafts, b.slots))
    if width > 1:
        parts.drafter.observe(Verified(b.slots, b.result, picks, seen))


def _tree_round(parts: Parts, needs: Needs, tree: Tree, b: Buffers) -> None:
    """P rows of drafts for each request, of which the best is committed."""
    slots, width = parts.slots, b.shape.width
    fork = tree.fork(b.slots)
    drafts = torch.full((len(fork.slots), width - 1), -1, dtype=torch.int32, device=b.device)
    with parts.picker.seeing(drafts):
        tree.propose(fork, drafts)
    limit_drafts(drafts, fork.slots, slots.max_drafts, torch.empty_like(fork.slots))
    logprobs = b.logprobs.new_empty(len(fork.slots), *b.logprobs.shape[1:])
    picks, hidden, seen = _verify(parts, fork.slots, fork.tables, drafts, logprobs)
    if parts.forced is not None:
        tree.leave_one(fork, drafts)
    best = tree.best(fork, picks, drafts)
    b.logprobs.copy_(logprobs.index_select(0, best.rows))
    b.drafted.copy_(best.drafted)
    if parts.forced is not None:
        b.drafted.fill_(width - 1)
    b.result.copy_(parts.commit(best.picks, best.drafts, b.slots))
    tree.adopt(b.slots, best, b.result)
    if needs.returned:
        return_hidden(b, needs, _rows_of(hidden, len(fork.slots), best.rows))
    seen = None if seen is None else _rows_of(seen, len(fork.slots), best.rows)
    parts.drafter.observe(Verified(b.slots, b.result, best.picks, seen))


def _verify(
    parts: Parts, rows: torch.Tensor, tables: torch.Tensor, drafts: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The target's picks [R, W] behind drafts [R, k], its hidden states [R · W, H], and what the drafter asked to see.

    rows [R]: each row's slot; tables [R]: its row of the page table.
    """
    slots, width = parts.slots, 1 + drafts.shape[1]
    token_ids, positions, kv_slots, kv_len = round_inputs(
        rows, drafts, slots.length, slots.limit, slots.status, slots.last_token, slots.page_table, PAGE_SIZE, tables
    )
    inputs = AttentionInputs(tables, positions, kv_slots, kv_len, slots.page_table, width)
    hidden, seen = parts.forward(token_ids, inputs)
    picks = parts.pick(parts.model.logits(hidden), rows, drafts, logprobs)
    if parts.forced is not None:
        force_drafts(drafts, picks, rows, slots.length, parts.forced)
    return picks, hidden, seen


def score_needs(parts: Parts) -> Needs:
    """The program "score" by default: room for the log-probabilities of every token of the pass."""
    return replace(parts.drafter.needs, logits=Logits.ALL)


def extend_program(parts: Parts, max_rows: int, needs: Needs | None = None) -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    needs: the drafter's, or more. With more logits than the last it is the program "score", which also reports prompt
    tokens' log-probabilities: ``score_rows`` names the tokens of the pass behind which one is asked for, -1: none.

    ``sample_slots`` names the slot of each row that ends its prompt here, else the padding slot;
    ``last`` is the index of that row's last token; ``next_ids`` the token after each, as far as it is known.
    """
    slots = parts.slots
    needs = needs or parts.drafter.needs
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
            Field("logprobs", torch.int32, (max_rows, 1, LOGPROB_WORDS), output=True),
            *extend_fields(needs, parts.model.config.hidden_size, parts.dtype),
        )
    )

    def run(b: Buffers) -> None:
        positions, kv_slots, kv_len = extend_inputs(
            b.slots, b.query_start, b.start, slots.page_table, PAGE_SIZE, b.shape.rows
        )
        inputs = AttentionInputs(b.slots, positions, kv_slots, kv_len, slots.page_table, None, b.query_start)
        hidden, seen = parts.forward(b.token_ids, inputs, overriding(b, needs, parts.dtype))
        return_hidden(b, needs, hidden)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        logits = parts.model.logits(hidden.index_select(0, b.last))
        picks = parts.pick(logits, b.sample_slots, drafts, b.logprobs)
        if needs.logits:
            parts.score(hidden, b)
        b.result.copy_(parts.commit(picks, drafts, b.sample_slots))
        if parts.width > 1:
            next_ids = _with_sampled(b.next_ids, b.last, picks[:, 0], b.sample_slots != slots.padding)
            parts.drafter.observe_prompt(
                PromptPass(b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen)
            )

    return Program("score" if needs.logits else "extend", schema, run, vary=partial(extend_program, parts, max_rows))


def _rows_of(states: torch.Tensor, rows: int, chosen: torch.Tensor) -> torch.Tensor:
    """Of states [rows · W, H] those of the chosen rows [R]: [R · W, H]."""
    return states.view(rows, -1).index_select(0, chosen).view(-1, states.shape[1])


def _with_sampled(
    next_ids: torch.Tensor, last: torch.Tensor, picks: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """``next_ids [T]`` with ``picks [E]`` put at ``last [E]`` where ``sampled [E]``."""
    spare = next_ids.shape[0]  # rows that sample nothing write behind the end
    padded = torch.cat((next_ids, next_ids[:1]))
    return padded.index_copy(0, last.masked_fill(~sampled, spare).long(), picks)[:spare]
