"""Where the rows of a pass stand, as the CPU twins of recurrent ops read it.

Shapes: T tokens, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PassRows(NamedTuple):
    """The fields of :class:`unisono.state.tails.TailPass`, int64 [R] each."""

    rows: torch.Tensor
    since: torch.Tensor
    first: torch.Tensor
    until: torch.Tensor
    end: torch.Tensor

    def of(self, chosen: torch.Tensor) -> PassRows:
        """Some of the rows."""
        return PassRows(*(field[chosen] for field in self))


def tokens_of_rows(p: PassRows, query_start: torch.Tensor | None, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(each row's first token [R], each token's row [T], -1 for padding), int64."""
    count = torch.where(p.first >= 0, p.end - p.first, 0)
    if query_start is None:
        begin = torch.arange(len(p.rows)) * (tokens // max(len(p.rows), 1))
    else:
        begin = query_start[:-1].long()
    row_T = torch.full((tokens,), -1)
    owner = torch.repeat_interleave(torch.arange(len(p.rows)), count)
    step = torch.arange(len(owner)) - torch.repeat_interleave(count.cumsum(0) - count, count)
    row_T[begin[owner] + step] = owner
    return begin, row_T
