"""The passes of the engine as programs: ``extend`` for prompts, ``round`` for everything after.

A round takes every request from n committed tokens to n + 1 + a, where a drafts were accepted; with
k = 0 that is plain decoding. An extend pass computes prompt tokens and, for rows whose prompt ends in
it, does what a round of width 1 does: sample, commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.attention.base import AttentionInputs, LastTokens
from unisono.attention.context import PassContext
from unisono.drafters.base import Drafter, PausableDrafter, PromptPass, Verified
from unisono.engine.feature_fields import (
    Overriding,
    embedding_fields,
    hidden_field,
    mask_field,
    overriding,
    return_hidden,
    score_fields,
)
from unisono.engine.slots import Slots
from unisono.engine.synthetic import AcceptanceRule
from unisono.engine.tree import Tree
from unisono.kernels.logprobs import WORDS as LOGPROB_WORDS
from unisono.kernels.pages import grow_pages
from unisono.kernels.rounds import commit, extend_inputs, limit_drafts, round_inputs
from unisono.kernels.tree_paths import Fork
from unisono.models.decoder import Decoder
from unisono.program import Buffers, Field, Hidden, Program, Schema
from unisono.sampling.pipeline import DraftSampler, edit_and_sample, report_logprobs, report_prompt_logprobs
from unisono.state.pages import pages_for
from unisono.state.specs import PAGE_SIZE

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


SCORED_TOKENS = 256
"""Prompt tokens whose logits exist at once where all of them are asked for."""


@dataclass(frozen=True)
class Parts:
    """What a pass is made of. ``kv`` holds (keys, values) of each layer; ``sampler`` is ``context.sample`` of drafters.

    processed: report log-probabilities of what tokens were drawn from rather than of the model's own logits.
    forced: benchmarks only, overwrites drafts with what will be accepted; None verifies in earnest.
    tree: where rounds try several paths for each request; None for a chain.
    held: int32 [slots · paths · k], drafts that wait for their masks between two passes (``masked.py``).
    """

    model: Decoder
    drafter: Drafter
    slots: Slots
    sampler: DraftSampler
    kv: Layers
    processed: bool = False
    forced: AcceptanceRule | None = None
    tree: Tree | None = None
    held: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return 1 + self.drafter.num_drafts

    @property
    def paths(self) -> int:
        return 1 if self.tree is None else len(self.tree.paths)

    @property
    def vectors(self) -> tuple[int, torch.dtype]:
        """The size and the dtype of embeddings and hidden states."""
        return self.model.config.hidden_size, self.model.embed.weight.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        inputs: AttentionInputs,
        given: Overriding | None = None,
        last_tokens: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's hidden states [T, H], or those of ``last_tokens``, and what the drafter asked to see."""
        features = self.drafter.features
        hidden, aux = self.model(token_ids, PassContext.of(inputs, last_tokens), self.kv, features.aux_layers, given)
        return hidden, {Hidden.NULL: None, Hidden.AUX: aux}.get(features.hidden, hidden)

    def reads_last_tokens_only(self, b: Buffers) -> bool:
        """Whether of a prompt pass nobody reads the target's output but that of each row's last token."""
        features = self.drafter.features
        drafted = features.hidden is Hidden.FULL or self.model.config.num_layers in features.aux_layers
        return not drafted and b.find("hidden") is None and b.find("score_rows") is None

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafts: torch.Tensor,
        logprobs: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The target's tokens [R, W] for logits [R * W, V]; fills ``logprobs [R, W, words]`` for rows that ask.

        mask: int32 words of a bit for each token, R · W times so many; None where the pass has none.
        """
        width = logprobs.shape[1]
        mask = None if mask is None else mask.reshape(logits.shape[0], -1)
        picked = edit_and_sample(logits, rows, width, drafts, self.slots, mask=mask)
        report_logprobs(logits, rows, width, picked, self.slots, self.processed, logprobs)
        return picked.tokens.view(-1, width)

    def score(self, hidden: torch.Tensor, b: Buffers) -> None:
        """Where prompt tokens are scored, fill ``b.prompt_logprobs`` with those of the tokens behind ``b.score_rows``.

        A slice of logits at a time.
        """
        if (rows := b.find("score_rows")) is None:
            return
        token = rows.clamp_min(0)
        row = torch.searchsorted(b.query_start[1:], token, right=True).clamp_max(b.slots.shape[0] - 1)
        slots = b.slots.index_select(0, row).masked_fill(rows < 0, self.slots.padding)
        next_ids = b.next_ids.index_select(0, token)
        for part in (slice(i, i + SCORED_TOKENS) for i in range(0, token.shape[0], SCORED_TOKENS)):
            logits, out = self.model.logits(hidden.index_select(0, token[part])), b.prompt_logprobs[part]
            report_prompt_logprobs(logits, slots[part], next_ids[part], self.slots, out)

    def commit(self, sampled: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Accept and commit; see :func:`unisono.kernels.rounds.commit`."""
        s = self.slots
        return commit(sampled, drafts, rows, s.length, s.max_length, s.status, s.last_token, s.stop_ids, s.history)


def growth_columns(width: int) -> int:
    """Pages by which a request's table may grow with one round: two rounds' worst case, not aligned."""
    return pages_for(2 * width + 1) + 1


def growth_fields(parts: Parts) -> tuple[Field, ...]:
    """What a pass of a round is told of its rows: their slots, and the pages by which their tables grow."""
    growth = growth_columns(parts.width)
    return (
        Field("slots", torch.int32, ("rows",), pad=parts.slots.padding),
        Field("columns", torch.int32, ("rows", growth), pad=-1),
        Field("pages", torch.int32, ("rows", growth)),
    )


def outcome_fields(parts: Parts) -> tuple[Field, ...]:
    """What a round hands the host."""
    return (
        Field("result", torch.int32, ("rows", "result"), output=True),
        Field("drafted", torch.int32, ("rows",), output=True),
        Field("logprobs", torch.int32, ("rows", "width", LOGPROB_WORDS), output=True),
        hidden_field(*parts.vectors, "rows", "width"),
    )


def round_program(parts: Parts) -> Program:
    """Draft, verify, sample, accept and commit for ``rows`` requests, ``width`` tokens each: 1 … 1 + k."""
    slots = parts.slots
    schema = Schema(
        (
            *growth_fields(parts),
            *outcome_fields(parts),
        )
    )

    def run(b: Buffers) -> None:
        grow_pages(slots.page_table, b.slots, b.columns, b.pages)
        if parts.tree is None or b.shape.width == 1:
            _chain_round(parts, b)
        else:
            _tree_round(parts, parts.tree, b)

    return Program("round", schema, run)


def _chain_round(parts: Parts, b: Buffers) -> None:
    """One row of drafts for each request."""
    drafts = torch.full((b.shape.rows, b.shape.width - 1), -1, dtype=torch.int32, device=b.device)
    draft_chain(parts, b.slots, drafts, b.drafted)
    verify_chain(parts, b, drafts)


def draft_chain(parts: Parts, slots: torch.Tensor, drafts: torch.Tensor, drafted: torch.Tensor) -> None:
    """Fill ``drafts [R, k]``, all -1 before, and ``drafted [R]`` with how many there are."""
    if drafts.shape[1]:
        with parts.sampler.seeing(drafts):
            parts.drafter.propose(slots, drafts)
        limit_drafts(drafts, slots, parts.slots.max_drafts, drafted)


def verify_chain(parts: Parts, b: Buffers, drafts: torch.Tensor) -> None:
    """Verify and commit ``drafts [R, k]``, and let the drafter catch up."""
    width = b.shape.width
    mask = b.find("mask")
    sampled, hidden, seen = _verify(parts, b.slots, b.slots, drafts, b.logprobs, None if mask is None else mask[:, 0])
    return_hidden(b, hidden)
    if parts.forced is not None:
        b.drafted.fill_(width - 1)
    b.result.copy_(parts.commit(sampled, drafts, b.slots))
    _outputs_ready_before_catch_up(parts, b)
    verified = Verified(b.slots, b.result, sampled, seen)
    if width == 1 and isinstance(parts.drafter, PausableDrafter):
        parts.drafter.remember(verified)
    elif parts.width > 1:
        parts.drafter.observe(verified)


def catch_up_program(drafter: PausableDrafter, slots: Slots) -> Program:
    """Have the drafter catch up with up to ``width`` pending tokens of ``rows`` requests."""
    schema = Schema((Field("slots", torch.int32, ("rows",), pad=slots.padding),))
    return Program("catch_up", schema, lambda b: drafter.resume(b.slots))


def _tree_round(parts: Parts, tree: Tree, b: Buffers) -> None:
    """P rows of drafts for each request, of which the best is committed."""
    fork = tree.fork(b.slots)
    drafts = torch.full((len(fork.slots), b.shape.width - 1), -1, dtype=torch.int32, device=b.device)
    draft_tree(parts, tree, fork, drafts)
    verify_tree(parts, tree, b, fork, drafts)


def draft_tree(parts: Parts, tree: Tree, fork: Fork, drafts: torch.Tensor) -> None:
    """Fill ``drafts [R · P, k]``, all -1 before."""
    with parts.sampler.seeing(drafts):
        tree.propose(fork, drafts)
    limit_drafts(drafts, fork.slots, parts.slots.max_drafts, torch.empty_like(fork.slots))


def verify_tree(parts: Parts, tree: Tree, b: Buffers, fork: Fork, drafts: torch.Tensor) -> None:
    """Verify every path, commit the best one, and let the drafter catch up."""
    logprobs = b.logprobs.new_empty(len(fork.slots), *b.logprobs.shape[1:])
    sampled, hidden, seen = _verify(parts, fork.slots, fork.tables, drafts, logprobs, b.find("mask"))
    if parts.forced is not None:
        tree.leave_one(fork, drafts)
    best = tree.best(fork, sampled, drafts)
    b.logprobs.copy_(logprobs.index_select(0, best.rows))
    b.drafted.copy_(best.drafted)
    if parts.forced is not None:
        b.drafted.fill_(b.shape.width - 1)
    b.result.copy_(parts.commit(best.sampled, best.drafts, b.slots))
    tree.adopt(b.slots, best, b.result)
    return_hidden(b, _rows_of(hidden, len(fork.slots), best.rows))
    _outputs_ready_before_catch_up(parts, b)
    seen = None if seen is None else _rows_of(seen, len(fork.slots), best.rows)
    parts.drafter.observe(Verified(b.slots, b.result, best.sampled, seen))


def _outputs_ready_before_catch_up(parts: Parts, b: Buffers) -> None:
    """Before the drafter catches up, let the host have the tokens of a round under masks: it waits for them.

    Other rounds it reads one late, so there is nothing to win; and from the outputs of one to those of the next it
    measures what a round takes, catching up included (``draft_controller.py``).
    """
    if parts.width > 1 and b.find("mask") is not None:
        b.outputs_ready()


def _verify(
    parts: Parts,
    rows: torch.Tensor,
    tables: torch.Tensor,
    drafts: torch.Tensor,
    logprobs: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The target's tokens [R, W] after drafts [R, k], its hidden states [R · W, H], and what the drafter asked to see.

    rows [R]: each row's slot; tables [R]: its row of the page table.
    """
    slots, width = parts.slots, 1 + drafts.shape[1]
    token_ids, positions, slot_mapping, kv_len = round_inputs(
        rows,
        drafts,
        slots.length,
        slots.max_length,
        slots.status,
        slots.last_token,
        slots.page_table,
        PAGE_SIZE,
        tables,
    )
    inputs = AttentionInputs(tables, positions, slot_mapping, kv_len, slots.page_table, width)
    hidden, seen = parts.forward(token_ids, inputs)
    sampled = parts.sample(parts.model.logits(hidden), rows, drafts, logprobs, mask)
    if parts.forced is not None:
        parts.forced(drafts, sampled, rows)
    return sampled, hidden, seen


def extend_program(parts: Parts, max_rows: int, name: str = "extend") -> Program:
    """Compute ``rows`` prompt tokens of at most ``max_rows`` requests; sample where a prompt ends.

    name: "score" for passes that also report log-probabilities of prompt tokens, for these have graphs of their own.

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
            mask_field(parts.model.config.vocab_size, max_rows, 1),
            *embedding_fields(*parts.vectors),
            Field("result", torch.int32, (max_rows, 3), output=True),
            Field("logprobs", torch.int32, (max_rows, 1, LOGPROB_WORDS), output=True),
            *score_fields(),
            hidden_field(*parts.vectors, "rows"),
        )
    )

    def run(b: Buffers) -> None:
        positions, slot_mapping, kv_len = extend_inputs(
            b.slots, b.query_start, b.start, slots.page_table, PAGE_SIZE, b.shape.rows
        )
        inputs = AttentionInputs(b.slots, positions, slot_mapping, kv_len, slots.page_table, None, b.query_start)
        last_tokens = inputs.last_tokens(b.last)
        only = last_tokens if b.shape.rows > max_rows and parts.reads_last_tokens_only(b) else None
        hidden, seen = parts.forward(b.token_ids, inputs, overriding(b, parts.vectors[1]), only)
        return_hidden(b, hidden)
        drafts = torch.empty((max_rows, 0), dtype=torch.int32, device=b.device)
        last = hidden if only else last_tokens.select(hidden)
        sampled = parts.sample(parts.model.logits(last), b.sample_slots, drafts, b.logprobs, b.find("mask"))
        parts.score(hidden, b)
        b.result.copy_(parts.commit(sampled, drafts, b.sample_slots))
        if parts.width > 1:
            b.outputs_ready()  # somebody waits for the first token, and not for the drafter
            seen = last if parts.drafter.features.hidden is Hidden.LAST else seen
            next_ids = _with_sampled(b.next_ids, b.last, sampled[:, 0], b.sample_slots != slots.padding)
            parts.drafter.observe_prompt(
                PromptPass(b.slots, b.query_start, b.start, b.token_ids, next_ids, positions, b.last, seen)
            )

    return Program(name, schema, run)


def _rows_of(states: torch.Tensor, rows: int, chosen: torch.Tensor) -> torch.Tensor:
    """Of states [rows · W, H] those of the chosen rows [R]: [R · W, H]."""
    return states.view(rows, -1).index_select(0, chosen).view(-1, states.shape[1])


def _with_sampled(
    next_ids: torch.Tensor, last: torch.Tensor, sampled: torch.Tensor, samples: torch.Tensor
) -> torch.Tensor:
    """``next_ids [T]`` with ``sampled [E]`` put at ``last [E]`` where ``samples [E]``."""
    spare = next_ids.shape[0]  # rows that sample nothing write behind the end
    padded = torch.cat((next_ids, next_ids[:1]))
    return padded.index_copy(0, last.masked_fill(~samples, spare).long(), sampled)[:spare]
