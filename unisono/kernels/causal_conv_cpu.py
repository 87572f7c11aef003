"""CPU twin of ``causal_conv``: the same taps in the same order, in plain torch.

Called only through the op that kernels/causal_conv.py registers. Every operation is by element, so a token's bits
depend on nothing else. The twin may read values on the host, because an op is opaque to the tape.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, Hv value heads.
"""

from __future__ import annotations

import torch

from unisono.kernels.pass_rows import PassRows, tokens_of_rows


def causal_conv_cpu(
    u: torch.Tensor,
    weight: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    snapshot: torch.Tensor,
    ring: torch.Tensor,
    rows: torch.Tensor,
    since: torch.Tensor,
    first: torch.Tensor,
    until: torch.Tensor,
    end: torch.Tensor,
    query_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`unisono.kernels.causal_conv.causal_conv`."""
    p = PassRows(rows.long(), since.long(), first.long(), until.long(), end.long())
    begin, row_T = tokens_of_rows(p, query_start, len(u))
    taps = weight.shape[-1]
    back = torch.arange(1 - taps, 0)
    history = _earlier(snapshot, ring, p, p.first[:, None] + back)  # [R, J - 1, C]
    moved = torch.nonzero(p.until > p.since).flatten()
    at = p.until[moved, None] + back
    new = at - p.first[moved, None] + begin[moved, None]
    source = torch.cat((history.flatten(0, 1), u))  # what stands before a row's tokens, then all tokens
    fresh = source[(new + len(source) - len(u)).clamp(0, max(len(source) - 1, 0))]
    kept = torch.where((new >= begin[moved, None])[..., None], fresh, _earlier(snapshot, ring, p.of(moved), at))

    token = torch.nonzero(row_T >= 0).flatten()
    owner = row_T[token]
    acc = torch.zeros((len(token), u.shape[1]))
    for j in range(taps):
        step = token - begin[owner] - (taps - 1) + j
        index = torch.where(step >= 0, len(history) * (taps - 1) + token - (taps - 1) + j, 0)
        index = torch.where(step < 0, owner * (taps - 1) + step + taps - 1, index)
        acc = acc + source[index].float() * weight.view(-1, taps)[:, j].float()
    out = torch.zeros_like(u)
    out[token] = (acc / (1.0 + torch.exp(-acc))).to(u.dtype)

    position = p.first[owner] + token - begin[owner]
    latest = p.end[owner] - position <= ring.shape[1]
    ring[p.rows[owner[latest]], position[latest] % ring.shape[1]] = u[token[latest]]
    snapshot[p.rows[moved]] = kept
    return out, gates_cpu(ba, a_log, dt_bias)


def gates_cpu(ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """ba [T, 2 Hv]: b, then a, of each value head -> [T, 2, Hv] fp32: the log of the decay, then beta."""
    b, a = (half.contiguous() for half in ba.float().chunk(2, dim=1))
    x = a + dt_bias
    small = torch.exp(-x.abs())
    total = 1.0 + small
    rest = torch.where(total == 1.0, small, torch.log(total) * (small / torch.where(total == 1.0, 1.0, total - 1.0)))
    decay = -torch.exp(a_log) * (x.clamp_min(0) + rest)
    return torch.stack((decay, 1.0 / (1.0 + torch.exp(-b))), dim=1)


def _earlier(snapshot: torch.Tensor, ring: torch.Tensor, p: PassRows, at: torch.Tensor) -> torch.Tensor:
    """Raw inputs at positions ``at [R, J - 1]`` before the pass: [R, J - 1, C]."""
    rows, since = p.rows[:, None], p.since[:, None]
    place = (at - since + snapshot.shape[1]).clamp(0, snapshot.shape[1] - 1)
    return torch.where((at < since)[..., None], snapshot[rows, place], ring[rows, at % ring.shape[1]])
