"""Short causal convolution of a Kimi Delta Attention layer, and its gates. Owns the ``kimi_conv`` op.

The kernels are those of ``kernels/recurrent/causal_conv.py``, with a decay for each channel of a key in place of one
for each head. Every result is computed elementwise, so a token's bits depend on its own inputs alone.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, H heads, K channels of a head's key, RING remembered
positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.recurrent.causal_conv import conv_cases, launch_conv
from unisono.kernels.recurrent.causal_conv_cpu import convolved_cpu, softplus_cpu


def launch_kimi_conv(
    u: Tensor, weight: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, snapshot: Tensor, ring: Tensor,
    rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`kimi_conv`."""
    f, b = (each if each.stride(1) == 1 else each.contiguous() for each in (f, b))
    gates = u.new_empty((u.shape[0], f.shape[1] + b.shape[1]), dtype=torch.float32)
    where = rows, since, first, until, end
    return launch_conv(u, weight, (f, b, a_log, dt_bias, gates), (snapshot, ring), where, query_start), gates


def _kimi_conv_meta(u: Tensor, f: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty((u.shape[0], f.shape[1] + b.shape[1]), dtype=torch.float32)


@op(cuda=launch_kimi_conv, meta=_kimi_conv_meta)
def kimi_conv(
    u: Tensor, weight: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, snapshot: Mutated[Tensor],
    ring: Mutated[Tensor], rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor,
    query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute SiLU of a depthwise causal convolution over each row's tokens, and the gates of each head.

    f [T, H K]: inputs of the decays; b [T, H]: inputs of beta; rows of any stride. a_log [H], dt_bias [H K] fp32. Other
    arguments: see :func:`unisono.kernels.recurrent.causal_conv.causal_conv`.

    Returns (SiLU(conv) [T, C] in u's dtype, gates [T, H (K + 1)] fp32: the log of each channel's decay
    ``-exp(a_log) * softplus(f + dt_bias)``, then ``beta = sigmoid(b)`` of each head). Padding tokens are zero in the
    first one.
    """
    token, acc = convolved_cpu(u, weight, snapshot, ring, (rows, since, first, until, end), query_start)
    out = torch.zeros_like(u).index_copy_(0, token, (acc / (1.0 + torch.exp(-acc))).to(u.dtype))
    rate = -torch.exp(a_log).repeat_interleave(f.shape[1] // b.shape[1])
    decay = rate * softplus_cpu(f.float().contiguous() + dt_bias)
    return out, torch.cat((decay, 1.0 / (1.0 + torch.exp(-b.float().contiguous()))), dim=1)


AOT: list[AotCase] = [
    case
    for dtype, heads, key_dim, width in (("bf16", 32, 128, 1), ("bf16", 32, 128, 4), ("fp32", 4, 32, 2))
    for case in conv_cases(dtype, heads, width, key_dim)
]
