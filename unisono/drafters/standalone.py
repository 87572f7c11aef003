"""A small language model as the drafter: it reads the committed tokens and continues them, k tokens per round.

It shares only the vocabulary with the target: it has its own family, sizes and KV cache, and reads no hidden states.
The cache is indexed by the target's page tables, so prefix hits include the draft model's keys. Loaded through the
catalog; the engine calls it through the Drafter protocol.

With n committed tokens, a round computes these positions of the draft model::

    step 0      n-2  n-1     two, because after a fully accepted round n-2 was never computed
    step j      n+j-1        the draft of step j-1
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.distributed.gather import Ranks
from unisono.drafters.base import DrafterContext, PromptPass, SelfTest, Verified
from unisono.drafters.options import LOAD_FORMAT, read_options, required_model
from unisono.drafters.unobserved import NAME, Unobserved
from unisono.graphs import Features
from unisono.kernels.speculation.catch_up import catch_up
from unisono.kernels.speculation.draft_inputs import draft_extend_inputs, draft_inputs
from unisono.kv.specs import Recurrent, Tree, leaves, whole_requests
from unisono.models.blocks.layer_tails import prove_products
from unisono.models.config import DecoderConfig
from unisono.models.load import vocabulary
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import decoder_update, load_model
from unisono.models.load.update import WeightUpdate
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig

logger = logging.getLogger(__name__)


LAG = 2
"""Offset of a round's first position from the text's end. Keys of all earlier positions must be present."""


class StandaloneDrafter:
    """Speculative decoding with a draft model (Leviathan, Kalman, Matias, arXiv 2211.17192), drafts coupled.

    ``spec.model`` is a checkpoint's directory or bundled name; option ``load_format="dummy"`` uses random weights
    (needs config.json only). Raises ConfigError for other options and for a vocabulary that differs from the target's.
    """

    name = "standalone"
    features = Features()
    unlimited = True  # pending data are tokens only
    drafts_trees = True
    keeps_drafts = True  # propose() wrote the final keys and values of accepted drafts

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        self._load_format = read_options(spec, LOAD_FORMAT, takes_model=True)["load_format"]
        self.num_drafts = spec.num_speculative_tokens
        self._checkpoint = Checkpoint.open(required_model(spec, "a small language model with the target's tokenizer"))
        self._vocabulary = check_vocabulary(target, self._checkpoint)
        self._shared_ids = min(target.vocab_size, self._checkpoint.config.vocab_size)  # the rest is padding
        random = "the draft model's weights are random (load_format dummy)" if self._load_format == "dummy" else None
        self.self_test = SelfTest("the draft model was trained on other text, or its files are damaged", random)

    def divides(self, ranks: Ranks) -> bool:
        return False

    def bind(self, context: DrafterContext) -> None:
        c = self._checkpoint.config
        if context.max_model_len > c.max_positions:
            logger.warning(
                "The draft model in %s was trained for %d positions, the engine serves %d: beyond, its drafts will "
                "seldom be accepted. Lower --max-model-len if no request is that long.",
                self._checkpoint.path, c.max_positions, context.max_model_len,
            )  # fmt: skip
        self._context = context
        self._model = load_model(
            self._checkpoint,
            attention=context.attention,
            dtype=context.dtype,
            device=context.device,
            max_positions=context.max_model_len,
            load_format=self._load_format,
            ranks=context.ranks,
            kv_dtype=context.target.builder.kv_dtype,
            progress=lambda stage, share: context.progress(share),
        )
        context.decide("draft vocabulary", f"{self._shared_ids} token ids, as the target's", self._vocabulary)
        prove_products(self._model.modules())
        self._unobserved = Unobserved(context)

    def weight_updates(self, directory: Path) -> list[WeightUpdate]:
        """See :class:`unisono.drafters.base.UpdatableDrafter`."""
        opened = Checkpoint.open(directory)
        if opened.config != self._checkpoint.config:
            raise CheckpointError(f"{directory}: its config.json is not that of the draft model that is served.")
        return [decoder_update(self._model, opened)]

    def state_specs(self) -> Tree:
        layers = whole_requests(self._model.state_specs())
        if any(isinstance(spec, Recurrent) for spec in leaves(layers)):
            raise ConfigError(
                f"the draft model in {self._checkpoint.path} has recurrent layers, which drafts cannot roll back; "
                "give a draft model with attention only."
            )
        return {"layers": layers, NAME: self._unobserved.state_specs()}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        rows = slots if tables is None else tables
        context, s, vocab = self._context, self._context.slots, self._checkpoint.config.vocab_size
        for step in range(drafts.shape[1]):
            first, width = (step - 1, 1) if step else (-LAG, LAG)
            token_ids, positions, slot_mapping, kv_len = draft_inputs(
                slots, drafts, s.history, s.length, s.max_length, s.status, s.page_table, context.page_size, vocab,
                first, width, tables,
            )  # fmt: skip
            inputs = AttentionInputs(rows, positions, slot_mapping, kv_len, s.page_table, width)
            hidden, _ = self._model(token_ids, ForwardContext.of(inputs), self._context.state["layers"])
            newest = hidden.view(-1, width, hidden.shape[1])[:, -1].contiguous()
            logits = self._model.logits(newest)[:, : self._shared_ids]
            drafts[:, step].copy_(context.sample(logits, slots, step, None))

    def observe(self, verified: Verified) -> None:
        """Only mark the tokens as observed: the next round computes the missing positions first."""
        self._unobserved.mark_observed(verified.slots)

    def remember(self, verified: Verified) -> None:
        """Do nothing: the tokens are in the history."""

    def resume(self, slots: torch.Tensor) -> None:
        """Compute keys and values of pending tokens, shifted back by two positions, where a round begins."""
        context, s = self._context, self._context.slots
        missing = self._unobserved.take(slots, LAG)
        lengths = self._unobserved.observed - LAG
        new = catch_up(slots, missing.result, missing.sampled, lengths, s.page_table, context.page_size)
        inputs = AttentionInputs(
            slots, new.positions, new.slot_mapping, new.kv_len, s.page_table, missing.sampled.shape[1]
        )
        known = new.token_ids < self._checkpoint.config.vocab_size
        pass_context = ForwardContext.of(inputs, inputs.last_tokens(new.last))
        self._model(new.token_ids.where(known, 0), pass_context, self._context.state["layers"])

    def observe_prompt(self, prompt: PromptPass) -> None:
        """Compute keys and values of the pass, and of the token before each chunk: a cached page may lack its last
        one."""
        context, s = self._context, self._context.slots
        token_ids, positions, slot_mapping, kv_len, query_start = draft_extend_inputs(
            prompt.slots, prompt.query_start, prompt.start, s.history, s.page_table, context.page_size,
            self._checkpoint.config.vocab_size, prompt.token_ids.shape[0],
        )  # fmt: skip
        inputs = AttentionInputs(prompt.slots, positions, slot_mapping, kv_len, s.page_table, None, query_start)
        last_tokens = inputs.last_tokens((query_start[1:] - 1).clamp_min(0))  # their outputs are not read either
        self._model(token_ids, ForwardContext.of(inputs, last_tokens), self._context.state["layers"])
        self._unobserved.mark_observed(prompt.slots)


def check_vocabulary(target: DecoderConfig, draft: Checkpoint) -> str:
    """Raise ConfigError unless every token id means the same string in both models; return how that is known.

    The sizes may differ by ids that no tokenizer produces. Without a tokenizer on either side they must be equal.
    """
    known = vocabulary.strings(Path(target.hf_config.name_or_path), target.vocab_size)
    drafted = vocabulary.strings(draft.path, draft.config.vocab_size)
    advice = "Give a draft model with the target's own tokenizer."
    if known is None or drafted is None:
        if target.vocab_size != draft.config.vocab_size:
            raise ConfigError(
                f"the draft model in {draft.path} has {draft.config.vocab_size} token ids, the target "
                f"{target.vocab_size}, and without a tokenizer in both they can't be mapped. {advice}"
            )
        return "as many ids in both; without a tokenizer in both their strings could not be compared"
    wrong = sorted(i for i in known.keys() | drafted.keys() if known.get(i) != drafted.get(i))
    if wrong:
        theirs, ours = drafted.get(wrong[0]), known.get(wrong[0])
        raise ConfigError(
            f"the draft model in {draft.path} has another vocabulary than the target: token id {wrong[0]} is "
            f"{theirs!r} there and {ours!r} here, and {len(wrong) - 1} more ids differ. {advice}"
        )
    return "every token id has the same string in both tokenizers"
