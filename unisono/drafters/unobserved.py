"""What a drafter keeps while rounds draft nothing, so that it can catch up when drafting resumes.

Owns how many tokens of each slot were observed, and the target's hidden states of those after. Drafters whose
``observe`` costs a pass of a model use it; see ``PausableDrafter`` in ``base.py``. Everything is on the device.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, Verified
from unisono.kernels.speculation.unobserved import mark_observed, stash, take_unobserved
from unisono.kv.specs import PerSlot, Tree

NAME = "unobserved"
"""Where :meth:`Unobserved.state_specs` stand in the drafter's own."""


class Unobserved:
    """size: elements of the hidden states to keep, 0 where tokens are all that is needed.

    Where the engine never pauses drafters (``context.max_unobserved`` is 0) nothing is kept and no kernel runs.
    """

    def __init__(self, context: DrafterContext, size: int = 0) -> None:
        self._context, self._size, self._most = context, size, context.max_unobserved

    def state_specs(self) -> Tree:
        """observed [S]: tokens that the drafter has observed. hidden [S, max_unobserved, size]: states since."""
        kept = self._most if self._size else 0
        return {"observed": PerSlot((), torch.int32), "hidden": PerSlot((kept, self._size), self._context.dtype)}

    @property
    def observed(self) -> torch.Tensor:
        """Tokens of each slot that the drafter has observed, [S] int32."""
        return self._context.state[NAME]["observed"]

    def mark_observed(self, slots: torch.Tensor) -> None:
        """All tokens of slots [R] are observed, after a round or a prompt pass."""
        if self._most:
            mark_observed(self.observed, slots, self._context.slots.length)

    def keep(self, verified: Verified) -> None:
        """Keep the hidden states of a round of width 1."""
        if verified.hidden is not None:
            hidden = self._context.state[NAME]["hidden"]
            stash(hidden, verified.slots, verified.result, self._context.slots.length, verified.hidden)

    def take(self, slots: torch.Tensor, lag: int = 0) -> Verified:
        """Up to ``context.max_unobserved`` unobserved tokens of each of slots [R], as one round would have left them.

        They count as observed from now on. hidden is None where none are kept. lag: take the tokens this many positions
        before those, for a draft model that begins a round with the last tokens it knows.
        """
        s, hidden = self._context.slots, self._context.state[NAME]["hidden"]
        result, sampled, rows = take_unobserved(self.observed, slots, s.length, s.history, self._most, lag)
        states = hidden.flatten(0, 1).index_select(0, rows) if hidden.numel() else None
        return Verified(slots, result, sampled, states)


class CatchesUp:
    """What a ``PausableDrafter`` does with rounds whose hidden states it reads: subclasses say how it catches up."""

    _unobserved: Unobserved

    def observe(self, verified: Verified) -> None:
        self._catch_up(verified)
        self._unobserved.mark_observed(verified.slots)

    def remember(self, verified: Verified) -> None:
        self._unobserved.keep(verified)

    def resume(self, slots: torch.Tensor) -> None:
        self._catch_up(self._unobserved.take(slots))

    def _catch_up(self, verified: Verified) -> None:
        """Bring the drafter's state up to the tokens that this round committed."""
        raise NotImplementedError
