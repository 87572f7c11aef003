"""CPU implementation of the op in ``kernels/cache/rotary.py``. Query and key heads are normed and rotated together.

Shapes: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import functools

import torch

from unisono.kernels.cache.kv_e4m3 import quantised
from unisono.kernels.library import Mutated
from unisono.kernels.norm.rms_norm import rms_norm


def rope_and_cache_cpu(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: Mutated[torch.Tensor],
    v_cache: Mutated[torch.Tensor],
    num_heads: int,
    num_kv_heads: int,
    k_scales: Mutated[torch.Tensor | None] = None,
    v_scales: Mutated[torch.Tensor | None] = None,
    v_norm: bool = False,
    k_is_v: bool = False,
) -> torch.Tensor:
    """Norm and rotate the query and key heads, write keys and values to the cache, return the queries.

    qkv [T, (Hq + 2 Hkv) D]: query, key and value heads of each token, one after the other; or [T, (2 Hq + 2 Hkv) D],
    where each query head is followed by a gate, which ``sigmoid_gate`` reads; or with ``k_is_v`` [T, (Hq + Hkv) D]:
    values are the key heads before norm and rotation.
    q_norm, k_norm [D]: per-head RMSNorm weights (Qwen3); both or neither, of one dtype, as in ``rms_norm``.
    eps: of all norms. v_norm: norm value heads as well, without a weight (Gemma 4).
    cos_sin [max_positions, rot_dim] fp32: ``rot_dim / 2`` cosines, then as many sines. The first rot_dim
    dimensions of a head rotate in the NeoX order (d with d + rot_dim / 2; Su et al., arXiv 2104.09864),
    in fp32 with one rounding at the end; the others pass unchanged.
    positions [T] i32: absolute; -1 marks a padding token, which rotates as position 0.
    slot_mapping [T] i32: flat cache slot, ``page * P + offset``; padding tokens point into page 0.
    k_cache, v_cache [NP, Hkv, P, D]: contiguous, of qkv's dtype, written in place. Or both of e4m3, with the biased
    exponents of their rows' scales in k_scales, v_scales [NP, Hkv, P, 1] uint8 (``kv_e4m3.py``); rows are rounded
    to qkv's dtype before they are quantised. With num_kv_heads 0 (queries of other keys) qkv holds query heads only and
    nothing is written.

    Returns q [T, Hq, D] in qkv's dtype.
    """
    tokens, dim, both = qkv.shape[0], k_cache.shape[3], num_heads + num_kv_heads
    heads = qkv.reshape(tokens, -1, dim)
    if heads.shape[1] == 2 * both and not k_is_v:  # a gate follows each query head
        queries = 2 * num_heads
        x = torch.cat((heads[:, 0:queries:2], heads[:, queries : queries + num_kv_heads]), 1)
    else:
        x = heads[:, :both]
    if q_norm is not None and k_norm is not None:
        x = rms_norm.cpu(x, torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1))), eps)
    x = _rotated(x, cos_sin.index_select(0, positions.clamp(min=0)))
    if num_kv_heads:
        values = heads[:, -num_kv_heads:]
        if v_norm:
            values = rms_norm.cpu(values, values.new_ones(dim, dtype=torch.float32), eps)
        at = _rows(slot_mapping, num_kv_heads, k_cache.shape[2])
        for new, cache, scales in ((x[:, num_heads:], k_cache, k_scales), (values, v_cache, v_scales)):
            if scales is not None:
                new, exponents = quantised(new)
                scales.view(-1, 1).index_copy_(0, at, exponents.view(-1, 1))
                new, cache = new.view(torch.uint8), cache.view(torch.uint8)
            cache.view(-1, dim).index_copy_(0, at, new.reshape(-1, dim))
    return x[:, :num_heads].contiguous()


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] by the angles of cos_sin [T, rot_dim] in fp32; dimensions past rot_dim pass."""
    tokens, heads, dim = x.shape
    rotating = cos_sin.shape[1]
    cos, sin = cos_sin.view(tokens, 1, 2, rotating // 2).unbind(2)
    halves = x[..., :rotating].float().view(tokens, heads, 2, rotating // 2)
    first, second = halves.unbind(2)
    out = halves * cos[:, :, None]
    out.select(2, 0).sub_(second * sin)
    out.select(2, 1).add_(first * sin)
    rotated = out.view(tokens, heads, rotating).to(x.dtype)
    return rotated if rotating == dim else torch.cat((rotated, x[..., rotating:]), -1)


def _rows(slot_mapping: torch.Tensor, heads: int, page: int) -> torch.Tensor:
    """Rows of the tokens' heads [T · H] in a cache [NP, H, P, D] viewed as [NP · H · P, D]."""
    slots = slot_mapping.long()
    first = slots if heads == 1 else slots.floor_divide(page).mul_((heads - 1) * page).add_(slots)
    return (first[:, None] + _head_offsets(heads, page)).view(-1)


@functools.cache
def _head_offsets(heads: int, page: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(heads) * page
