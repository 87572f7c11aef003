"""DFlash, DFlash2 and DSpark: a block of masks filled by a few layers over the target's hidden states.

With n committed tokens, position p having the target's states of the token at p::

    kept from before      context of positions 0 … n - 2, in every layer's keys and values
    propose               block [token n - 1, mask, mask, …] at positions n - 1 …  →  all drafts
    observe               context of the tokens n - 1 … whose states the round computed

DFlash samples all drafts at once. DFlash2 and DSpark pick them one after another, each by the one before it. All draw
with the request's own noise. Loaded by the catalog.

The context is written by the pass that computes a token's states: prompt passes, rounds of any width and catch-ups
leave the same bits, and a cached page has all of it. The block's own keys and values are provisional.
"""

from __future__ import annotations

import logging

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.distributed.columns import whole
from unisono.distributed.gather import Ranks
from unisono.drafters.base import DrafterContext, PromptPass, SelfTest, Verified
from unisono.drafters.block.checkpoint import BlockCheckpoint, open_block
from unisono.drafters.block.model import BlockHead
from unisono.drafters.block.variants import MarkovHead, SelectingHead
from unisono.drafters.eagle.checkpoint import CONVENTIONS
from unisono.drafters.hidden import OTHER_TARGET, RANDOM
from unisono.drafters.options import DRAFT_QUANTIZATION, LOAD_FORMAT, read_options, required_model
from unisono.graphs import Features, Hidden
from unisono.kernels.speculation.catch_up import catch_up
from unisono.kernels.speculation.rounds import extend_inputs, round_inputs
from unisono.kernels.speculation.shared_rows import SharedInputs
from unisono.kv.specs import Tree, whole_requests
from unisono.models.blocks.layer_tails import prove_products
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, SpeculativeConfig

logger = logging.getLogger(__name__)


class DFlashDrafter:
    """DFlash (Chen et al., arXiv 2602.06036), coupled with the target's noise.

    ``spec.model`` is the head's directory. Options: ``load_format="dummy"`` uses random weights (needs config.json
    only); ``aux_layers``, ``input`` or ``output``, sets the meaning of the layer ids; ``first_draft``, ``anchor`` or
    ``mask``, sets the row that predicts the first draft; ``draft_quantization``: see ``drafters/quantization.py``.
    Raises ConfigError for other options and for k beyond the head's block, CheckpointError for a head that does not fit
    the target.
    """

    name = "dflash"
    drafts_at_once = True
    module: BlockHead

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        known = {**LOAD_FORMAT, "aux_layers": CONVENTIONS, "first_draft": FIRST_DRAFTS, **DRAFT_QUANTIZATION}
        options = read_options(spec, known, takes_model=True)
        dummy, model = options["load_format"] == "dummy", required_model(spec, "a head made for this target")
        opened = open_block(
            model, target, self.name, dummy=dummy, convention=options["aux_layers"], first_draft=options["first_draft"]
        )
        self.num_drafts, most = spec.num_speculative_tokens, opened.settings.max_drafts
        if self.num_drafts > most:
            raise ConfigError(
                f"num_speculative_tokens={self.num_drafts}: the head {opened.path} fills blocks of "
                f"{opened.settings.block_size}: give at most {most}."
            )
        self._checkpoint: BlockCheckpoint = opened
        self._quantization = options["draft_quantization"]
        self.features = Features(Hidden.AUX, opened.config.aux_layers)
        self.drafts_ragged, self.placeholder = opened.ragged, opened.settings.mask_token
        causes = (
            f"{OTHER_TARGET}; or its layer ids number something else: it reads the inputs of layers "
            f'{list(opened.config.aux_layers)} ({opened.why}); set "aux_layers" to "input" or "output" in the '
            f'speculative config; or its first draft is read at another row ({opened.why_first}); set "first_draft" to '
            '"anchor" or "mask"'
        )
        self.self_test = SelfTest(causes, RANDOM if dummy else None)

    def divides(self, ranks: Ranks) -> bool:
        """Return True if its heads can be divided: its layers are read once a round, as a target's."""
        try:
            self._checkpoint.config.layer.check_divides(ranks)
        except ConfigError:
            return False
        return True

    def bind(self, context: DrafterContext) -> None:
        self._context, opened = context, self._checkpoint
        weights = opened.choose_weights(self._quantization, context.target, context.ranks)
        self.module = opened.build(
            context.target, context.attention, context.max_model_len, context.dtype, context.device, context.progress,
            weights.of, context.ranks,
        )  # type: ignore[assignment]  # fmt: skip
        for choice in opened.choices(self.module, context.target):
            context.decide(*choice)
        del self._checkpoint
        self.module.join_context()
        self.module.lm_head = weights.head(self.module.lm_head)
        context.decide("draft weights", *weights.decision())
        if context.target.config.vision is not None:
            reason = "it reads the target's states of them, at absolute positions"
            context.decide("drafter sees", "pictures", reason)
        prove_products(self.module.modules())
        most = context.slots.length.shape[0] * self.num_drafts
        self._masks = context.slots.length.new_full((most,), self.placeholder)
        longest = self.module.config.max_positions
        if context.max_model_len > longest:
            logger.warning(
                "The %s head was made for %d positions, the engine serves %d: beyond, drafts will seldom be accepted.",
                self.name, longest, context.max_model_len,
            )  # fmt: skip

    def state_specs(self) -> Tree:
        """kv: keys and values of every layer; pages last as long as their request."""
        return {"kv": whole_requests(self.module.state_specs())}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """One pass over the rows' blocks, then :meth:`_draw`."""
        context, s, settings = self._context, self._context.slots, self.module.settings
        rows, k = drafts.shape
        masked = k - settings.from_anchor
        masks = self._masks[: rows * masked].view(rows, masked)
        token_ids, positions, slot_mapping, kv_len = round_inputs(
            slots, masks, s.length, s.max_length, s.status, s.last_token, s.page_table, context.page_size
        )
        width = 1 + masked
        inputs = AttentionInputs(slots, positions, slot_mapping, kv_len, s.page_table, width)
        hidden = self.module(token_ids, ForwardContext.of(inputs), context.state["kv"])
        self._draw(slots, drafts, hidden.view(rows, width, -1)[:, width - k :].reshape(rows * k, -1))

    def propose_ragged(self, slots: torch.Tensor, drafts: torch.Tensor, packed: SharedInputs) -> None:
        """One pass over blocks of the rows' own widths."""
        s, (rows, k) = self._context.slots, drafts.shape
        placed = slots, packed.positions, packed.slot_mapping, packed.kv_len, s.page_table
        inputs = AttentionInputs(*placed, None, packed.query_start, widest=1 + k)
        hidden = self.module(packed.token_ids, ForwardContext.of(inputs), self._context.state["kv"])
        places = packed.sampled.view(rows, 1 + k)[:, 1:].flatten()
        found = self._context.sample_block(self.module.logits(hidden), slots, k, self.module.ids, places)
        drafts.copy_(torch.where(drafts >= 0, found, -1))

    def observe_ragged(self, hidden: torch.Tensor, packed: SharedInputs) -> None:
        """Write the context of all verified tokens. That of rejected drafts lies where the next block begins or after
        it, and is replaced before it is read.
        """
        self.module.write_context(hidden, packed.positions, packed.slot_mapping, self._context.state["kv"])

    def _draw(self, slots: torch.Tensor, drafts: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write drafts [R, k] from the outputs [R · k, H] of the rows that predict them."""
        logits = self.module.logits(hidden)
        if isinstance(self.module, SelectingHead):
            self._select(self.module, slots, drafts, hidden, whole(logits))
        else:
            drafts.copy_(self._context.sample_block(logits, slots, drafts.shape[1], self.module.ids))

    def _select(
        self, head: SelectingHead, slots: torch.Tensor, drafts: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Pick drafts left to right among each position's best tokens, by their logits and the pairs' scores."""
        rows, k = drafts.shape
        unary, candidates = logits.float().topk(head.settings.selector_candidates)
        unary, candidates = unary.view(rows, k, -1), candidates.view(rows, k, -1)
        projected = head.candidate_selector.project(hidden).view(rows, k, -1)
        before = self._context.slots.last_token.index_select(0, slots)
        for step in range(k):
            scores = head.candidate_selector(unary[:, step], candidates[:, step], projected[:, step], before)
            row = logits.new_full((rows, logits.shape[1]), -torch.inf)
            row.scatter_(1, candidates[:, step], scores.to(row.dtype))
            drafts[:, step].copy_(self._context.sample(row, slots, step, None))
            before = drafts[:, step].clamp_min(0)

    def observe(self, verified: Verified) -> None:
        """Write the context of the committed tokens whose states the round computed: all but the last."""
        assert verified.hidden is not None
        s = self._context.slots
        new = catch_up(
            verified.slots, verified.result, verified.sampled, s.length - 1, s.page_table, self._context.page_size
        )
        self.module.write_context(verified.hidden, new.positions, new.slot_mapping, self._context.state["kv"])

    def observe_prompt(self, prompt: PromptPass) -> None:
        assert prompt.hidden is not None
        positions, slot_mapping, _ = extend_inputs(
            prompt.slots, prompt.query_start, prompt.start, self._context.slots.page_table, self._context.page_size,
            prompt.positions.shape[0],
        )  # fmt: skip
        self.module.write_context(prompt.hidden, positions, slot_mapping, self._context.state["kv"])


class DSparkDrafter(DFlashDrafter):
    """DSpark: DFlash's backbone, and a Markov head that adds a bias by the draft before. Options: as DFlash.

    The confidence head of a checkpoint rates drafts where requests share them.
    """

    name = "dspark"
    _rates: torch.Tensor | None = None  # [R, k]: where confidences are written while drafts are rated

    @property
    def confident(self) -> bool:
        """True if the checkpoint has a confidence head."""
        return self.module.settings.confidence is not None

    def propose_rated(self, slots: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        self._rates = rates = torch.ones(drafts.shape, device=drafts.device)
        try:
            self.propose(slots, drafts)
        finally:
            self._rates = None
        return rates

    def _draw(self, slots: torch.Tensor, drafts: torch.Tensor, hidden: torch.Tensor) -> None:
        rows, k = drafts.shape
        head = self.module
        assert isinstance(head, MarkovHead)
        logits, rows_of = whole(head.logits(hidden)).view(rows, k, -1), hidden.view(rows, k, -1)
        before = self._context.slots.last_token.index_select(0, slots)
        for step in range(k):
            if self._rates is not None and (rates := head.confidence(rows_of[:, step], before)) is not None:
                self._rates[:, step].copy_(rates)
            biased = head.markov_head(before, logits[:, step])
            drafts[:, step].copy_(self._context.sample(biased, slots, step, head.ids))
            before = drafts[:, step].clamp_min(0)


FIRST_DRAFTS = ("auto", "anchor", "mask")
"""Values of ``first_draft``: the row of a block that predicts the first draft; auto: by the checkpoint."""
