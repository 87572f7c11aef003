"""No drafts: k = 0, plain decoding. The first entry of the catalog and the reference for all others."""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.drafters.options import read_options
from unisono.graphs import Features
from unisono.kv.specs import Tree
from unisono.models.config import DecoderConfig
from unisono.types import SpeculativeConfig


class NoDrafter:
    """Proposes nothing and keeps no state. Raises ConfigError for a model or an option."""

    name = "none"
    num_drafts = 0
    features = Features()
    self_test = None

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        read_options(spec, {})

    def bind(self, context: DrafterContext) -> None:
        pass

    def state_specs(self) -> Tree:
        return {}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        pass

    def observe(self, verified: Verified) -> None:
        pass

    def observe_prompt(self, prompt: PromptPass) -> None:
        pass
