"""CPU twins of recurrences over chunks, and the rule of ``gated_delta``: the kernels' grid of chunks and their
products, in fp32 and plain torch.

:func:`recurrence_cpu` walks each row's chunks by a :data:`Rule`. ``kimi_delta_cpu`` and ``mamba2_cpu`` have other
rules. Called by the ops of this folder. Every product has the shape of one chunk of one head, so a token's bits depend
on its own chunk and the state before it alone. A twin may read values on the host, because an op is opaque to the tape.

Shapes: T tokens, R rows, NR state rows, Hk / Hv key / value heads, K / V head sizes, N chunks of the pass, A rows that
have a chunk at one step, c = CHUNK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from unisono.kernels.speculation.pass_rows import PassRows, SharedPlan, tokens_of_rows

CHUNK = 16
"""Tokens of a chunk. Chunks begin at multiples of it. It is part of the reduction order, hence of the bits."""

EPS = 1e-6
"""Epsilon added to the square of a query's or key's length."""


class Chunks(NamedTuple):
    """State-independent part of N chunks.

    q, k [N, Hk, c, K]: normalised to length 1, q scaled, absent tokens zero. v [N, Hv, c, V]. solve, attend
    [N, Hv, c, c]: matrices from the values' errors to the new values, and from the new values to the outputs. decay
    [N, Hv, c]: log of the decay of the state before the chunk after each token.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    solve: torch.Tensor
    attend: torch.Tensor
    decay: torch.Tensor


Rule = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps chunks [A], one per row, and the states before them [A, Hv, V, K] to outputs [A, Hv, c, V] and the states after
them.
"""


class Step(NamedTuple):
    """One step of the walk, a chunk per row: rows [A], their chunks [A], and tokens [A · c] (T: none).

    reached: rows whose state is stored after this chunk; state_rows: their rows of the state.
    """

    row: torch.Tensor
    chunk: torch.Tensor
    token: torch.Tensor
    reached: torch.Tensor
    state_rows: torch.Tensor


class DeltaPlan(NamedTuple):
    """Indices that a pass reads and writes.

    rows [R]: rows of the state. token [N · c]: tokens at the chunks' positions (any value if there is none); ``old``
    ones are read from ``memory``, rows of a ring [NR · L]; only the last positions of a chunk may be ``absent``
    [N, c, 1]. place: places in the rings of the tokens ``latest``.
    """

    rows: torch.Tensor
    token: torch.Tensor
    old: torch.Tensor
    absent: torch.Tensor
    memory: torch.Tensor
    steps: tuple[Step, ...]
    place: tuple[torch.Tensor, torch.Tensor]
    latest: torch.Tensor


def _make_plan(p: PassRows, query_start: torch.Tensor | None, tokens: int, ring: int) -> DeltaPlan:
    begin, row_T = tokens_of_rows(p, query_start, tokens)
    counts = torch.where(p.first >= 0, -((p.since - p.end) // CHUNK), 0)
    start = counts.cumsum(0) - counts
    row_N = torch.repeat_interleave(torch.arange(len(p.rows)), counts)
    step_N = torch.arange(len(row_N)) - torch.repeat_interleave(start, counts)
    position = (p.since[row_N] + step_N * CHUNK)[:, None] + torch.arange(CHUNK)  # [N, c]
    old, absent = position < p.first[row_N, None], position >= p.end[row_N, None]
    token = torch.where(old | absent, tokens, begin[row_N, None] + position - p.first[row_N, None])
    steps = []
    for number in range(int(counts.max()) if len(row_N) else 0):
        row = torch.nonzero(counts > number).flatten()
        reached = (p.since[row] + (number + 1) * CHUNK == p.until[row]) & (p.until[row] > p.since[row])
        kept = reached.nonzero().flatten()
        chunk = start[row] + number
        steps.append(Step(row, chunk, token[chunk].flatten(), kept, p.rows[row[kept]]))

    written = torch.nonzero(row_T >= 0).flatten()
    owner = row_T[written]
    at = p.first[owner] + written - begin[owner]
    latest = p.end[owner] - at <= ring
    return DeltaPlan(
        p.rows, token.clamp_max(max(tokens - 1, 0)).flatten(), old[..., None], absent[..., None],
        (p.rows[row_N, None] * ring + position % ring).flatten(), tuple(steps),
        (p.rows[owner[latest]], at[latest] % ring), written[latest],
    )  # fmt: skip


plan_cpu = SharedPlan(_make_plan)


def recurrence_cpu(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor],
    of_pass: tuple[torch.Tensor, ...],
    query_start: torch.Tensor | None,
    rule_of: Callable[[tuple[torch.Tensor, ...]], Rule],
) -> torch.Tensor:
    """Apply a recurrence over each row's tokens: outputs [T, Hv V], zero for positions without a token.

    The state advances to ``until`` tokens, and the rings (keys and values, gates) store the pass's tokens. of_pass:
    rows, since, first, until, end. rule_of: maps the tensors of :func:`_gathered` to the rule.
    """
    value_heads, value_dim, key_dim = state.shape[1:]
    kv_ring, gates_ring = rings
    plan = plan_cpu(of_pass, query_start, len(qkv), kv_ring.shape[1])
    out = qkv.new_zeros((len(qkv) + 1, value_heads, value_dim))  # a spare row for positions without a token
    if plan.steps:
        rule = rule_of(_gathered(qkv, gates, kv_ring, gates_ring, plan, (value_heads, key_dim)))
        s_AHVK = state.index_select(0, plan.rows).float()
        for row, n, token, reached, state_rows in plan.steps:
            o, s = rule(n, s_AHVK.index_select(0, row))
            out[token] = o.transpose(1, 2).flatten(0, 1).to(out.dtype)
            s_AHVK.index_copy_(0, row, s)
            if len(reached):
                state[state_rows] = s.index_select(0, reached).to(state.dtype)
    kv_ring[plan.place] = qkv[:, qkv.shape[1] - kv_ring.shape[2] :].index_select(0, plan.latest)
    gates_ring[plan.place] = gates.index_select(0, plan.latest)
    return out[:-1].flatten(1)


def _gathered(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    kv_ring: torch.Tensor,
    gates_ring: torch.Tensor,
    plan: DeltaPlan,
    sizes: tuple[int, int],
) -> tuple[torch.Tensor, ...]:
    """Gather the chunks' inputs in fp32, absent tokens zero: q, k [N, Hk, c, K], v [N, Hv, c, V], gates [N, c, G].

    sizes: value heads, key size. G: elements of a token's gates.
    """
    heads, dim = sizes
    queries, shape = qkv.shape[1] - kv_ring.shape[2], plan.old.shape[:2]
    key_heads = queries // dim
    if not len(qkv):  # the pass only advances the state
        qkv, gates = qkv.new_zeros((1, qkv.shape[1])), gates.new_zeros((1, *gates.shape[1:]))

    def gathered(new: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        remembered = memory.view(-1, new.shape[-1]).index_select(0, plan.memory).view_as(new)
        return torch.where(plan.old, remembered, new).masked_fill_(plan.absent, 0).float()

    new = qkv.index_select(0, plan.token).view(*shape, -1)
    q = new[..., :queries].masked_fill(plan.old | plan.absent, 0).float()
    kv = gathered(new[..., queries:], kv_ring)
    both = gathered(gates.flatten(1).index_select(0, plan.token).view(*shape, -1), gates_ring)
    q = q.unflatten(2, (key_heads, dim)).transpose(1, 2)
    k = kv[..., :queries].unflatten(2, (key_heads, dim)).transpose(1, 2)
    v = kv[..., queries:].unflatten(2, (heads, -1)).transpose(1, 2).contiguous()
    return q, k, v, both


def by_head_cpu(gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split gates [N, c, 2 Hv] into both, by head [N, Hv, c]."""
    first, second = (half.transpose(1, 2).contiguous() for half in gates.chunk(2, dim=2))
    return first, second


def _within(
    q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``solve`` and ``attend`` of :class:`Chunks`: (1 + A)^-1 diag(beta), and the weights among tokens."""
    groups = decay.shape[1] // k.shape[1]
    order = torch.arange(CHUNK)
    kk, qk = (products_cpu(x, k.mT).repeat_interleave(groups, 1) for x in (k, q))
    left, upto = left_cpu(decay), order[:, None] >= order
    below = (kk * left * beta[..., None]).masked_fill(order[:, None] <= order, 0)
    return solved_cpu(below, beta), (qk * left).masked_fill(~upto, 0)


def solved_cpu(below: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Compute (1 + below)^-1 diag(beta) for below [N, Hv, c, c], lower triangular without its diagonal."""
    solve = torch.eye(CHUNK).expand_as(below).clone()
    for i in range(CHUNK - 1):
        solve = solve - below.narrow(3, i, 1) * solve.narrow(2, i, 1)
    return solve * beta[..., None, :]


def left_cpu(decay: torch.Tensor) -> torch.Tensor:
    """Compute what is left after token i of what token j <= i adds [N, Hv, c, c]; 1 for j > i. decay: cumulative."""
    order = torch.arange(CHUNK)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(order[:, None] < order, 0).exp()


def gated_delta_rule(inputs: tuple[torch.Tensor, ...]) -> Rule:
    """Compute the state-independent part of chunks, and return the gated delta rule."""
    q, k, v, both = inputs
    decay, beta = by_head_cpu(both)
    groups = v.shape[1] // k.shape[1]
    q, k = unit_cpu(q) * k.shape[3] ** -0.5, unit_cpu(k)
    decay = decay.cumsum(2)
    chunks = Chunks(q, k, v, *_within(q, k, decay, beta), decay)

    def rule(n: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (x.index_select(0, n).repeat_interleave(groups, 1) for x in (chunks.q, chunks.k))
        decay = chunks.decay.index_select(0, n)
        left = decay.exp()[..., None]
        error = chunks.v.index_select(0, n) - products_cpu(k, s.mT) * left
        new = products_cpu(chunks.solve.index_select(0, n), error)
        o = products_cpu(q, s.mT) * left + products_cpu(chunks.attend.index_select(0, n), new)
        end = decay[..., -1, None]
        return o, s * end.exp()[..., None] + products_cpu((new * (end - decay).exp()[..., None]).mT, k)

    return rule


def unit_cpu(x: torch.Tensor) -> torch.Tensor:
    """Normalise vectors to length 1."""
    x = x.contiguous()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def products_cpu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``x [N, H, m, n] @ y [N, H, n, l]``, at least two products: a BLAS may compute a single one
    differently.
    """
    a, b = x.flatten(0, 1), y.flatten(0, 1)
    if len(a) == 1:
        a, b = a.expand(2, -1, -1), b.expand(2, -1, -1)
    return torch.bmm(a, b)[: x.shape[0] * x.shape[1]].view(*x.shape[:3], y.shape[3])
