"""Outputs that all requests of an engine share, for drafters that draft from text.

Owns the ring of tokens and its upkeep inside rounds (``kernels/speculation/lookup.py: remember``). Outputs enter when
the device ends their request, by a stop id or its limit; those of aborted requests (stop strings among them) do not,
nor what preceded a preemption. What is shared decides what is drafted, never what is sampled: texts do not depend on
it.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.kernels.speculation.lookup import remember
from unisono.kv.specs import PerSlot, Tree

SHARED_TOKENS, MOST_SHARED = 1 << 16, 1 << 24
"""Tokens that are shared by default, and at most."""


class SharedTexts:
    """The last ``size`` tokens of ended outputs; with 0 nothing is shared. S slots."""

    def __init__(self, size: int, context: DrafterContext) -> None:
        self._context, self._slots, history = context, context.slots, context.slots.history
        self.ring: torch.Tensor | None = None  # [size] int32
        self.head: torch.Tensor | None = None  # [1] int32: where the next token goes
        if size:
            self.ring, self.head = history.new_full((size,), -1), history.new_zeros(1)

    @property
    def _output_start(self) -> torch.Tensor:
        return self._context.state["output_start"]

    def state_specs(self) -> Tree:
        """output_start [S]: the position at which each slot's output begins."""
        return {"output_start": PerSlot((), torch.int32)}

    def observe(self, verified: Verified) -> None:
        """Share the outputs that this round ended."""
        if self.ring is not None and self.head is not None:
            s = self._slots
            remember(self.ring, self.head, verified.slots, verified.result, s.history, s.length, self._output_start)

    def observe_prompt(self, prompt: PromptPass) -> None:
        """Note where the output begins: after the last prompt token seen."""
        self._output_start.index_copy_(0, prompt.slots.long(), prompt.start + prompt.query_start.diff())
