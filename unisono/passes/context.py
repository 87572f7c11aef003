"""What passes are made of: target model, drafter, sampler, features and the state on the device that they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from unisono.attention.base import AttentionInputs, LastTokens
from unisono.attention.context import PassContext
from unisono.distributed.columns import whole
from unisono.drafters.base import Drafter
from unisono.graphs import Buffers, Hidden, Program, Schema
from unisono.kernels.cache.pages import group_slot_mapping
from unisono.kernels.speculation.rounds import commit
from unisono.kv.recurrent_state import TailPass
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.kv.store import StateStore
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.passes.acceptance import AcceptanceRule, ExactMatch
from unisono.passes.features.base import Computed, Feature, Outputs, TargetTokens
from unisono.passes.slot_tensors import SlotTensors
from unisono.passes.tree import Tree
from unisono.sampling.pipeline import DraftSampler, edit_and_sample


@dataclass(frozen=True)
class Modules:
    """The modules and tensors of one engine's passes.

    store: the state of requests. sampler: ``context.sample`` of drafters. features: what requests may ask for.
    tree: where rounds try several paths for each request; None for chains.
    """

    model: Decoder
    drafter: Drafter
    slots: SlotTensors
    sampler: DraftSampler
    store: StateStore
    features: Sequence[Feature] = ()
    acceptance: AcceptanceRule = field(default_factory=ExactMatch)
    tree: Tree | None = None

    @property
    def width(self) -> int:
        """Positions of a request in a round with all drafts: 1 + k."""
        return 1 + self.drafter.num_drafts

    @property
    def paths(self) -> int:
        return 1 if self.tree is None else len(self.tree.paths)

    def program(self, name: str, schema: Schema, run: Callable[[Buffers], None]) -> Program:
        """A program whose drafter, too, needs whole rows of logits only where its key says so.

        In other programs a drafter always has them, since their keys do not say what requests ask for.
        """

        def sampling(b: Buffers) -> None:
            with self.sampler.unfiltered(not b.features.whole_logits):
                run(b)

        return Program(name, schema, sampling)

    def forward(
        self,
        b: Buffers,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        inputs: AttentionInputs,
        given: Sequence[Overriding] = (),
        last_tokens: LastTokens | None = None,
        rotary: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's final hidden states [T, H], or those of ``last_tokens``, and those that the drafter asked
        for. rows [N]: each row's slot. rotary: see ``PassContext.rotary_positions``."""
        features = self.drafter.features
        context = PassContext(self._groups(inputs), rotary, last_tokens, self._tails(inputs))
        last = None if last_tokens is None else last_tokens.last
        tokens = TargetTokens(rows, token_ids.shape[0], inputs.width, inputs.query_start, last)
        with ExitStack() as around:
            for feature in self.features:
                if (held := feature.around_target(b, tokens)) is not None:
                    around.enter_context(held)
            hidden, aux = self.model(token_ids, context, self.store.view("target").tree, features.aux_layers, given)
        if context.tails is not None:
            context.tails.advance(self.store.tail_positions)
        return hidden, {Hidden.NULL: None, Hidden.AUX: aux}.get(features.hidden, hidden)

    def _groups(self, inputs: AttentionInputs) -> dict[int, AttentionInputs]:
        """The inputs of a pass for each page lifetime; ``inputs`` are those of ALL."""
        groups, first = {ALL: inputs}, inputs.slot_mapping
        for lifetime in self.store.lifetimes[1:]:
            table = self.store.page_tables[lifetime]
            mapping = group_slot_mapping(table, inputs.slots, inputs.positions, first, inputs.query_start, PAGE_SIZE)
            groups[lifetime] = replace(inputs, page_table=table, slot_mapping=mapping)
        return groups

    def _tails(self, inputs: AttentionInputs) -> TailPass | None:
        """Where the recurrences of a pass's rows begin; None where the model has none."""
        if not self.store.tails:
            return None
        i = inputs
        return TailPass.of(i.slots, i.positions, i.kv_len, i.query_start, self.store.tail_positions, i.singles)

    def sample(
        self,
        b: Buffers,
        hidden: torch.Tensor,
        last: torch.Tensor,
        rows: torch.Tensor,
        drafts: torch.Tensor,
        outputs: Outputs,
    ) -> torch.Tensor:
        """The target's tokens [N, W] after drafts [N, k]; features report what they want of them.

        hidden: of all tokens that the pass computed. last [N · W, H]: of the positions that are sampled. rows [N]:
        slots.
        """
        width, logits = 1 + drafts.shape[1], self.model.logit_columns(last)
        if b.features.whole_logits:
            logits = whole(logits)
        masks = (feature.allowed_tokens(b, rows.shape[0]) for feature in self.features)
        mask = next((mask for mask in masks if mask is not None), None)
        sampled = edit_and_sample(logits, rows, width, drafts, self.slots, mask=mask)
        computed = Computed(b, hidden, logits, rows, width, sampled, outputs)
        for feature in self.features:
            feature.report(computed)
        return sampled.tokens.view(-1, width)

    def commit(self, sampled: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Commit the accepted drafts and one token more; see :func:`unisono.kernels.speculation.rounds.commit`."""
        s = self.slots
        return commit(sampled, drafts, rows, s.length, s.max_length, s.status, s.last_token, s.stop_ids, s.history)
