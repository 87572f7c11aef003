"""CPU twin of ``gated_delta``: the same grid of chunks and the same products, in fp32 and plain torch.

Called only through the op that kernels/gated_delta.py registers. Every product has the shape of one chunk of one head,
so a token's bits depend on its own chunk and the state before it alone. The twin may read values on the host, because
an op is opaque to the tape.

Shapes: T tokens, R rows, NR state rows, Hk / Hv key / value heads, K / V head sizes, N chunks of the pass, A rows that
have a chunk at one step, c = CHUNK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.kernels.pass_rows import PassRows, tokens_of_rows

CHUNK = 16
"""Tokens of a chunk. Chunks begin at multiples of it. It is part of the reduction order, hence of the bits."""

EPS = 1e-6
"""Added to the square of a query's or key's length."""


class Chunks(NamedTuple):
    """Everything of N chunks that does not depend on the state.

    q, k [N, Hk, c, K]: of length 1, q scaled, absent tokens zero. v [N, Hv, c, V]. solve, attend [N, Hv, c, c]: what
    makes the chunk's new values of their errors, and its outputs of the new values. decay [N, Hv, c]: the log of what
    is left of the state before the chunk after each token.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    solve: torch.Tensor
    attend: torch.Tensor
    decay: torch.Tensor


def gated_delta_cpu(
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
    """See :func:`unisono.kernels.gated_delta.gated_delta`."""
    p = PassRows(rows.long(), since.long(), first.long(), until.long(), end.long())
    begin, row_T = tokens_of_rows(p, query_start, len(qkv))
    value_heads, value_dim, key_dim = state.shape[1:]
    out = qkv.new_zeros((len(qkv) + 1, value_heads, value_dim))  # the spare row takes what is no token of the pass
    counts = torch.where(p.first >= 0, -((p.since - p.end) // CHUNK), 0)
    row_N = torch.repeat_interleave(torch.arange(len(p.rows)), counts)
    step_N = torch.arange(len(row_N)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    if len(row_N):
        position = (p.since[row_N] + step_N * CHUNK)[:, None] + torch.arange(CHUNK)  # [N, c]
        token = begin[row_N, None] + position - p.first[row_N, None]
        new = (position >= p.first[row_N, None]) & (position < p.end[row_N, None])
        token = torch.where(new, token, len(qkv))
        chunks = _chunks(qkv, gates, kv_ring, gates_ring, p.of(row_N), position, token, (value_heads, key_dim))
        _walk(chunks, state, p, counts, torch.where(new, token, len(qkv)), out)
    _remember(qkv, gates, kv_ring, gates_ring, p, begin, row_T)
    return out[:-1].flatten(1)


def _chunks(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    kv_ring: torch.Tensor,
    gates_ring: torch.Tensor,
    p: PassRows,
    position: torch.Tensor,
    token: torch.Tensor,
    sizes: tuple[int, int],
) -> Chunks:
    """The chunks of positions [N, c], which are tokens [N, c] of the pass or remembered; p: each chunk's row."""
    heads, dim = sizes
    ring, queries = kv_ring.shape[1], qkv.shape[1] - kv_ring.shape[2]
    key_heads = queries // dim
    old, absent = position < p.first[:, None], position >= p.end[:, None]
    place = p.rows[:, None] * ring + position % ring
    if not len(qkv):  # the pass only moves the state on
        qkv, gates = qkv.new_zeros((1, qkv.shape[1])), gates.new_zeros((1, *gates.shape[1:]))
    token = token.clamp_max(len(qkv) - 1)

    def gathered(pass_: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(old[..., None], memory.flatten(0, 1)[place], pass_[token])
        return chosen.masked_fill(absent[..., None], 0).float()

    q = qkv[:, :queries][token].masked_fill((old | absent)[..., None], 0).float()
    kv = gathered(qkv[:, queries:], kv_ring)
    both = gathered(gates.flatten(1), gates_ring.flatten(2))
    decay, beta = (half.transpose(1, 2).contiguous() for half in both.chunk(2, dim=2))  # [N, Hv, c]
    q = _unit(q.unflatten(2, (key_heads, dim)).transpose(1, 2)) * dim**-0.5
    k = _unit(kv[..., :queries].unflatten(2, (key_heads, dim)).transpose(1, 2))
    v = kv[..., queries:].unflatten(2, (heads, -1)).transpose(1, 2).contiguous()
    for i in range(1, CHUNK):
        decay[..., i] += decay[..., i - 1]
    solve, attend = _within(q, k, decay, beta)
    return Chunks(q, k, v, solve, attend, decay)


def _within(
    q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``solve`` and ``attend`` of :class:`Chunks`: (1 + A)^-1 diag(beta), and what tokens take of each other."""
    groups = decay.shape[1] // k.shape[1]
    order = torch.arange(CHUNK)
    kk, qk = (_products(x, k.mT).repeat_interleave(groups, 1) for x in (k, q))
    upto = order[:, None] >= order
    left = (decay[..., :, None] - decay[..., None, :]).masked_fill(~upto, 0).exp()
    below = (kk * left * beta[..., None]).masked_fill(order[:, None] <= order, 0)
    solve = torch.eye(CHUNK).expand_as(below).clone()
    for i in range(CHUNK - 1):
        solve = solve - below[..., :, i, None] * solve[..., i, None, :]
    return solve * beta[..., None, :], (qk * left).masked_fill(~upto, 0)


def _walk(
    chunks: Chunks, state: torch.Tensor, p: PassRows, counts: torch.Tensor, token: torch.Tensor, out: torch.Tensor
) -> None:
    """Go through each row's chunks: write the outputs of tokens [N, c], and the state after ``until`` tokens."""
    start = counts.cumsum(0) - counts
    groups = state.shape[1] // chunks.k.shape[1]
    s_AHVK = state[p.rows].float()
    for step in range(int(counts.max())):
        row = torch.nonzero(counts > step).flatten()
        n = start[row] + step
        q, k = (x[n].repeat_interleave(groups, 1) for x in (chunks.q, chunks.k))
        s, decay = s_AHVK[row], chunks.decay[n]
        left = decay.exp()[..., None]
        error = chunks.v[n] - _products(k, s.mT) * left
        new = _products(chunks.solve[n], error)
        o = _products(q, s.mT) * left + _products(chunks.attend[n], new)
        out[token[n].flatten()] = o.transpose(1, 2).flatten(0, 1).to(out.dtype)
        end = decay[..., -1, None]
        s = s * end.exp()[..., None] + _products((new * (end - decay).exp()[..., None]).mT, k)
        s_AHVK[row] = s
        reached = (p.since[row] + (step + 1) * CHUNK == p.until[row]) & (p.until[row] > p.since[row])
        state[p.rows[row[reached]]] = s[reached]


def _remember(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    kv_ring: torch.Tensor,
    gates_ring: torch.Tensor,
    p: PassRows,
    begin: torch.Tensor,
    row_T: torch.Tensor,
) -> None:
    """Write the inputs of the pass's latest tokens."""
    ring = kv_ring.shape[1]
    token = torch.nonzero(row_T >= 0).flatten()
    owner = row_T[token]
    position = p.first[owner] + token - begin[owner]
    latest = p.end[owner] - position <= ring
    token, place = token[latest], (p.rows[owner[latest]], position[latest] % ring)
    kv_ring[place] = qkv[token, qkv.shape[1] - kv_ring.shape[2] :]
    gates_ring[place] = gates[token]


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1."""
    x = x.contiguous()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x [N, H, m, n] @ y [N, H, n, l]``; two at least, for a BLAS may take another way for one product alone."""
    a, b = x.flatten(0, 1), y.flatten(0, 1)
    if len(a) == 1:
        a, b = a.expand(2, -1, -1), b.expand(2, -1, -1)
    return torch.bmm(a, b)[: x.shape[0] * x.shape[1]].view(*x.shape[:3], y.shape[3])
