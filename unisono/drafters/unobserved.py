"""What a drafter keeps while nobody drafts, so that it can catch up when drafting resumes.

Owns how far each slot's draft state is behind, and the target's hidden states of the tokens in between. Drafters whose
``observe`` costs a pass of a model call it; see ``PausableDrafter`` in ``base.py``. Everything is on the device.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, Verified
from unisono.kernels.unobserved import mark_observed, stash, take_unobserved


class Unobserved:
    """Of S slots. size: of the hidden states to keep, 0 where tokens are all that is needed.

    Where the engine never pauses (``context.max_unobserved`` is 0) nothing is kept and no kernel runs.
    """

    def __init__(self, context: DrafterContext, size: int = 0) -> None:
        self._slots, self._most = context.slots, context.max_unobserved
        slots = context.slots.length.shape[0]
        self.observed = torch.zeros(slots, dtype=torch.int32, device=context.device)
        self._ring = torch.zeros(
            (slots, context.max_unobserved if size else 0, size), dtype=context.dtype, device=context.device
        )

    def mark_observed(self, slots: torch.Tensor) -> None:
        """Nothing is pending of slots [R]: a round was observed, or a prompt."""
        if self._most:
            mark_observed(self.observed, slots, self._slots.length)

    def keep(self, verified: Verified) -> None:
        """Keep what a round of width 1 showed."""
        if verified.hidden is not None:
            stash(self._ring, verified.slots, verified.result, self._slots.length, verified.hidden)

    def take(self, slots: torch.Tensor, lag: int = 0) -> Verified:
        """What is pending of slots [R], up to ``context.max_unobserved`` tokens each, as one round would have left it.

        hidden is None where none are kept. ``observed`` has moved on by what was taken. lag: tokens so many positions
        before those are meant, for a draft model that begins a round with the last ones it knows.
        """
        s = self._slots
        result, sampled, rows = take_unobserved(self.observed, slots, s.length, s.history, self._most, lag)
        hidden = self._ring.flatten(0, 1).index_select(0, rows) if self._ring.numel() else None
        return Verified(slots, result, sampled, hidden)
