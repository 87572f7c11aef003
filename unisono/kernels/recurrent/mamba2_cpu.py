"""Rule of the CPU twin of ``mamba2``; ``gated_delta_cpu`` walks the chunks.

Shapes: G groups, H heads, N state size, P head size, M chunks of the pass, c = CHUNK.
"""

from __future__ import annotations

import torch

from unisono.kernels.recurrent.gated_delta_cpu import CHUNK, Rule, by_head_cpu, left_cpu, products_cpu


def mamba2_rule(inputs: tuple[torch.Tensor, ...], skip: torch.Tensor) -> Rule:
    """Compute the state-independent part of chunks, and return the rule of Mamba2. skip [H] fp32."""
    c, b, x, both = inputs
    decay, step = by_head_cpu(both)
    groups = x.shape[1] // b.shape[1]
    decay, order = decay.cumsum(2), torch.arange(CHUNK)
    weights = products_cpu(c, b.mT).repeat_interleave(groups, 1) * left_cpu(decay)
    weights = weights.masked_fill(order[:, None] < order, 0)
    new, left, end = x * step[..., None], decay.exp()[..., None], decay[..., -1, None]
    within, skipped, taken = products_cpu(weights, new), x * skip[:, None, None], new * (end - decay).exp()[..., None]

    def rule(n: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        each_c, each_b = (part.index_select(0, n).repeat_interleave(groups, 1) for part in (c, b))
        o = products_cpu(each_c, s.mT) * left.index_select(0, n) + within.index_select(0, n)
        kept = end.index_select(0, n).exp()[..., None]
        after = s * kept + products_cpu(taken.index_select(0, n).mT, each_b)
        return o + skipped.index_select(0, n), after

    return rule
