"""RMSNorm over all query heads together and all key heads together, also where ranks hold parts of the heads."""

from __future__ import annotations

import torch

from unisono.distributed.gather import Ranks
from unisono.kernels.norm.joint_norm import norm_joint_heads


def normed_jointly(
    qkv: torch.Tensor, heads: tuple[int, int, int], norms: tuple[torch.Tensor | None, torch.Tensor | None], eps: float,
    ranks: Ranks,
) -> torch.Tensor:  # fmt: skip
    """Norm the queries and the keys in qkv [T, (Hq + 2 Hkv) · D]; the values stay. May overwrite qkv.

    heads: (Hq, Hkv, D) of this rank. norms: weights [all Hq · D] and [all Hkv · D], whole on each rank. Ranks gather
    their queries and keys, so that every rank norms whole rows: the bits are those of one rank.
    """
    q_norm, k_norm = norms
    assert q_norm is not None
    assert k_norm is not None
    if ranks.count == 1:
        norm_joint_heads(qkv, q_norm, k_norm, eps)
        return qkv
    queries, keys, size = heads
    own, values = qkv.split(((queries + keys) * size, keys * size), dim=1)
    each = ranks.gather(own.contiguous()).view(len(qkv), ranks.count, -1)
    q, k = each.split((queries * size, keys * size), dim=2)
    copies = ranks.count * keys * size // len(k_norm)  # ranks that hold the same key heads
    whole = torch.cat((q.flatten(1), k[:, ::copies].flatten(1)), dim=1)
    norm_joint_heads(whole, q_norm, k_norm, eps)
    first, key = ranks.index * queries * size, len(q_norm) + ranks.index // copies * keys * size
    return torch.cat((whole[:, first : first + queries * size], whole[:, key : key + keys * size], values), dim=1)
