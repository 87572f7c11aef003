"""EAGLE and EAGLE-2: one decoder layer over the target's final hidden state. Loaded by the catalog."""

from __future__ import annotations

from pathlib import Path

from unisono.drafters.base import SelfTest
from unisono.drafters.eagle.checkpoint import DraftCheckpoint, open_eagle
from unisono.drafters.eagle.head_drafter import HeadDrafter
from unisono.drafters.hidden import OTHER_TARGET, RANDOM
from unisono.drafters.options import DRAFT_QUANTIZATION, LOAD_FORMAT, read_options, required_model
from unisono.graphs import Features, Hidden
from unisono.models.config import DecoderConfig
from unisono.types import SpeculativeConfig


class EagleDrafter(HeadDrafter):
    """EAGLE (Li et al., arXiv 2401.15077, 2406.16858) as a chain or a fixed tree, coupled with the target's noise.

    ``spec.model`` is the head's directory. Option ``load_format="dummy"`` uses random weights (needs config.json only);
    ``draft_quantization``: see ``drafters/quantization.py``. Raises ConfigError for other options, CheckpointError for
    a head that does not fit the target.
    """

    name = "eagle"
    features = Features(Hidden.FULL)

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        super().__init__(spec)
        options = read_options(spec, {**LOAD_FORMAT, **DRAFT_QUANTIZATION}, takes_model=True)
        dummy, self.draft_quantization = options["load_format"] == "dummy", options["draft_quantization"]
        self.checkpoint = open_eagle(required_model(spec, "a head made for this target"), target, dummy=dummy)
        self.self_test = SelfTest(OTHER_TARGET, RANDOM if dummy else None)

    def open(self, directory: Path) -> DraftCheckpoint:
        return open_eagle(directory, self._context.target.config)
