"""No drafts: k = 0, plain decoding. The first entry of the catalog and the reference for all others."""

from __future__ import annotations

import torch

from unisono.program import Field, Needs


class NoDrafter:
    """Proposes nothing and has nothing to catch up with."""

    name = "none"
    num_drafts = 0
    slot_state: tuple[Field, ...] = ()
    needs = Needs()

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        pass

    def observe(self, slots: torch.Tensor, committed: torch.Tensor) -> None:
        pass

    def observe_prompt(self, slots: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        pass
