"""Records kept by a drafter while rounds draft nothing, so that it can catch up when drafting resumes.

Owns the number of observed tokens of each slot, and the target's hidden states of the tokens after those. Used by
drafters whose ``observe`` runs a model; see ``PausableDrafter`` in ``base.py``. Everything is on the device.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, Verified
from unisono.kernels.speculation.unobserved import mark_observed, stash, take_unobserved
from unisono.kv.specs import PerSlot, Tree

NAME = "unobserved"
"""Key of :meth:`Unobserved.state_specs` in the drafter's own specs."""


class Unobserved:
    """Unobserved tokens of all slots. size: elements of the hidden states to keep, 0 if tokens are enough.

    If the engine never pauses drafters (``context.max_unobserved`` is 0), nothing is kept and no kernel runs.
    """

    def __init__(self, context: DrafterContext, size: int = 0) -> None:
        self._context, self._size, self._most = context, size, context.max_unobserved

    def state_specs(self) -> Tree:
        """observed [S]: number of observed tokens. hidden [S, max_unobserved, size]: hidden states since then."""
        kept = self._most if self._size else 0
        return {"observed": PerSlot((), torch.int32), "hidden": PerSlot((kept, self._size), self._context.dtype)}

    @property
    def observed(self) -> torch.Tensor:
        """Number of observed tokens of each slot, [S] int32."""
        observed: torch.Tensor = self._context.state[NAME]["observed"]
        return observed

    def mark_observed(self, slots: torch.Tensor) -> None:
        """Mark all tokens of slots [R] as observed, after a round or a prompt pass."""
        if self._most:
            mark_observed(self.observed, slots, self._context.slots.length)

    def keep(self, verified: Verified) -> None:
        """Keep the hidden states of a round of width 1."""
        if verified.hidden is not None:
            hidden = self._context.state[NAME]["hidden"]
            stash(hidden, verified.slots, verified.result, self._context.slots.length, verified.hidden)

    def take(self, slots: torch.Tensor, lag: int = 0) -> Verified:
        """Return up to ``context.max_unobserved`` unobserved tokens of each of slots [R], in the form of one round's
        result.

        They count as observed from now on. hidden is None if none are kept. lag: return the tokens this many positions
        earlier, for a draft model that begins a round with the last tokens it knows.
        """
        s, hidden = self._context.slots, self._context.state[NAME]["hidden"]
        result, sampled, rows = take_unobserved(self.observed, slots, s.length, s.history, self._most, lag)
        states = hidden.flatten(0, 1).index_select(0, rows) if hidden.numel() else None
        return Verified(slots, result, sampled, states)


class CatchesUp:
    """Implements ``PausableDrafter`` for drafters that read a round's hidden states. Subclasses define
    :meth:`_catch_up`."""

    _unobserved: Unobserved

    def observe(self, verified: Verified) -> None:
        self._catch_up(verified)
        self._unobserved.mark_observed(verified.slots)

    def remember(self, verified: Verified) -> None:
        self._unobserved.keep(verified)

    def resume(self, slots: torch.Tensor) -> None:
        self._catch_up(self._unobserved.take(slots))

    def _catch_up(self, verified: Verified) -> None:
        """Update the drafter's state with the tokens committed by this round."""
        raise NotImplementedError
