"""EAGLE-3: one decoder layer over the hidden states of three of the target's. Loaded by the catalog."""

from __future__ import annotations

from unisono.drafters.base import Host
from unisono.drafters.hidden import DraftModule, HiddenDrafter, checked_model, checked_options
from unisono.models.config import DecoderConfig
from unisono.models.draft_checkpoint import CONVENTIONS, open_eagle3
from unisono.program import Hidden, Needs
from unisono.types import SpeculativeConfig


class Eagle3Drafter(HiddenDrafter):
    """EAGLE-3 (Li et al., arXiv 2503.01840) as a chain or a fixed tree, its drafts coupled with the target's noise.

    ``spec.model`` is the head's directory. Options: ``load_format="dummy"`` gives it random weights (needs config.json
    only); ``aux_layers`` says what the head's layer ids number where that is in doubt: ``input`` or ``output``.
    Raises ConfigError for other options, CheckpointError for a head that does not fit the target.
    """

    name = "eagle3"

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        super().__init__(spec)
        options = checked_options(spec, {"load_format": ("auto", "dummy"), "aux_layers": CONVENTIONS})
        dummy, convention = options["load_format"] == "dummy", options["aux_layers"]
        self._checkpoint = open_eagle3(checked_model(spec), target, dummy=dummy, convention=convention)
        self.needs = Needs(Hidden.AUX, self._checkpoint.config.aux_layers)

    def build(self, host: Host) -> DraftModule:
        attention = self.attention(host, self._checkpoint.config.layer)
        head = self._checkpoint.build(host.target, attention, host.max_model_len, host.dtype, host.device)
        del self._checkpoint
        return head
