"""The gated delta rule. Owns the ``gated_delta`` op; called by ``models``."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.kernels.gated_delta_cpu import gated_delta_cpu
from unisono.kernels.library import define, register


def launch_gated_delta(*args: object) -> Tensor:
    raise NotImplementedError


def _gated_delta_meta(qkv: Tensor, gates: Tensor, state: Tensor, *_: object) -> Tensor:
    return qkv.new_empty((qkv.shape[0], state.shape[1] * state.shape[2]))


define(
    "gated_delta(Tensor qkv, Tensor gates, Tensor(a!) state, Tensor(b!) kv_ring, Tensor(c!) gates_ring, Tensor rows,"
    " Tensor since, Tensor first, Tensor until, Tensor end, Tensor? query_start) -> Tensor"
)
register("gated_delta", cuda=launch_gated_delta, cpu=gated_delta_cpu, meta=_gated_delta_meta)


def gated_delta(
    qkv: Tensor, gates: Tensor, state: Tensor, kv_ring: Tensor, gates_ring: Tensor, rows: Tensor, since: Tensor,
    first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gated delta rule over each row's tokens (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

    For each value head, with its key head's q and k at length 1 (q times K ** -0.5)::

        S <- S exp(g_t);  S <- S + (v_t - S k_t) beta_t k_t^T;  o_t = S q_t

    qkv [T, Hk K + Hk K + Hv V]: queries, keys, values after the convolution. gates [T, 2, Hv] fp32: g, then beta.
    state [NR, Hv, V, K] fp32: S after ``since`` tokens. kv_ring [NR, positions, Hk K + Hv V], gates_ring [NR,
    positions, 2, Hv]: what the tokens since had; that of position p at p % positions. rows … end [R], query_start
    [R + 1] or None in a round: see :class:`unisono.state.tails.TailPass`. Value heads h r … h r + r - 1 share key head
    h, with r = Hv / Hk. Returns o [T, Hv V] in qkv's dtype, zero for padding tokens; the state moves on to ``until``
    tokens, and the rings remember the pass's tokens.

    Tokens are computed in chunks of 16 at absolute positions, the open chunk from its remembered inputs in every pass.
    So a token's bits do not depend on the passes that a text was cut into.
    """
    return torch.ops.unisono.gated_delta(
        qkv, gates, state, kv_ring, gates_ring, rows, since, first, until, end, query_start
    )
