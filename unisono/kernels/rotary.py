"""Between the QKV projection and attention: head norms, rotary positions, and the KV cache's one writer.

Owns the ``rope_and_cache`` op. One program takes one head of one token; everything it reads is that
head, so bits do not depend on the batch. Called by the attention block of a decoder.

Shapes: T tokens, Hq query heads, Hkv key/value heads, D head dimension, NP pages of P tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, register
from unisono.kernels.norm import rms_norm_cpu


@triton.jit
def _rotated_head(x, norm, eps, cos_sin, D, HALF, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr):
    """One head, normalised and rotated, in fp32. ``cos_sin`` points at the token's row of the table."""
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    rotates = d < 2 * HALF
    first = d < HALF
    # The other coordinate of d's plane: d and d + HALF rotate together.
    pair = tl.where(first, d + HALF, tl.where(rotates, d - HALF, d))
    dtype = x.dtype.element_ty
    value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
        w_value = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        w_other = tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)
        # The same roundings as rms_norm's.
        value = ((value * scale).to(dtype).to(tl.float32) * w_value).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * w_other).to(dtype).to(tl.float32)
    plane = tl.where(first, d, d - HALF)
    cos = tl.load(cos_sin + plane, mask=rotates, other=1.0)
    sin = tl.load(cos_sin + HALF + plane, mask=rotates, other=0.0)
    turned = value * cos + tl.where(first, -other, other) * sin
    return tl.where(rotates, turned, value)


@triton.jit
def _rope_and_cache_kernel(qkv, q_norm, k_norm, eps, cos_sin, positions, kv_slots, q_out, k_cache, v_cache,
                           HQ, HKV, D, HALF, PAGE,
                           BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    x = qkv + (token * (HQ + 2 * HKV) + head) * D
    angles = cos_sin + tl.maximum(tl.load(positions + token), 0).to(tl.int64) * 2 * HALF
    if head < HQ:
        y = _rotated_head(x, q_norm, eps, angles, D, HALF, BLOCK_D, HAS_NORM)
        tl.store(q_out + (token * HQ + head) * D + d, y.to(q_out.dtype.element_ty), mask=d < D)
    else:
        slot = tl.load(kv_slots + token).to(tl.int64)
        kv_head = (head - HQ) % HKV
        cached = ((slot // PAGE * HKV + kv_head) * PAGE + slot % PAGE) * D + d
        if head < HQ + HKV:
            y = _rotated_head(x, k_norm, eps, angles, D, HALF, BLOCK_D, HAS_NORM)
            tl.store(k_cache + cached, y.to(k_cache.dtype.element_ty), mask=d < D)
        else:
            tl.store(v_cache + cached, tl.load(x + d, mask=d < D), mask=d < D)


def launch_rope_and_cache(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    qkv = qkv.contiguous()
    tokens, heads = qkv.shape[0], num_heads + 2 * num_kv_heads
    head_dim = qkv.shape[1] // heads
    q = qkv.new_empty(tokens, num_heads, head_dim)
    _rope_and_cache_kernel[(tokens, heads)](
        qkv, q_norm, k_norm, eps, cos_sin, positions, kv_slots, q, k_cache, v_cache,
        num_heads, num_kv_heads, head_dim, cos_sin.shape[1] // 2, k_cache.shape[2],
        BLOCK_D=triton.next_power_of_2(head_dim), HAS_NORM=q_norm is not None, num_warps=1,
    )  # fmt: skip
    return q


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos_sin [T, rot_dim]; dimensions past rot_dim pass."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def rope_and_cache_cpu(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = cos_sin[positions.clamp(min=0)]
    page = k_cache.shape[2]
    pages, offsets = kv_slots // page, kv_slots % page
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_cpu(q, q_norm, eps), rms_norm_cpu(k, k_norm, eps)
    k_cache[pages, :, offsets] = _rotated(k, angles)
    v_cache[pages, :, offsets] = v
    return _rotated(q, angles)


def _rope_and_cache_meta(
    qkv, q_norm, k_norm, eps, cos_sin, positions, kv_slots, k_cache, v_cache, num_heads, num_kv_heads
):
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return qkv.new_empty(qkv.shape[0], num_heads, head_dim)


define(
    "rope_and_cache(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos_sin, "
    "Tensor positions, Tensor kv_slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "int num_heads, int num_kv_heads) -> Tensor"
)
register("rope_and_cache", cuda=launch_rope_and_cache, cpu=rope_and_cache_cpu, meta=_rope_and_cache_meta)


def rope_and_cache(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Norm and rotate the query and key heads, write keys and values to the cache, return the queries.

    qkv [T, (Hq + 2 Hkv) D]: query, key and value heads of each token, one after the other.
    q_norm, k_norm [D]: per-head RMSNorm weights (Qwen3); both or neither. eps: theirs.
    cos_sin [max_positions, rot_dim] fp32: ``rot_dim / 2`` cosines, then as many sines. The first rot_dim
    dimensions of a head rotate in the NeoX order (d with d + rot_dim / 2; Su et al., arXiv 2104.09864),
    in fp32 with one rounding at the end; the others pass unchanged.
    positions [T] i32: absolute; -1 marks a padding token, which rotates as position 0.
    kv_slots [T] i32: flat cache slot, ``page * P + offset``; padding tokens point into page 0.
    k_cache, v_cache [NP, Hkv, P, D]: contiguous, written in place.

    Returns q [T, Hq, D] in qkv's dtype.
    """
    return torch.ops.unisono.rope_and_cache(
        qkv, q_norm, k_norm, eps, cos_sin, positions, kv_slots, k_cache, v_cache, num_heads, num_kv_heads
    )


_SIZES = {name: "i32" for name in ("HQ", "HKV", "D", "HALF", "PAGE")}


def _aot_rope(dtype: str, block: int, norm: bool) -> AotCase:
    tensors = ("qkv", "q_norm", "k_norm", "q_out", "k_cache", "v_cache")
    return AotCase(
        _rope_and_cache_kernel,
        {
            **{name: f"*{dtype}" for name in tensors},
            **{"eps": "fp32", "cos_sin": "*fp32", "positions": "*i32", "kv_slots": "*i32"},
            **_SIZES,
        },
        {"BLOCK_D": block, "HAS_NORM": norm},
        num_warps=1,
    )


AOT: list[AotCase] = [
    _aot_rope("bf16", 128, True),
    _aot_rope("bf16", 128, False),
    _aot_rope("bf16", 64, True),
    _aot_rope("bf16", 256, False),
    _aot_rope("fp16", 128, True),
    _aot_rope("fp32", 32, True),
]
