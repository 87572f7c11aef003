"""A tensor whose columns are divided among ranks: what a layer gives before anything is gathered.

Made by ``layers``; who reads it decides whether all columns are gathered, or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.distributed.gather import Ranks


@dataclass(frozen=True)
class Columns:
    """Equal parts of rows [M, N · n] on N ranks. own: this rank's, [M, n]. ranks: who has the others."""

    own: torch.Tensor
    ranks: Ranks

    @property
    def first(self) -> int:
        """The index of this rank's first column among all."""
        return self.ranks.index * self.own.shape[1]

    def whole(self) -> torch.Tensor:
        """Gather all columns: [M, N · n]."""
        return self.ranks.gather(self.own)


def whole(rows: torch.Tensor | Columns) -> torch.Tensor:
    """All columns of rows that may be divided."""
    return rows.whole() if isinstance(rows, Columns) else rows
