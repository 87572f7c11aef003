"""Multi-token prediction (MTP, NEXTN) with one module, reused for k steps. Loaded by the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from unisono.drafters.base import DrafterContext, SelfTest
from unisono.drafters.hidden import OTHER_TARGET, RANDOM, HiddenDrafter
from unisono.drafters.mtp.checkpoint import MTPCheckpoint
from unisono.drafters.mtp.model import MTPModule
from unisono.drafters.mtp.multi_layer import MultiMTPDrafter
from unisono.drafters.options import DRAFT_QUANTIZATION, LOAD_FORMAT, read_options
from unisono.graphs import Features, Hidden
from unisono.models.config import DecoderConfig
from unisono.models.load.update import WeightUpdate
from unisono.types import SpeculativeConfig


class MTPDrafter(HiddenDrafter):
    """DeepSeek-V3's module (arXiv 2412.19437, section 2.2), applied to its own hidden states.

    The modules are in ``spec.model``, by default in the target's own directory. If there are several, module i drafts
    token i, and the constructor returns a MultiMTPDrafter, for chains only. Option ``load_format="dummy"`` uses random
    weights for as many modules as the target's config.json declares; ``draft_quantization``: see
    ``drafters/quantization.py``. Raises ConfigError for other options, CheckpointError for modules that are missing or
    do not fit the target.
    """

    name = "mtp"
    features = Features(Hidden.FULL)

    def __new__(cls, spec: SpeculativeConfig, target: DecoderConfig) -> Any:
        options = read_options(spec, {**LOAD_FORMAT, **DRAFT_QUANTIZATION}, takes_model=True)
        dummy = options["load_format"] == "dummy"
        checkpoint = MTPCheckpoint.open(spec.model or target.hf_config.name_or_path, target, dummy=dummy)
        several = min(checkpoint.depth, spec.num_speculative_tokens) > 1
        drafter = MultiMTPDrafter(spec, checkpoint) if several else super().__new__(cls)
        if not several:
            drafter._checkpoint = checkpoint
        drafter.draft_quantization = options["draft_quantization"]
        drafter.self_test = SelfTest(OTHER_TARGET, RANDOM if dummy else None)
        return drafter

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        super().__init__(spec)
        self._checkpoint: MTPCheckpoint

    def module_updates(self, directory: Path) -> list[WeightUpdate]:
        context = self._context
        opened = MTPCheckpoint.open(directory, context.target.config)
        return [
            opened.update(cast(MTPModule, self.module), 0, context.target, self.weights.shares(self.module.lm_head))
        ]

    def build(self, context: DrafterContext) -> MTPModule:
        attention, dtype = self.attention(context), context.dtype
        rest = context.progress, self.weights.of, context.ranks
        module = self._checkpoint.load(context.target, 0, attention, dtype, *rest)
        for choice in self._checkpoint.choices([module], context.target):
            context.decide(*choice)
        return module
