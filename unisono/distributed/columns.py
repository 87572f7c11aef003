"""Column-parallel tensors: a layer's outputs before they are gathered.

Made by ``layers``; the consumer gathers all columns, or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.distributed.gather import Ranks


@dataclass(frozen=True)
class Columns:
    """Rows [M, N · n] divided into equal parts on N ranks. own: this rank's part, [M, n]. ranks: the owners of the
    others.
    """

    own: torch.Tensor
    ranks: Ranks

    @property
    def first(self) -> int:
        """Index of this rank's first column among all."""
        return self.ranks.index * self.own.shape[1]

    def select(self, rows: torch.Tensor) -> Columns:
        """Select rows [M'] int32 of M, on every rank the same."""
        return Columns(self.own.index_select(0, rows), self.ranks)

    def whole(self) -> torch.Tensor:
        """Gather all columns: [M, N · n]."""
        return self.ranks.gather(self.own)


def whole(rows: torch.Tensor | Columns) -> torch.Tensor:
    """Return all columns of rows that may be divided."""
    return rows.whole() if isinstance(rows, Columns) else rows
