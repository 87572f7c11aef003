"""Acceptance rule of drafts. Rounds use one rule; benchmarks inject another."""

from __future__ import annotations

from typing import Protocol

import torch


class CandidateRule(Protocol):
    """Chooses the drafts that are compared with the target's tokens. Runs inside the graph of a round.

    The comparison itself is in ``commit`` (``kernels/speculation/rounds.py``).
    """

    def candidates(
        self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int, shared: bool = False
    ) -> torch.Tensor:
        """Return drafts [N, k]; ``commit`` accepts their longest prefix that equals ``sampled``. -1 is never accepted.

        drafts [N, k], sampled [N, 1 + k], slots [N]: int32. N = R · paths; row r · paths + l is path l of request r.
        shared: requests share drafts, and those that are -1 were not verified.
        """

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        """Set the number of drafts of each request, at most ``drafts``, in drafted [R] int32."""


class ExactMatch:
    """The engine's rule: all drafts are compared as they are."""

    def candidates(
        self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int, shared: bool = False
    ) -> torch.Tensor:
        return drafts

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        pass
