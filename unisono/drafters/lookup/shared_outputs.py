"""Outputs shared by all requests of an engine, for drafters that draft from text.

Owns the ring of tokens and its updates inside rounds (``kernels/speculation/lookup.py: remember``). An output enters
when the device ends its request, by a stop id or its limit. Outputs of aborted requests (including stop strings) and
output before a preemption do not enter. Shared outputs influence the drafts, never the sampled tokens: texts do not
depend on them.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.kernels.speculation.lookup import remember
from unisono.kv.specs import PerSlot, Tree

SHARED_TOKENS, MOST_SHARED = 1 << 16, 1 << 24
"""Number of shared tokens: default, and maximum."""


class SharedTexts:
    """The last ``size`` tokens of ended outputs; 0 shares nothing. S slots."""

    def __init__(self, size: int, context: DrafterContext) -> None:
        self._context, self._slots, history = context, context.slots, context.slots.history
        self.ring: torch.Tensor | None = None  # [size] int32
        self.head: torch.Tensor | None = None  # [1] int32: where the next token goes
        if size:
            self.ring, self.head = history.new_full((size,), -1), history.new_zeros(1)

    @property
    def _output_start(self) -> torch.Tensor:
        start: torch.Tensor = self._context.state["output_start"]
        return start

    def state_specs(self) -> Tree:
        """output_start [S]: position of each slot's first output token."""
        return {"output_start": PerSlot((), torch.int32)}

    def observe(self, verified: Verified) -> None:
        """Add the outputs that ended in this round."""
        if self.ring is not None and self.head is not None:
            s = self._slots
            remember(self.ring, self.head, verified.slots, verified.result, s.history, s.length, self._output_start)

    def observe_prompt(self, prompt: PromptPass) -> None:
        """Record the start of the output: the position after the last prompt token seen."""
        self._output_start.index_copy_(0, prompt.slots.long(), prompt.start + prompt.query_start.diff())
