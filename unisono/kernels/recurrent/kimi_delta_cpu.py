"""Rule of the CPU twin of ``kimi_delta``; ``gated_delta_cpu`` walks the chunks.

Shapes: H heads, K / V key / value sizes, N chunks of the pass, c = CHUNK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.kernels.recurrent.gated_delta_cpu import CHUNK, Rule, products_cpu, solved_cpu, unit_cpu


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


def kimi_delta_rule(inputs: tuple[torch.Tensor, ...]) -> Rule:
    """Compute the state-independent part of chunks, and return the rule of Kimi Delta Attention."""
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
    chunks = KimiChunks(k * from_begin, q * from_begin, k * to_end, v, solve, attend, from_begin[:, :, -1])

    def rule(n: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = KimiChunks(*(part.index_select(0, n) for part in chunks))
        new = products_cpu(c.solve, c.v - products_cpu(c.reads_k, s.mT))
        o = products_cpu(c.reads_q, s.mT) + products_cpu(c.attend, new)
        return o, s * c.whole[:, :, None] + products_cpu(new.mT, c.adds)

    return rule


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
