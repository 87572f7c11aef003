"""EAGLE and EAGLE-2: one decoder layer goes on from the target's final hidden state. Loaded by the catalog."""

from __future__ import annotations

from unisono.drafters.base import Host
from unisono.drafters.hidden import DraftModule, HiddenDrafter, checked_model, checked_options
from unisono.models.config import DecoderConfig
from unisono.models.draft_checkpoint import open_eagle
from unisono.program import Hidden, Needs
from unisono.types import SpeculativeConfig


class EagleDrafter(HiddenDrafter):
    """EAGLE (Li et al., arXiv 2401.15077, 2406.16858) as a chain or a fixed tree, drafts coupled with the target's noise.

    ``spec.model`` is the head's directory; option ``load_format="dummy"`` gives it random weights (needs config.json
    only). Raises ConfigError for other options, CheckpointError for a head that does not fit the target.
    """

    name = "eagle"
    needs = Needs(Hidden.FULL)

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        super().__init__(spec)
        options = checked_options(spec, {"load_format": ("auto", "dummy")})
        self._checkpoint = open_eagle(checked_model(spec), target, dummy=options["load_format"] == "dummy")

    def build(self, host: Host) -> DraftModule:
        attention = self.attention(host, self._checkpoint.config.layer)
        head = self._checkpoint.build(host.target, attention, host.max_model_len, host.dtype, host.device)
        del self._checkpoint
        return head
