"""CPU twin of ``kimi_delta``: the grid of chunks of the gated delta rule and its products, in fp32 and plain torch.

Called only through the op of ``kernels/recurrent/kimi_delta.py``. Every product has the shape of one chunk of one head,
so a token's bits depend on its own chunk and the state before it alone.

Shapes: T tokens, NR state rows, H heads, K / V key / value sizes, N chunks of the pass, c = CHUNK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.kernels.recurrent.gated_delta_cpu import (
    CHUNK,
    DeltaPlan,
    gathered_cpu,
    plan_cpu,
    products_cpu,
    solved_cpu,
    unit_cpu,
)


class KimiChunks(NamedTuple):
    """State-independent part of N chunks.

    reads_k, reads_q, adds [N, H, c, K]: keys and queries times the decay from the chunk's begin, and keys times the
    decay to its end. v [N, H, c, V]. solve, attend [N, H, c, c]: matrices from the values' errors to the new values,
    and from the new values to the outputs. whole [N, H, K]: decay of the state in the whole chunk.
    """

    reads_k: torch.Tensor
    reads_q: torch.Tensor
    adds: torch.Tensor
    v: torch.Tensor
    solve: torch.Tensor
    attend: torch.Tensor
    whole: torch.Tensor


def kimi_delta_cpu(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    kv_ring: torch.Tensor,
    gates_ring: torch.Tensor,
    rows: torch.Tensor,
    since: torch.Tensor,
    first: torch.Tensor,
    until: torch.Tensor,
    end: torch.Tensor,
    query_start: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`unisono.kernels.recurrent.kimi_delta.kimi_delta`."""
    heads, value_dim, key_dim = state.shape[1:]
    plan = plan_cpu((rows, since, first, until, end), query_start, len(qkv), kv_ring.shape[1])
    out = qkv.new_zeros((len(qkv) + 1, heads, value_dim))  # a spare row for positions without a token
    if plan.steps:
        inputs = gathered_cpu(qkv, gates, kv_ring, gates_ring, plan, (heads, key_dim))
        _walk(_chunks(inputs), state, plan, out)
    kv_ring[plan.place] = qkv[:, qkv.shape[1] - kv_ring.shape[2] :].index_select(0, plan.latest)
    gates_ring[plan.place] = gates.index_select(0, plan.latest)
    return out[:-1].flatten(1)


def _chunks(inputs: tuple[torch.Tensor, ...]) -> KimiChunks:
    """Compute the chunks of a pass from :func:`gathered_cpu`'s tensors."""
    q, k, v, both = inputs
    heads, size = k.shape[1], k.shape[3]
    decay = both[..., : heads * size].unflatten(2, (heads, size)).transpose(1, 2).contiguous()  # [N, H, c, K]
    beta = both[..., heads * size :].transpose(1, 2).contiguous()  # [N, H, c]
    q, k, decay = unit_cpu(q) * size**-0.5, unit_cpu(k), decay.exp()
    below, attend, from_begin = _weights(q, k, decay)
    to_end, left = torch.empty_like(k), torch.ones_like(k[:, :, 0])
    for j in reversed(range(CHUNK)):
        to_end[:, :, j] = left
        left = left * decay[:, :, j]
    solve = solved_cpu(below * beta[..., None], beta)
    return KimiChunks(k * from_begin, q * from_begin, k * to_end, v, solve, attend, from_begin[:, :, -1])


def _weights(q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the products of keys i with keys j < i, and of queries i with keys j <= i, [N, H, c, c], and the decays
    from the chunk's begin [N, H, c, K].

    Each channel of a product decays from j to i, by the product of the decays between them: at most 1, never divided.
    """
    below = k.new_zeros(*k.shape[:3], CHUNK)
    attend, left = torch.zeros_like(below), torch.ones_like(k)
    for j in reversed(range(CHUNK)):
        key = left[:, :, j:] * k[:, :, j, None]
        below[:, :, j + 1 :, j] = (k[:, :, j + 1 :] * key[:, :, 1:]).sum(-1)
        attend[:, :, j:, j] = (q[:, :, j:] * key).sum(-1)
        left[:, :, j:] *= decay[:, :, j, None]
    return below, attend, left


def _walk(chunks: KimiChunks, state: torch.Tensor, plan: DeltaPlan, out: torch.Tensor) -> None:
    """Walk each row's chunks: write the outputs of tokens, and the state after ``until`` tokens."""
    s_AHVK = state.index_select(0, plan.rows).float()
    for row, n, token, reached, state_rows in plan.steps:
        c = KimiChunks(*(part.index_select(0, n) for part in chunks))
        s = s_AHVK.index_select(0, row)
        new = products_cpu(c.solve, c.v - products_cpu(c.reads_k, s.mT))
        o = products_cpu(c.reads_q, s.mT) + products_cpu(c.attend, new)
        out[token] = o.transpose(1, 2).flatten(0, 1).to(out.dtype)
        s = s * c.whole[:, :, None] + products_cpu(new.mT, c.adds)
        s_AHVK.index_copy_(0, row, s)
        if len(reached):
            state[state_rows] = s.index_select(0, reached).to(state.dtype)
