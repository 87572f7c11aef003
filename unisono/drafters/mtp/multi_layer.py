"""Multi-token prediction with one module per step, as MiMo, GLM and Step are trained.

Owns each module's KV cache and the hidden state that each carries from one round to the next. Module i continues from
module i - 1 (``drafters/mtp/model.py``), module 0 from the target. With n committed tokens, and [a … b] denoting
entries (``kernels/speculation/catch_up.py``)::

                module 0            module 1            module 2            kept of each
    observe     [… n-1] → draft 0   [… n-1]             [… n-1]             its state at n - 1
    step 1                          [n] → draft 1
    step 2                                              [n, n+1] → draft 2

Step i runs the i entries of module i that contain drafts: their tokens are drafts, and so are all hidden states they
join but the first, which is module i - 1's at n - 1. Therefore every module's own state is kept; with one state for
all, modules from draft 2 on would continue from the wrong position. ``observe`` then rewrites these entries from the
tokens committed by the target. Steps beyond the last module reuse it, one entry each.

Module i has no entry at positions 0 … i. Shapes: R rows, W = 1 + k, E rows of a prompt pass, H hidden, S slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.attention.base import AttentionBackend, AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.distributed.gather import Ranks
from unisono.drafters.base import DrafterContext, PromptPass, SelfTest, Verified
from unisono.drafters.hidden import OTHER_TARGET, FromFirstEntry, seen_size
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.drafters.mtp.model import MTPModule
from unisono.drafters.quantization import DraftWeights
from unisono.drafters.unobserved import NAME, CatchesUp, Unobserved
from unisono.graphs import Features, Hidden
from unisono.kernels.speculation.catch_up import CatchUp, CatchUpExtend, catch_up, catch_up_extend, keep_rows
from unisono.kernels.speculation.draft_inputs import draft_inputs
from unisono.kv.specs import Paged, PerSlot, Tree, whole_requests
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.blocks.layer_tails import prove_products
from unisono.models.load.update import WeightUpdate
from unisono.types import SpeculativeConfig


@dataclass
class _Stage:
    """A module and its state.

    hidden [S, H]: its hidden state at the last committed position.
    kv: its keys and values.
    page_hidden [NP, H]: for every page, the hidden state *before* the module that the position after the page joins.
    """

    module: MTPModule
    context: DrafterContext
    number: int

    def state_specs(self) -> Tree:
        size, dtype = self.module.config.hidden_size, self.context.dtype
        kv = whole_requests(self.module.state_specs())
        return {"kv": kv, "page_hidden": Paged((size,), dtype, by_token=False), "hidden": PerSlot((size,), dtype)}

    @property
    def hidden(self) -> torch.Tensor:
        hidden: torch.Tensor = self.context.state["stages"][self.number]["hidden"]
        return hidden

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        kv: Sequence[torch.Tensor] = self.context.state["stages"][self.number]["kv"]
        return kv

    @property
    def page_hidden(self) -> torch.Tensor:
        page_hidden: torch.Tensor = self.context.state["stages"][self.number]["page_hidden"]
        return page_hidden

    def run(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        overriding: Sequence[Overriding] = (),
    ) -> torch.Tensor:
        """Entries [T] -> their states [T, H], or [E, H] with ``context.last_tokens``."""
        states: torch.Tensor = self.module.norm(self.module(token_ids, hidden, context, self.kv, overriding))
        return states


class MultiMTPDrafter(CatchesUp):
    """A chain of k drafts from the first k modules of a checkpoint, coupled with the target's noise."""

    name = "mtp"
    features = Features(Hidden.FULL)
    self_test = SelfTest(OTHER_TARGET)
    unlimited = False
    draft_quantization = "none"

    def __init__(self, spec: SpeculativeConfig, checkpoint: MTPCheckpoint) -> None:
        self.num_drafts = spec.num_speculative_tokens
        self._checkpoint = checkpoint
        self._depth = min(checkpoint.depth, self.num_drafts)  # modules beyond k never draft

    def divides(self, ranks: Ranks) -> bool:
        return False

    def bind(self, context: DrafterContext) -> None:
        self._context, made = context, functools.cache(context.attention)
        self._stages = []
        self._weights = formats = DraftWeights.choose(self.draft_quantization, context.target)
        for i in range(self._depth):

            def attention(heads: int, kv_heads: int, since: int = i + 1) -> AttentionBackend:
                return FromFirstEntry(made(heads, kv_heads), since)

            module = self._checkpoint.load(
                context.target, i, attention, context.dtype, format=formats.of, ranks=context.ranks
            )
            context.progress((i + 1) / self._depth)
            self._stages.append(_Stage(module, context, i))
        for choice in self._checkpoint.choices([stage.module for stage in self._stages], context.target):
            context.decide(*choice)
        for stage in self._stages:
            stage.module.lm_head = formats.head(stage.module.lm_head)
        context.decide("draft weights", *formats.decision())
        prove_products(m for stage in self._stages for m in stage.module.modules())
        self._unobserved = Unobserved(context, seen_size(self.features, context))

    def weight_updates(self, directory: Path) -> list[WeightUpdate]:
        """See :class:`unisono.drafters.base.UpdatableDrafter`."""
        target, opened = self._context.target, MTPCheckpoint.open(directory, self._context.target.config)
        found = []
        for step, stage in enumerate(self._stages):
            shares = self._weights.shares(stage.module.lm_head)
            found.append(opened.update(stage.module, step, target, shares))
        return [*found, *self._weights.update()]

    def state_specs(self) -> Tree:
        return {
            "stages": [stage.state_specs() for stage in self._stages],
            "draft": PerSlot((1,), torch.int32),
            NAME: self._unobserved.state_specs(),
        }

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        context, s, vocab = self._context, self._context.slots, self._checkpoint.config.vocab_size
        drafts[:, :1].copy_(self._context.state["draft"].index_select(0, slots))
        hidden = self._stages[0].hidden.index_select(0, slots)[
            :, None
        ]  # hidden states joined by the next step's entries
        for step in range(1, drafts.shape[1]):
            stage, width = self._stages[min(step, self._depth - 1)], hidden.shape[1]
            token_ids, positions, slot_mapping, kv_len = draft_inputs(
                slots, drafts, s.history, s.length, s.max_length, s.status, s.page_table, context.page_size, vocab,
                step - width, width,
            )  # fmt: skip
            inputs = AttentionInputs(slots, positions, slot_mapping, kv_len, s.page_table, width)
            pass_context = ForwardContext.of(inputs, None, context.rotary(slots, positions))
            states = stage.run(token_ids, hidden.flatten(0, 1), pass_context).view_as(hidden)
            last = states[:, -1].contiguous()
            drafts[:, step].copy_(context.sample(stage.module.lm_head.columns(last), slots, step, None))
            hidden = last[:, None]
            if step + 1 < self._depth:
                hidden = torch.cat((stage.hidden.index_select(0, slots)[:, None], states), dim=1)

    def _catch_up(self, verified: Verified) -> None:
        assert verified.hidden is not None
        s, slots, (rows, width) = self._context.slots, verified.slots, verified.sampled.shape
        new = catch_up(slots, verified.result, verified.sampled, s.length, s.page_table, self._context.page_size)
        inputs = AttentionInputs(slots, new.positions, new.slot_mapping, new.kv_len, s.page_table, width)
        last_tokens, hidden = inputs.last_tokens(new.last), verified.hidden
        context = ForwardContext.of(inputs, last_tokens, self._context.rotary(slots, new.positions))
        for stage in self._stages[:-1]:
            keep_rows(stage.page_hidden, new.pages, hidden)
            states = stage.run(new.token_ids, hidden, context.all_tokens)
            before = stage.hidden.index_select(0, slots)[:, None]
            hidden = torch.cat((before, states.view(rows, width, -1)[:, :-1]), dim=1).flatten(0, 1)
            keep_rows(stage.hidden, new.owners, last_tokens.select(states))
        self._finish(new, hidden, context)
        self._keep_draft(slots, new.owners)

    def observe_prompt(self, prompt: PromptPass) -> None:
        assert prompt.hidden is not None
        s = self._context.slots
        new = catch_up_extend(
            prompt.slots, prompt.query_start, prompt.start, prompt.token_ids, prompt.next_ids, prompt.positions,
            s.page_table, self._context.page_size,
        )  # fmt: skip
        before = _states_before(new, prompt.query_start)
        hidden = torch.cat((self._stages[0].page_hidden.index_select(0, new.sources), prompt.hidden))
        inputs = AttentionInputs(
            new.slots, new.positions, new.slot_mapping, new.kv_len, s.page_table, None, new.query_start
        )
        overriding, rotary = prompt.of_entries()
        last_tokens = inputs.last_tokens(new.last)
        context = ForwardContext.of(inputs, last_tokens, rotary)
        for stage, following in itertools.pairwise(self._stages):
            keep_rows(stage.page_hidden, new.pages, hidden[len(new.sources) :])
            states = stage.run(new.token_ids, hidden, context.all_tokens, overriding)
            carried = stage.hidden.index_select(0, prompt.slots)
            cached = following.page_hidden.index_select(0, new.sources)
            hidden = torch.cat((states, carried, cached)).index_select(0, before)
            keep_rows(stage.hidden, new.owners, last_tokens.select(states))
        self._finish(new, hidden, context, overriding)
        self._keep_draft(prompt.slots, new.owners)
        self._unobserved.mark_observed(prompt.slots)

    def _finish(
        self,
        new: CatchUp | CatchUpExtend,
        hidden: torch.Tensor,
        context: ForwardContext,
        overriding: Sequence[Overriding] = (),
    ) -> None:
        """Run the last module's entries and keep each row's last state. hidden [N, H]: the states they join."""
        stage = self._stages[-1]
        keep_rows(stage.page_hidden, new.pages, hidden[-len(new.pages) :])
        keep_rows(stage.hidden, new.owners, stage.run(new.token_ids, hidden, context, overriding))

    def _keep_draft(self, slots: torch.Tensor, owners: torch.Tensor) -> None:
        """Store draft 0 of the next round, from module 0's states just kept."""
        stage = self._stages[0]
        logits = stage.module.lm_head.columns(stage.hidden.index_select(0, slots))
        keep_rows(self._context.state["draft"], owners, self._context.sample(logits, slots, 0, None)[:, None])


def _states_before(new: CatchUpExtend, query_start: torch.Tensor) -> torch.Tensor:
    """Index of the state before each entry of a prompt pass in [states [N], carried [E], cached [E]]: [N] int32.

    After another entry of the row it is that entry's state. A row's leading entry continues from its cached page; the
    first of its tokens from the leading entry or, without one, from the state left by the row's last chunk.
    """
    entries, rows = new.positions.shape[0], new.sources.shape[0]
    each = torch.arange(entries, dtype=torch.int32, device=query_start.device)
    behind = torch.cat((each - 1, each[:1]))  # the spare element at the end is for rows without tokens
    behind[:rows] = each[:rows] + entries + rows
    leads = new.positions[:rows] >= 0
    begins = (query_start[:-1] + rows).long()
    return behind.index_copy(0, begins, torch.where(leads, each[:rows], each[:rows] + entries))[:entries]
