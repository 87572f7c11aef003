"""The protocol that every drafter follows. The engine knows nothing else of it."""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.program import Field, Needs


class Drafter(Protocol):
    """Fills a round's drafts and catches up with what the target committed.

    Everything here is captured inside the round's graph: it works on device tensors at fixed addresses,
    without a host synchronisation.

    name: as in the catalog.
    num_drafts: k, drafts per round; a round is 1 + k wide.
    slot_state: fields this drafter keeps per request.
    needs: what it wants captured from the target's passes.
    """

    name: str
    num_drafts: int
    slot_state: tuple[Field, ...]
    needs: Needs

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write ``drafts [rows, k]`` int32 for the requests in ``slots [rows]`` int32; -1 drafts nothing."""

    def observe(self, slots: torch.Tensor, committed: torch.Tensor) -> None:
        """Catch up after verification. ``committed [rows, width + 2]``: count, status, tokens (-1 padded)."""

    def observe_prompt(self, slots: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """See one pass of prompt tokens: ``slots [rows]``, ``token_ids [T]``, ``positions [T]``, all int32."""
