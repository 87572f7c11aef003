"""Rows of a pass, in the form that the CPU twins of recurrent ops read.

Shapes: T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

Plan = TypeVar("Plan")


class PassRows(NamedTuple):
    """Fields of :class:`unisono.kv.recurrent_pass.RecurrentPass`, int64 [R] each."""

    rows: torch.Tensor
    since: torch.Tensor
    first: torch.Tensor
    until: torch.Tensor
    end: torch.Tensor

    def of(self, chosen: torch.Tensor) -> PassRows:
        """Select some of the rows."""
        return PassRows(*(field[chosen] for field in self))


def tokens_of_rows(p: PassRows, query_start: torch.Tensor | None, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first token of each row [R], row of each token [T], -1 for padding), int64."""
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


class SharedPlan(Generic[Plan]):
    """Return the plan of a pass, ``make(rows of the pass, query_start, tokens, *sizes)``, computed once for all
    layers.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._last: tuple[tuple[int, ...], tuple[torch.Tensor, ...], Plan] | None = None

    def __call__(
        self, fields: tuple[torch.Tensor, ...], query_start: torch.Tensor | None, tokens: int, *sizes: int
    ) -> Plan:
        """Look up or make the plan. fields: those of :class:`PassRows`, of any integer dtype."""
        inputs = fields if query_start is None else (*fields, query_start)
        numbers, last = (len(inputs), tokens, *sizes), self._last
        if last is not None and last[0] == numbers and all(map(torch.equal, last[1], inputs)):
            return last[2]
        plan = self._make(PassRows(*(field.long() for field in fields)), query_start, tokens, *sizes)
        self._last = numbers, tuple(field.clone() for field in inputs), plan
        return plan
