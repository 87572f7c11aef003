"""Frozen-KV multi-token prediction: drafts from the target's own keys and values. Chains; loaded by the catalog.

Nothing is cached, so there is nothing to catch up with and prefix hits cost nothing. One hidden state is kept per
round: the target's at the position before the last committed token. Every step reads the target's KV up to there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.drafters.base import DrafterContext, PromptPass, SelfTest, Verified
from unisono.drafters.hidden import OTHER_TARGET
from unisono.drafters.mtp.frozen_kv_model import FrozenCheckpoint
from unisono.drafters.options import DRAFT_QUANTIZATION, read_options, required_model
from unisono.drafters.quantization import DraftWeights
from unisono.graphs import Features, Hidden
from unisono.kernels.speculation.catch_up import catch_up, keep_rows
from unisono.kernels.speculation.draft_inputs import draft_inputs
from unisono.kv.specs import PerSlot, Tree
from unisono.models.blocks.layer_tails import prove_products
from unisono.models.config import DecoderConfig
from unisono.models.load.update import WeightUpdate
from unisono.types import SpeculativeConfig


class FrozenMTPDrafter:
    """A chain of k drafts from the model in ``spec.model``, coupled with the target's noise.

    Option ``draft_quantization``: see ``drafters/quantization.py``; the LM head is the model's own and in fp8, too.
    Raises ConfigError for other options or a missing model, CheckpointError for a model that does not fit.
    """

    name = "mtp_frozen"
    features = Features(Hidden.LAST)
    self_test = SelfTest(OTHER_TARGET)

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        self._quantization = read_options(spec, DRAFT_QUANTIZATION, takes_model=True)["draft_quantization"]
        self.num_drafts = spec.num_speculative_tokens
        self._checkpoint = FrozenCheckpoint.open(required_model(spec, "a drafter made for this target"), target)

    def bind(self, context: DrafterContext) -> None:
        self._context = context
        opened = self._checkpoint
        formats = DraftWeights.choose(self._quantization, context.target, own_head=opened.head_bytes)
        self._head = opened.load(context.target, context.attention, context.dtype, context.progress, formats.format)
        context.decide("draft weights", *formats.decision())
        context.decide("layers whose KV the drafter reads", list(opened.reads), opened.why)
        prove_products(self._head.modules())

    def weight_updates(self, directory: Path) -> list[WeightUpdate]:
        """See :class:`unisono.drafters.base.UpdatableDrafter`."""
        return [FrozenCheckpoint.open(directory, self._context.target.config).update(self._head)]

    def state_specs(self) -> Tree:
        """hidden: the target's at the position before the last committed token. Keys and values are the target's."""
        return {"hidden": PerSlot((self._context.target.config.hidden_size,), self._context.dtype)}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        context, s, head = self._context, self._context.slots, self._head
        token_ids, positions, slot_mapping, kv_len = draft_inputs(
            slots, drafts, s.history, s.length, s.max_length, s.status, s.page_table, context.page_size,
            context.target.config.vocab_size, -1, 1,
        )  # fmt: skip
        # The target has no key of the last committed token yet, so attention ends before it.
        seen, known = (positions - 1).clamp_min(-1), (kv_len - 1).clamp_min(0)
        tables = context.page_tables.items()
        groups = {g: AttentionInputs(slots, seen, slot_mapping, known, table, width=1) for g, table in tables}
        rotary = context.rotary(slots, positions)
        pass_context = ForwardContext(groups, rotary_positions=positions if rotary is None else rotary)
        hidden, kv = context.state["hidden"].index_select(0, slots), context.target_state.tree
        for step in range(drafts.shape[1]):
            hidden, logits = head(token_ids, hidden, pass_context, kv)
            token_ids = context.sample(logits, slots, step, None)
            drafts[:, step].copy_(token_ids)

    def observe(self, verified: Verified) -> None:
        assert verified.hidden is not None
        s, page_size = self._context.slots, self._context.page_size
        new = catch_up(verified.slots, verified.result, verified.sampled, s.length, s.page_table, page_size)
        keep_rows(self._context.state["hidden"], new.owners, verified.hidden.index_select(0, new.last))

    def observe_prompt(self, prompt: PromptPass) -> None:
        assert prompt.hidden is not None
        owners = prompt.slots.masked_fill(prompt.query_start.diff() == 0, -1)
        keep_rows(self._context.state["hidden"], owners, prompt.hidden)
