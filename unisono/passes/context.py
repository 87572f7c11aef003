"""Components shared by the passes: target model, drafter, sampler, features and device state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from unisono.attention.base import AttentionInputs, LastTokens
from unisono.attention.context import ForwardContext
from unisono.distributed.columns import whole
from unisono.drafters.base import Drafter
from unisono.graphs import Buffers, BufferSchema, Hidden, Program
from unisono.kernels.cache.pages import group_slot_mapping
from unisono.kernels.speculation.rounds import commit
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.kv.store import StateStore
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.passes.acceptance import CandidateRule, ExactMatch
from unisono.passes.features.base import Computed, Feature, Outputs, TargetTokens
from unisono.passes.slot_tensors import SlotTensors
from unisono.passes.tree import Tree
from unisono.sampling.pipeline import DraftSampler, edit_and_sample


@dataclass(frozen=True)
class PassContext:
    """The modules and tensors used by the passes of one engine.

    store: the state of requests.
    sampler: ``context.sample`` of drafters.
    features: the optional request features.
    tree: the draft tree, with several paths per request; None for chains.
    """

    model: Decoder
    drafter: Drafter
    slots: SlotTensors
    sampler: DraftSampler
    store: StateStore
    features: Sequence[Feature] = ()
    acceptance: CandidateRule = field(default_factory=ExactMatch)
    tree: Tree | None = None

    @property
    def width(self) -> int:
        """Positions per request in a round with all drafts: 1 + k."""
        return 1 + self.drafter.num_drafts

    @property
    def paths(self) -> int:
        return 1 if self.tree is None else len(self.tree.paths)

    def program(self, name: str, schema: BufferSchema, run: Callable[[Buffers], None]) -> Program:
        """Build a program whose drafter gathers whole rows of logits only if the graph key requires them.

        Programs built otherwise always give the drafter whole rows, since their keys do not contain the requests'
        needs.
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
        replaced: Sequence[Overriding] = (),
        last_tokens: LastTokens | None = None,
        rotary: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target. Returns its final hidden states [T, H], or [E, H] for ``last_tokens``, and the hidden states
        read by the drafter.

        rows [N]: slot of each row.
        rotary: see ``ForwardContext.rotary_positions``.
        """
        features = self.drafter.features
        context = ForwardContext(self._groups(inputs), rotary, last_tokens, self._recurrent_pass(inputs))
        last = None if last_tokens is None else last_tokens.last
        tokens = TargetTokens(rows, token_ids.shape[0], inputs.width, inputs.query_start, last)
        with ExitStack() as around:
            for feature in self.features:
                if (held := feature.around_target(b, tokens)) is not None:
                    around.enter_context(held)
            state = self.store.view("target").tree
            hidden, aux = self.model(token_ids, context, state, features.aux_layers, replaced)
        if context.recurrent is not None:
            context.recurrent.advance(self.store.snapshot_positions)
        return hidden, {Hidden.NULL: None, Hidden.AUX: aux}.get(features.hidden, hidden)

    def _groups(self, inputs: AttentionInputs) -> dict[int, AttentionInputs]:
        """Attention inputs by window group; ``inputs`` are those of ALL."""
        groups, first = {ALL: inputs}, inputs.slot_mapping
        for window_group in self.store.window_groups[1:]:
            table = self.store.page_tables[window_group]
            mapping = group_slot_mapping(table, inputs.slots, inputs.positions, first, inputs.query_start, PAGE_SIZE)
            groups[window_group] = replace(inputs, page_table=table, slot_mapping=mapping)
        return groups

    def _recurrent_pass(self, inputs: AttentionInputs) -> RecurrentPass | None:
        """Start and end of the rows' recurrences; None if the model has none."""
        if not self.store.recurrent:
            return None
        i = inputs
        singles = i.slots.shape[0] if i.widest else i.singles
        return RecurrentPass.of(i.slots, i.positions, i.kv_len, i.query_start, self.store.snapshot_positions, singles)

    def sample(
        self,
        b: Buffers,
        hidden: torch.Tensor,
        last: torch.Tensor,
        rows: torch.Tensor,
        drafts: torch.Tensor,
        outputs: Outputs,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample the target's tokens [N, W] after drafts [N, k], and let features write their outputs.

        hidden: final hidden states of all computed tokens.
        last [N · W, H]: hidden states of the sampled positions.
        rows [N]: slots.
        places [N · W]: the row of ``last`` of each sampled position, if rows have different widths; then ``last`` is
            [T, H]. Below 0: nothing is sampled.
        """
        width, logits = 1 + drafts.shape[1], self.model.logit_columns(last)
        if b.features.whole_logits:
            logits = whole(logits)
        masks = (feature.allowed_tokens(b, rows.shape[0]) for feature in self.features)
        mask = next((mask for mask in masks if mask is not None), None)
        sampled = edit_and_sample(logits, rows, width, drafts, self.slots, mask=mask, places=places)
        computed = Computed(b, hidden, logits, rows, width, sampled, outputs, places)
        for feature in self.features:
            feature.report(computed)
        return sampled.tokens.view(-1, width)

    def commit(self, sampled: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Commit the accepted drafts and one more token; see :func:`unisono.kernels.speculation.rounds.commit`."""
        s = self.slots
        return commit(sampled, drafts, rows, s.length, s.max_length, s.status, s.last_token, s.stop_ids, s.history)
