"""CPU twin of ``mamba2``: the grid of chunks of the gated delta rule and its products, in fp32 and plain torch.

Called only through the op of ``kernels/recurrent/mamba2.py``. Every product has the shape of one chunk of one head, so
a token's bits depend on its own chunk and the state before it alone.

Shapes: T tokens, NR state rows, G groups, H heads, N state size, P head size, M chunks of the pass, c = CHUNK.
"""

from __future__ import annotations

import torch

from unisono.kernels.recurrent.gated_delta_cpu import (
    CHUNK,
    DeltaPlan,
    by_head_cpu,
    gathered_cpu,
    left_cpu,
    plan_cpu,
    products_cpu,
)


def mamba2_cpu(
    cbx: torch.Tensor,
    gates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    bx_ring: torch.Tensor,
    gates_ring: torch.Tensor,
    rows: torch.Tensor,
    since: torch.Tensor,
    first: torch.Tensor,
    until: torch.Tensor,
    end: torch.Tensor,
    query_start: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`unisono.kernels.recurrent.mamba2.mamba2`."""
    heads, size, state_size = state.shape[1:]
    plan = plan_cpu((rows, since, first, until, end), query_start, len(cbx), bx_ring.shape[1])
    out = cbx.new_zeros((len(cbx) + 1, heads, size))  # a spare row for positions without a token
    if plan.steps:
        inputs = gathered_cpu(cbx, gates, bx_ring, gates_ring, plan, (heads, state_size))
        _walk(inputs, skip[:, None, None], state, plan, out)
    bx_ring[plan.place] = cbx[:, cbx.shape[1] - bx_ring.shape[2] :].index_select(0, plan.latest)
    gates_ring[plan.place] = gates.index_select(0, plan.latest)
    return out[:-1].flatten(1)


def _walk(
    inputs: tuple[torch.Tensor, ...], skip: torch.Tensor, state: torch.Tensor, plan: DeltaPlan, out: torch.Tensor
) -> None:
    """Walk each row's chunks: write the outputs of tokens, and the state after ``until`` tokens."""
    c, b, x, both = inputs
    decay, step = by_head_cpu(both)
    groups = state.shape[1] // b.shape[1]
    decay, order = decay.cumsum(2), torch.arange(CHUNK)
    weights = products_cpu(c, b.mT).repeat_interleave(groups, 1) * left_cpu(decay)
    weights = weights.masked_fill(order[:, None] < order, 0)
    new, left, end = x * step[..., None], decay.exp()[..., None], decay[..., -1, None]
    within, skipped, taken = products_cpu(weights, new), x * skip, new * (end - decay).exp()[..., None]
    s_AHPN = state.index_select(0, plan.rows).float()
    for row, n, token, reached, state_rows in plan.steps:
        each_c, each_b = (part.index_select(0, n).repeat_interleave(groups, 1) for part in (c, b))
        s = s_AHPN.index_select(0, row)
        o = products_cpu(each_c, s.mT) * left.index_select(0, n) + within.index_select(0, n)
        o = o + skipped.index_select(0, n)
        out[token] = o.transpose(1, 2).flatten(0, 1).to(out.dtype)
        kept = end.index_select(0, n).exp()[..., None]
        s = s * kept + products_cpu(taken.index_select(0, n).mT, each_b)
        s_AHPN.index_copy_(0, row, s)
        if len(reached):
            state[state_rows] = s.index_select(0, reached).to(state.dtype)
