"""Base of drafters that read the target's hidden states and reuse one module for k steps.

The hidden states come from the target's pass: ``Features`` names the layers, ``Decoder.forward`` collects their inputs,
and they arrive in ``Verified.hidden`` and ``PromptPass.hidden``.

Owns the module's KV cache, the state carried from one round to the next, and the order of its passes. A subclass says
which hidden states it needs and builds its module; it does not touch slots or pages.

With n committed tokens, and entry p joining the token at p with the hidden state of p - 1
(``kernels/speculation/catch_up.py``)::

    kept from before      draft 0, and the hidden state that led to it
    propose, step j ≥ 1   entry n + j - 1: draft j - 1 with the module's own last hidden state  →  draft j
    observe               entries n …: the committed tokens with the target's hidden states     →  next round's start

Entries of drafts are provisional: ``observe`` writes every entry that outlives the round from the target's hidden
states, and no entry depends on k, on the batch or on which drafts were tried. If a tree has several candidates for
draft 0, all are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from unisono.attention.base import KV, AttentionBackend, AttentionInputs, AttentionOptions
from unisono.attention.context import ForwardContext
from unisono.distributed.columns import Columns
from unisono.distributed.gather import Ranks
from unisono.drafters.base import DrafterContext, PromptPass, SelfTest, Verified
from unisono.drafters.quantization import DraftWeights
from unisono.drafters.unobserved import NAME, CatchesUp, Unobserved
from unisono.graphs import Features
from unisono.kernels.speculation.catch_up import catch_up, catch_up_extend, keep_rows
from unisono.kernels.speculation.draft_inputs import draft_inputs
from unisono.kv.specs import Paged, PerSlot, Tree, whole_requests
from unisono.layers.linear import Linear
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.blocks.layer_tails import prove_products
from unisono.models.config import DecoderConfig
from unisono.models.load.update import WeightUpdate
from unisono.types import SpeculativeConfig

logger = logging.getLogger(__name__)

OTHER_TARGET = "the head was trained for another target, or for other weights of this one (a fine-tune)"
RANDOM = "the drafter's weights are random (load_format dummy)"

FIRST_ENTRY = 1
"""First position with an entry. Position 0 has no hidden state before it, hence no entry and no visible key."""


def seen_size(features: Features, context: DrafterContext) -> int:
    """Elements of the hidden states per token that the target passes to a drafter with these features."""
    return context.target.config.hidden_size * max(1, len(features.aux_layers))


def seen_by(module: DraftModule, context: DrafterContext) -> tuple[str, str]:
    """Input of a module at image positions, and the reason."""
    if module.sees_embeddings:
        return "pictures", "it reads the target's embeddings, without deepstack, at the target's rotary positions"
    return "token ids", f"its embeddings are not {context.target.config.hidden_size} wide, as the target's are"


class DraftModule(Protocol):
    """One module with one KV layer; see ``drafters/eagle/model.py`` for the three calls."""

    config: DecoderConfig
    lm_head: Linear
    ids: torch.Tensor | None

    @property
    def sees_embeddings(self) -> bool: ...

    def encode(self, seen: torch.Tensor) -> torch.Tensor: ...

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        state: Sequence[torch.Tensor],
        overriding: Sequence[Overriding] = (),
    ) -> torch.Tensor: ...

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | Columns]: ...

    def state_specs(self) -> Tree: ...

    def modules(self) -> Any: ...


@dataclass(frozen=True)
class FromFirstEntry:
    """An attention backend that ignores keys below ``since``, where its drafter has no entries."""

    backend: AttentionBackend
    since: int = FIRST_ENTRY
    name = "from the first entry"

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        self.backend.plan(inputs, window)

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        return self.backend.forward(q, kv, inputs, replace(options, first=max(options.first, self.since)))


class HiddenDrafter(CatchesUp):
    """Base class. Subclasses define ``name``, ``features`` and :meth:`build`.

    draft_quantization: see ``drafters/quantization.py``; the format of layers is ``self.weights.of``.
    """

    name: str
    features: Features
    drafts_trees = True
    self_test: SelfTest | None = SelfTest(OTHER_TARGET)
    unlimited = False
    draft_quantization = "none"
    weights: DraftWeights

    def __init__(self, spec: SpeculativeConfig) -> None:
        self.num_drafts = spec.num_speculative_tokens
        self._firsts = [path[0] for path in spec.paths]

    def build(self, context: DrafterContext) -> DraftModule:
        """Build and load the module on the context's device; its attention is ``self.attention(context)``."""
        raise NotImplementedError

    def choose_weights(self, context: DrafterContext) -> DraftWeights:
        """Choose the weight format of the module; its LM head is the target's."""
        return DraftWeights.choose(self.draft_quantization, context.target)

    def divides(self, ranks: Ranks) -> bool:
        return False

    def module_updates(self, directory: Path) -> list[WeightUpdate]:
        """Updates of the module from another directory. Raises CheckpointError unless it fits."""
        raise NotImplementedError

    def weight_updates(self, directory: Path) -> list[WeightUpdate]:
        """See :class:`unisono.drafters.base.UpdatableDrafter`."""
        return [*self.module_updates(directory), *self.weights.update()]

    @staticmethod
    def attention(context: DrafterContext) -> Callable[[int, int], AttentionBackend]:
        """Factory of the module's attention backends."""
        return lambda heads, kv_heads: FromFirstEntry(context.attention(heads, kv_heads))

    def bind(self, context: DrafterContext) -> None:
        self._context = context
        self.weights = self.choose_weights(context)
        self.module = self.build(context)
        self.module.lm_head = self.weights.head(self.module.lm_head)
        context.decide("draft weights", *self.weights.decision())
        if context.target.config.vision is not None:
            context.decide("drafter sees", *seen_by(self.module, context))
        prove_products(self.module.modules())
        c = self.module.config
        if context.max_model_len > c.max_positions:
            logger.warning(
                "The %s head was made for %d positions, the engine serves %d: beyond, drafts will seldom be accepted.",
                self.name, c.max_positions, context.max_model_len,
            )  # fmt: skip
        self._unobserved = Unobserved(context, seen_size(self.features, context))
        self._first = torch.tensor(self._firsts or [0], device=context.device)  # column of ``draft`` for each path

    def state_specs(self) -> Tree:
        """kv: the module's. page_hidden: for every page the hidden state of its last position, where a prefix hit
        continues. hidden, draft: start of the next round; for a tree, draft has the candidates for draft 0."""
        c, dtype = self.module.config, self._context.dtype
        return {
            "kv": whole_requests(self.module.state_specs()),
            "page_hidden": Paged((c.hidden_size,), dtype, by_token=False),
            "hidden": PerSlot((c.hidden_size,), dtype),
            "draft": PerSlot((1 + max(self._firsts, default=0),), torch.int32),
            NAME: self._unobserved.state_specs(),
        }

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        context, s, vocab = self._context, self._context.slots, self.module.config.vocab_size
        hidden = self._context.state["hidden"].index_select(0, slots)
        drafts[:, :1].copy_(self._first_drafts(slots, of_paths=tables is not None))
        rows = slots if tables is None else tables
        for step in range(1, drafts.shape[1]):
            token_ids, positions, slot_mapping, kv_len = draft_inputs(
                slots, drafts, s.history, s.length, s.max_length, s.status, s.page_table, context.page_size, vocab,
                step - 1, 1, tables,
            )  # fmt: skip
            inputs = AttentionInputs(rows, positions, slot_mapping, kv_len, s.page_table, width=1)
            pass_context = ForwardContext.of(inputs, None, context.rotary(slots, positions))
            out = self.module(token_ids, hidden, pass_context, context.state["kv"])
            hidden, logits = self.module.finish(out)
            drafts[:, step].copy_(context.sample(logits, slots, step, self.module.ids))

    def _catch_up(self, verified: Verified) -> None:
        """Write the entries of committed tokens; only each row's last entry runs through the whole module."""
        assert verified.hidden is not None
        s, slots, width = self._context.slots, verified.slots, verified.sampled.shape[1]
        new = catch_up(slots, verified.result, verified.sampled, s.length, s.page_table, self._context.page_size)
        hidden = self.module.encode(verified.hidden)
        keep_rows(self._context.state["page_hidden"], new.pages, hidden)
        inputs = AttentionInputs(slots, new.positions, new.slot_mapping, new.kv_len, s.page_table, width)
        rotary = self._context.rotary(slots, new.positions)
        pass_context = ForwardContext.of(inputs, inputs.last_tokens(new.last), rotary)
        out = self.module(new.token_ids, hidden, pass_context, self._context.state["kv"])
        self._keep(out, slots, new.owners)

    def observe_prompt(self, prompt: PromptPass) -> None:
        assert prompt.hidden is not None
        s = self._context.slots
        new = catch_up_extend(
            prompt.slots, prompt.query_start, prompt.start, prompt.token_ids, prompt.next_ids, prompt.positions,
            s.page_table, self._context.page_size,
        )  # fmt: skip
        hidden = self.module.encode(prompt.hidden)
        before = self._context.state["page_hidden"].index_select(0, new.sources)
        keep_rows(self._context.state["page_hidden"], new.pages, hidden)
        inputs = AttentionInputs(
            new.slots,
            new.positions,
            new.slot_mapping,
            new.kv_len,
            s.page_table,
            width=None,
            query_start=new.query_start,
        )
        overriding, rotary = prompt.of_entries()
        pass_context = ForwardContext.of(inputs, inputs.last_tokens(new.last), rotary)
        out = self.module(
            new.token_ids, torch.cat((before, hidden)), pass_context, self._context.state["kv"], overriding
        )
        self._keep(out, prompt.slots, new.owners)
        self._unobserved.mark_observed(prompt.slots)

    def _keep(self, out: torch.Tensor, slots: torch.Tensor, owners: torch.Tensor) -> None:
        """Store the start of the next round from the module's last outputs [R, H] of the requests in slots [R]."""
        hidden, logits = self.module.finish(out)
        keep_rows(self._context.state["hidden"], owners, hidden)
        count, ids = self._context.state["draft"].shape[1], self.module.ids
        if count > 1:
            best = self._context.best(logits, slots, count, ids)
        else:
            best = self._context.sample(logits, slots, 0, ids)[:, None]
        keep_rows(self._context.state["draft"], owners, best)

    def _first_drafts(self, slots: torch.Tensor, of_paths: bool) -> torch.Tensor:
        """Draft 0 of each row [R, 1]: the best stored candidate, or the candidate of the row's path."""
        kept: torch.Tensor = self._context.state["draft"].index_select(0, slots)
        if not of_paths:
            return kept[:, :1]
        paths = self._first.shape[0]
        return kept.gather(1, self._first.expand(slots.shape[0] // paths, -1).reshape(-1, 1))
