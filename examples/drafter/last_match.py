"""Drafts the tokens that followed the last earlier occurrence of the current token.

The whole method runs on the device with fixed shapes, so a round with it is one graph. The shapes: R requests, N tokens
of history, k drafts.
"""

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.drafters.options import read_options
from unisono.graphs import Features
from unisono.models.config import DecoderConfig
from unisono.types import SpeculativeConfig


class LastMatchDrafter:
    """No options, no weights, no state of its own."""

    name = "last_match"
    features = Features()  # no hidden states of the target
    self_test = None  # no weights that might not fit the target

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        read_options(spec, {})
        self.num_drafts = spec.num_speculative_tokens

    def bind(self, context: DrafterContext) -> None:
        self._slots = context.slots

    def state_specs(self):
        return {}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write drafts [R, k] for slots [R]; -1 drafts nothing."""
        history = self._slots.history.index_select(0, slots)  # [R, N]
        length = self._slots.length.index_select(0, slots)[:, None]  # [R, 1]
        place = torch.arange(history.shape[1], device=history.device)[None]  # [1, N]
        last = self._slots.last_token.index_select(0, slots)[:, None]
        found = torch.where((history == last) & (place < length - 1), place, -1).amax(1, keepdim=True)  # [R, 1]
        after = found + 1 + torch.arange(drafts.shape[1], device=history.device)[None]  # [R, k]
        tokens = history.gather(1, after.clamp(max=history.shape[1] - 1))
        drafts.copy_(torch.where((found >= 0) & (after < length), tokens, -1))

    def observe(self, verified: Verified) -> None:
        pass

    def observe_prompt(self, prompt: PromptPass) -> None:
        pass
