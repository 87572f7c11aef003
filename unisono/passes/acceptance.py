"""Acceptance rule of drafts. Rounds use one rule; benchmarks inject another."""

from __future__ import annotations

from typing import Protocol

import torch


class AcceptanceRule(Protocol):
    """Decides which drafts are accepted, from the tokens sampled by the target. Runs inside the graph of a round."""

    def accepted(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int) -> torch.Tensor:
        """Return drafts [N, k]; ``commit`` accepts their longest prefix that equals ``sampled``. -1 is never accepted.

        drafts [N, k], sampled [N, 1 + k], slots [N]: int32. N = R · paths; row r · paths + l is path l of request r.
        """

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        """Set the number of drafts of each request, at most ``drafts``, in drafted [R] int32."""


class ExactMatch:
    """The engine's rule: a draft is accepted if it and all drafts before it equal the sampled tokens."""

    def accepted(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int) -> torch.Tensor:
        return drafts

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        pass
