"""Which drafts of a round are accepted. The round has one rule; benchmarks inject another one."""

from __future__ import annotations

from typing import Protocol

import torch


class AcceptanceRule(Protocol):
    """Says which drafts are accepted, given what the target sampled. Runs inside the graph of a round."""

    def accepted(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int) -> torch.Tensor:
        """Drafts [N, k] of which ``commit`` accepts the longest prefix that equals ``sampled``; -1 is never accepted.

        drafts [N, k], sampled [N, 1 + k], slots [N]: int32. N is R · paths, row r · paths + l being path l of request
        r.
        """

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        """drafted [R] int32: how many drafts each request had, of ``drafts`` at most. May be overwritten."""


class ExactMatch:
    """The engine's rule: a draft is accepted if it equals the sampled token, and so are all before it."""

    def accepted(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int) -> torch.Tensor:
        return drafts

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        pass
