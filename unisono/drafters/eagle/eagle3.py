"""EAGLE-3: one decoder layer over the hidden states of three target layers. Loaded by the catalog."""

from __future__ import annotations

from pathlib import Path

from unisono.distributed.gather import Ranks
from unisono.drafters.base import SelfTest
from unisono.drafters.eagle.checkpoint import CONVENTIONS, DraftCheckpoint, open_eagle3
from unisono.drafters.eagle.head_drafter import HeadDrafter
from unisono.drafters.hidden import OTHER_TARGET, RANDOM
from unisono.drafters.options import DRAFT_QUANTIZATION, LOAD_FORMAT, read_options, required_model
from unisono.graphs import Features, Hidden
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, SpeculativeConfig


class Eagle3Drafter(HeadDrafter):
    """EAGLE-3 (Li et al., arXiv 2503.01840) as a chain or a fixed tree, coupled with the target's noise.

    ``spec.model`` is the head's directory. Options: ``load_format="dummy"`` uses random weights (needs config.json
    only); ``aux_layers``, ``input`` or ``output``, sets the meaning of ambiguous layer ids; ``draft_quantization``: see
    ``drafters/quantization.py``. Raises ConfigError for other options, CheckpointError for a head that does not fit the
    target.
    """

    name = "eagle3"

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        super().__init__(spec)
        known = {**LOAD_FORMAT, "aux_layers": CONVENTIONS, **DRAFT_QUANTIZATION}
        options = read_options(spec, known, takes_model=True)
        dummy, model = options["load_format"] == "dummy", required_model(spec, "a head made for this target")
        self.checkpoint = opened = open_eagle3(model, target, dummy=dummy, convention=options["aux_layers"])
        self._convention = options["aux_layers"]
        self.draft_quantization = options["draft_quantization"]
        self.features = Features(Hidden.AUX, opened.config.aux_layers)
        causes = (
            f"{OTHER_TARGET}; or its layer ids number something else: it reads the inputs of layers "
            f'{list(opened.config.aux_layers)} ({opened.why}); set "aux_layers" to "input" or "output" in the '
            "speculative config"
        )
        self.self_test = SelfTest(causes, RANDOM if dummy else None)

    def divides(self, ranks: Ranks) -> bool:
        """Return True if its heads can be divided: a round with k = 3 of an 8B model then takes 4 % less on two
        H200s."""
        try:
            self.checkpoint.config.layer.check_divides(ranks)
        except ConfigError:
            return False
        return True

    def open(self, directory: Path) -> DraftCheckpoint:
        return open_eagle3(directory, self._context.target.config, convention=self._convention)
