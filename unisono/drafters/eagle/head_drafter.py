"""Base of the drafters with a head from a checkpoint of its own: EAGLE, EAGLE-2 and EAGLE-3."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from unisono.drafters.base import DrafterContext
from unisono.drafters.eagle.checkpoint import DraftCheckpoint, Head
from unisono.drafters.hidden import DraftModule, HiddenDrafter
from unisono.drafters.quantization import DraftWeights
from unisono.models.load.update import WeightUpdate


class HeadDrafter(HiddenDrafter):
    """A drafter whose module is one head. checkpoint: the head's files; the constructor opens, ``build`` reads them."""

    checkpoint: DraftCheckpoint

    def open(self, directory: Path) -> DraftCheckpoint:
        """Open another head for the same target. Raises CheckpointError unless it fits."""
        raise NotImplementedError

    def choose_weights(self, context: DrafterContext) -> DraftWeights:
        return self.checkpoint.choose_weights(self.draft_quantization, context.target, context.ranks)

    def build(self, context: DrafterContext) -> DraftModule:
        head = self.checkpoint.build(
            context.target,
            self.attention(context),
            context.max_model_len,
            context.dtype,
            context.device,
            context.progress,
            self.weights.of,
            context.ranks,
        )
        for choice in self.checkpoint.choices(head, context.target):
            context.decide(*choice)
        del self.checkpoint
        return head

    def module_updates(self, directory: Path) -> list[WeightUpdate]:
        opened, shares = self.open(directory), self.weights.shares(self.module.lm_head)
        return [opened.update(cast(Head, self.module), self._context.target, shares)]
