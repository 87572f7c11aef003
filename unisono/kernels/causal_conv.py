"""The short causal convolution of a recurrent layer, and its gates. Owns the ``causal_conv`` op; called by ``models``.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, Hv value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.kernels.causal_conv_cpu import causal_conv_cpu
from unisono.kernels.library import define, register


def launch_causal_conv(*args: object) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def _causal_conv_meta(u: Tensor, weight: Tensor, ba: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty((u.shape[0], 2, ba.shape[1] // 2), dtype=torch.float32)


define(
    "causal_conv(Tensor u, Tensor weight, Tensor ba, Tensor a_log, Tensor dt_bias, Tensor(a!) snapshot,"
    " Tensor(b!) ring, Tensor rows, Tensor since, Tensor first, Tensor until, Tensor end, Tensor? query_start)"
    " -> (Tensor, Tensor)"
)
register("causal_conv", cuda=launch_causal_conv, cpu=causal_conv_cpu, meta=_causal_conv_meta)


def causal_conv(
    u: Tensor, weight: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, snapshot: Tensor, ring: Tensor,
    rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """SiLU of a depthwise causal convolution over each row's tokens, and the gates of each value head.

    u [T, C]: raw inputs of the pass's tokens, rows of any stride. weight [C, 1, J]: the last tap is the token's own.
    ba [T, 2 Hv]: b, then a. a_log, dt_bias [Hv] fp32. snapshot [NR, J - 1, C], ring [NR, positions, C]: raw inputs
    before ``since`` tokens and since, of which the last J - 1 and more are remembered; both are brought up to date.
    rows … end [R], query_start [R + 1] or None in a round: see :class:`unisono.state.tails.TailPass`.

    Returns (SiLU(conv) [T, C] in u's dtype, gates [T, 2, Hv] fp32: the log of the decay
    ``-exp(a_log) * softplus(a + dt_bias)``, then ``beta = sigmoid(b)``). Padding tokens are zero in the first one.
    Inputs before position 0 are zero. Taps are added in order in fp32, with one rounding at the end.
    """
    return torch.ops.unisono.causal_conv(
        u, weight, ba, a_log, dt_bias, snapshot, ring, rows, since, first, until, end, query_start
    )
