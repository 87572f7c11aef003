"""CPU twins of causal convolutions: the kernels' taps in the same order, in plain torch.

Called by the ops of this folder. Every operation is elementwise, so a token's bits
depend on nothing else. A twin may read values on the host, because an op is opaque to the tape.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, Hv value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.kernels.speculation.pass_rows import PassRows, SharedPlan, tokens_of_rows


def convolved_cpu(
    u: torch.Tensor, weight: torch.Tensor, snapshot: torch.Tensor, ring: torch.Tensor,
    fields: tuple[torch.Tensor, ...], query_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Convolve and update the remembered inputs: (tokens except padding [n], their sums of taps [n, C] fp32)."""
    taps = weight.shape[-1]
    plan = _plan(fields, query_start, len(u), taps, snapshot.shape[1], ring.shape[1])
    history = plan.history.read(snapshot, ring).flatten(0, 1)  # [R · (J - 1), C]
    source = torch.cat((history, u))  # inputs before a row's tokens, then all tokens
    if len(plan.moved):
        fresh = source.index_select(0, plan.fresh.flatten()).view(*plan.fresh.shape, -1)
        kept = torch.where(plan.new, fresh, plan.kept.read(snapshot, ring))

    read = source.index_select(0, plan.taps.flatten()).view(taps, -1, u.shape[1]).float()
    read = read * weight.view(-1, taps).t().float()[:, None]
    acc = torch.zeros_like(read[0])
    for tap in read.unbind():
        acc += tap
    ring[plan.latest] = u.index_select(0, plan.latest_token)
    if len(plan.moved):
        snapshot[plan.moved] = kept
    return plan.token, acc


class Earlier(NamedTuple):
    """Places of inputs before the pass [R, J - 1]: (row, place) in the snapshot if ``old``, else in the ring."""

    old: torch.Tensor
    in_snapshot: tuple[torch.Tensor, torch.Tensor]
    in_ring: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def at(cls, p: PassRows, at: torch.Tensor, kept: int, ring: int) -> Earlier:
        """Compute the places of positions ``at``. kept, ring: capacity of a row of the snapshot and of the ring."""
        rows, since = p.rows[:, None], p.since[:, None]
        place = (at - since + kept).clamp(0, kept - 1)
        return cls((at < since)[..., None], (rows, place), (rows, at % ring))

    def read(self, snapshot: torch.Tensor, ring: torch.Tensor) -> torch.Tensor:
        """Gather the inputs [R, J - 1, C]."""
        return torch.where(self.old, snapshot[self.in_snapshot], ring[self.in_ring])


class ConvPlan(NamedTuple):
    """Indices that a pass reads and writes; into rows of (history, tokens) by default.

    taps [J, n]: inputs of each token's taps, first to last. token [n]: tokens except padding. latest: places in the
    ring of the tokens ``latest_token``. moved: state rows whose snapshot advances; it takes ``fresh`` [m, J - 1] if
    ``new``, else ``kept``.
    """

    history: Earlier
    taps: torch.Tensor
    token: torch.Tensor
    latest: tuple[torch.Tensor, torch.Tensor]
    latest_token: torch.Tensor
    moved: torch.Tensor
    fresh: torch.Tensor
    new: torch.Tensor
    kept: Earlier


def _make_plan(p: PassRows, query_start: torch.Tensor | None, tokens: int, taps: int, kept: int, ring: int) -> ConvPlan:
    begin, row_T = tokens_of_rows(p, query_start, tokens)
    before = taps - 1
    back = torch.arange(-before, 0)
    moved = torch.nonzero(p.until > p.since).flatten()
    at = p.until[moved, None] + back
    new = at - p.first[moved, None] + begin[moved, None]
    all_history = len(p.rows) * before
    fresh = (new + all_history).clamp(0, max(all_history + tokens - 1, 0))

    token = torch.nonzero(row_T >= 0).flatten()
    owner = row_T[token]
    step = token - begin[owner] - before + torch.arange(taps)[:, None]
    reads = torch.where(step < 0, owner * before + step + before, all_history + begin[owner] + step)
    position = p.first[owner] + token - begin[owner]
    latest = p.end[owner] - position <= ring
    return ConvPlan(
        Earlier.at(p, p.first[:, None] + back, kept, ring), reads, token,
        (p.rows[owner[latest]], position[latest] % ring), token[latest], p.rows[moved], fresh,
        (new >= begin[moved, None])[..., None], Earlier.at(p.of(moved), at, kept, ring),
    )  # fmt: skip


_plan = SharedPlan(_make_plan)


def gates_cpu(ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Compute the gates [T, 2, Hv] fp32, the log of the decay, then beta, from ba [T, 2 Hv]: b, then a, of each value
    head.
    """
    b, a = (half.contiguous() for half in ba.float().chunk(2, dim=1))
    decay = -torch.exp(a_log) * softplus_cpu(a + dt_bias)
    return torch.stack((decay, 1.0 / (1.0 + torch.exp(-b))), dim=1)


def softplus_cpu(x: torch.Tensor) -> torch.Tensor:
    """Compute log(1 + exp(x)), with Higham's correction of the sum's rounding error."""
    small = torch.exp(-x.abs())
    total = 1.0 + small
    rest = torch.where(total == 1.0, small, torch.log(total) * (small / torch.where(total == 1.0, 1.0, total - 1.0)))
    return x.clamp_min(0) + rest
