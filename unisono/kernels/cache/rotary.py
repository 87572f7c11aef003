"""Head norms, rotary positions and the write to the KV cache, between the QKV projection and attention.

Owns the ``rope_and_cache`` op. One program takes a few heads of one token and reduces each head on
its own, so bits do not depend on the batch. Called by the attention block of a decoder.

Shapes: T tokens, Hq query heads, Hkv key/value heads, D head dimension, NP pages of P tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.cache.kv_e4m3 import as_e4m3, exponent_of, largest_bits, quantised
from unisono.kernels.cache.rotary_cpu import rope_and_cache_cpu
from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import rms_norm_formula, rounded_before_weight, square
from unisono.kernels.overlap import follow, overlapped, overlapping

AT_ONCE = tl.constexpr(4)
"""Elements that a thread loads or stores at once, for all dtypes: another number for one dtype would change the layout
of all tiles, and with it the order of the norms' sums. See :func:`_warps`."""


@overlapping(leads=True)
@triton.jit
def _rope_and_cache_kernel(qkv, q_norm, k_norm, eps, cos_sin, positions, slot_mapping, q_out, k_cache, v_cache,
                           k_scales, v_scales, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
                           GATED: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
                           BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HAS_NORM: tl.constexpr,
                           V_NORM: tl.constexpr, K_IS_V: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    # A program's heads are all queries, all keys or all values; the last of a kind may have room for more heads. A
    # head is four runs of dimensions: ``first`` and ``second`` rotate together, element by element; ``third`` and
    # ``fourth`` do not rotate (absent if BLOCK_REST is 0). No sum of a product is left to the compiler, which fuses one
    # of two products and chooses it anew for each number of heads. With scales the caches are e4m3 (kv_e4m3.py).
    # V_NORM: values are normed, without a weight. K_IS_V: values are the keys' projection, before norm and rotation.
    follow(OVERLAP, True)
    QUERIES: tl.constexpr = (HQ + GROUP - 1) // GROUP
    KEYS: tl.constexpr = (HKV + GROUP - 1) // GROUP
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query, is_value = program < QUERIES, program >= QUERIES + KEYS
    head = (program - tl.where(is_query, 0, tl.where(is_value, QUERIES + KEYS, QUERIES))) * GROUP
    each = head + tl.arange(0, GROUP)[:, None]
    exists = each < tl.where(is_query, HQ, HKV)
    every = tl.zeros([GROUP, 1], tl.int32)
    h, r = every + tl.arange(0, BLOCK_HALF)[None, :], None
    if BLOCK_REST > 0:
        r = 2 * HALF + every + tl.arange(0, BLOCK_REST)[None, :]
    dtype = qkv.dtype.element_ty
    # With gates a query head is followed by its gate.
    APART: tl.constexpr = 0 if K_IS_V else HKV
    before = tl.where(is_query, each * GATED, (1 + GATED) * HQ + tl.where(is_value, APART, 0))
    x = qkv + (token * ((1 + GATED) * HQ + HKV + APART) + each + before) * D
    # All loads come first, so none waits for a sum.
    position, slot = tl.load(positions + token), tl.load(slot_mapping + token).to(tl.int64)
    first, second, third, fourth = _loaded(x, h, r, exists, D, HALF, BLOCK_REST)
    cos, sin = _turns(cos_sin, position, h, (h < HALF) & (is_value == 0), HALF)
    weights = None, None, None, None
    if HAS_NORM:
        weight = q_norm
        if not is_query:
            weight = k_norm
        weights = _loaded(weight, h, r, is_value == 0, D, HALF, BLOCK_REST)
    if not is_value:
        if HAS_NORM:
            first, second, third, fourth = _normed(first, second, third, fourth, weights, eps,
                                                   q_norm.dtype.element_ty, dtype, D, BLOCK_REST)  # fmt: skip
        first, second = tl.fma(first, cos, second * -sin), tl.fma(second, cos, first * sin)
    elif V_NORM:
        first, second, third, fourth = _normed(first, second, third, fourth, (1.0, 1.0, 1.0, 1.0), eps,
                                               tl.float32, dtype, D, BLOCK_REST)  # fmt: skip
    cached = ((slot // PAGE * HKV + each) * PAGE + slot % PAGE) * D
    out = q_out + (token * HQ + each) * D
    if k_scales is None:
        if is_value:
            out = v_cache + cached
        elif not is_query:
            out = k_cache + cached
        _store(out, first, second, third, fourth, h, r, exists, dtype, D, HALF, BLOCK_REST)
    elif is_query:
        _store(out, first, second, third, fourth, h, r, exists, dtype, D, HALF, BLOCK_REST)
    else:
        rows, scales = k_cache + cached, k_scales + cached // D
        if is_value:
            rows, scales = v_cache + cached, v_scales + cached // D
        _store_e4m3(rows, scales, exists, first, second, third, fourth, h, r, dtype, D, HALF, BLOCK_REST)


@triton.jit
def _loaded(at, h, r, there, D: tl.constexpr, HALF: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Load the four runs of heads, or of a weight, at ``at``, in fp32; without BLOCK_REST the first two, twice."""
    inside = (h < HALF) & there
    first = tl.load(at + h, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + h, mask=inside, other=0.0).to(tl.float32)
    third, fourth = first, second
    if BLOCK_REST > 0:
        third = tl.load(_narrow(at + r), mask=(r < D) & there, other=0.0).to(tl.float32)
        fourth = tl.load(_narrow(at + BLOCK_REST + r), mask=(r + BLOCK_REST < D) & there, other=0.0).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def _turns(cos_sin, position, h, turned, HALF: tl.constexpr):
    """Load cosines and sines of a token's rotation."""
    angles = cos_sin + tl.maximum(position, 0).to(tl.int64) * (2 * HALF) + h
    return tl.load(angles, mask=turned, other=1.0), tl.load(angles + HALF, mask=turned, other=0.0)


@triton.jit
def _narrow(at):
    """Hint to the compiler: a thread takes AT_ONCE neighbouring addresses, for any dtype."""
    return tl.max_contiguous(at, [1, AT_ONCE])


@triton.jit
def _normed(first, second, third, fourth, weights, eps, kind: tl.constexpr, dtype: tl.constexpr, D: tl.constexpr,
            BLOCK_REST: tl.constexpr):  # fmt: skip
    """Normalise the four runs by each head's root mean square and multiply by the weights, stored in ``kind``."""
    squares = tl.sum(square(first), axis=1) + tl.sum(square(second), axis=1)
    if BLOCK_REST > 0:
        squares += tl.sum(square(third), axis=1) + tl.sum(square(fourth), axis=1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    first, second = _scaled(first, scale, weights[0], kind, dtype), _scaled(second, scale, weights[1], kind, dtype)
    if BLOCK_REST > 0:
        third, fourth = _scaled(third, scale, weights[2], kind, dtype), _scaled(fourth, scale, weights[3], kind, dtype)
    return first, second, third, fourth


@triton.jit
def _store(out, first, second, third, fourth, h, r, exists, dtype: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
           BLOCK_REST: tl.constexpr):  # fmt: skip
    """Write heads, rounded to ``dtype``."""
    inside = (h < HALF) & exists
    tl.store(out + h, first.to(dtype), mask=inside)
    tl.store(out + HALF + h, second.to(dtype), mask=inside)
    if BLOCK_REST > 0:
        tl.store(_narrow(out + r), third.to(dtype), mask=(r < D) & exists)
        tl.store(_narrow(out + BLOCK_REST + r), fourth.to(dtype), mask=(r + BLOCK_REST < D) & exists)


@triton.jit
def _store_e4m3(out, scales, exists, first, second, third, fourth, h, r, dtype: tl.constexpr, D: tl.constexpr,
                HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    """Write heads, rounded to ``dtype`` and then to e4m3, and the exponents of their scales."""
    e4m3: tl.constexpr = out.dtype.element_ty
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    bits = tl.maximum(largest_bits(first), largest_bits(second))
    if BLOCK_REST > 0:
        third, fourth = third.to(dtype).to(tl.float32), fourth.to(dtype).to(tl.float32)
        bits = tl.maximum(bits, tl.maximum(largest_bits(third), largest_bits(fourth)))
    exponent = exponent_of(bits)
    tl.store(scales, exponent[:, None].to(tl.uint8), mask=exists)
    inside = (h < HALF) & exists
    tl.store(_narrow(out + h), as_e4m3(first, exponent, e4m3), mask=inside)
    tl.store(_narrow(out + HALF + h), as_e4m3(second, exponent, e4m3), mask=inside)
    if BLOCK_REST > 0:
        tl.store(_narrow(out + r), as_e4m3(third, exponent, e4m3), mask=(r < D) & exists)
        tl.store(_narrow(out + BLOCK_REST + r), as_e4m3(fourth, exponent, e4m3), mask=(r + BLOCK_REST < D) & exists)


@triton.jit
def _scaled(x, scale, weight, kind: tl.constexpr, dtype: tl.constexpr):
    """Multiply by the norm's weight with the roundings of ``rms_norm``, in fp32. kind: dtype of the stored weight."""
    return (rounded_before_weight(x * scale, kind, dtype) * weight).to(dtype).to(tl.float32)


def _blocks(head_dim: int, rot_dim: int) -> dict[str, int]:
    """Heads of a program, all of one kind, and block sizes. They depend on the size of a head alone: they are part of
    the norms' summation order, and a rank of several has fewer heads."""
    rest = head_dim - rot_dim
    return {
        "GROUP": 4 if rest else 8,
        "BLOCK_HALF": triton.next_power_of_2(rot_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(triton.cdiv(rest, 2)) if rest else 0,
    }


def _warps(blocks: dict[str, int]) -> int:
    """Warps of a program. Heads that rotate whole: AT_ONCE elements of a tile per thread, so that all tiles have one
    layout and none passes through shared memory. Others: a warp per head, so that little passes between warps."""
    heads = blocks["GROUP"]
    return heads if blocks["BLOCK_REST"] else max(1, heads * blocks["BLOCK_HALF"] // (32 * AT_ONCE.value))


def launch_rope_and_cache(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    v_norm: bool = False,
    k_is_v: bool = False,
) -> torch.Tensor:
    """See :func:`rope_and_cache`."""
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    head_dim, rot_dim = k_cache.shape[3], cos_sin.shape[1]
    q = qkv.new_empty(tokens, num_heads, head_dim)
    page = k_cache.shape[2]
    if num_kv_heads == 0:
        k_cache = v_cache = q  # nothing is written there; they have the dtype of the compiled kernel
    blocks = _blocks(head_dim, rot_dim)
    programs = triton.cdiv(num_heads, blocks["GROUP"]) + 2 * triton.cdiv(num_kv_heads, blocks["GROUP"])
    _rope_and_cache_kernel[(tokens, programs)](
        qkv, q_norm, k_norm, eps, cos_sin, positions, slot_mapping, q, k_cache, v_cache, k_scales, v_scales,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim,
        GATED=0 if k_is_v else int(has_gates(qkv, num_heads, num_kv_heads, head_dim)), HALF=rot_dim // 2, PAGE=page,
        HAS_NORM=q_norm is not None, V_NORM=v_norm, K_IS_V=k_is_v, **blocks, num_warps=_warps(blocks),
        **overlapped(qkv.device),
    )  # fmt: skip
    return q


def has_gates(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """True if a gate of its size follows each query head."""
    return qkv.shape[1] == 2 * (num_heads + num_kv_heads) * head_dim


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos_sin [T, rot_dim]; dimensions past rot_dim pass."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _rope_and_cache_formula(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    v_norm: bool = False,
    k_is_v: bool = False,
) -> torch.Tensor:
    """Compute :func:`rope_and_cache` with a gradient."""
    head_dim = k_cache.shape[3]
    each = 1 if k_is_v else 1 + has_gates(qkv, num_heads, num_kv_heads, head_dim)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, *rest = heads.split((each * num_heads, *[num_kv_heads] * (2 - k_is_v)), dim=1)
    v = rest[0] if rest else k
    if v_norm:
        v = rms_norm_formula(v, v.new_ones(head_dim), eps)
    q = q[:, ::each]
    angles = cos_sin[positions.clamp(min=0)]
    page = k_cache.shape[2]
    pages, offsets = slot_mapping // page, slot_mapping % page
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_formula(q, q_norm, eps), rms_norm_formula(k, k_norm, eps)
    for x, cache, scales in ((_rotated(k, angles), k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is not None:
            x, scales[pages, :, offsets] = quantised(x)
        if num_kv_heads:
            cache[pages, :, offsets] = x
    return _rotated(q, angles)


rope_and_cache = op(
    cuda=launch_rope_and_cache,
    shape=lambda qkv, k_cache, num_heads: (qkv.shape[0], num_heads, k_cache.shape[3]),
    gradient=_rope_and_cache_formula,
)(rope_and_cache_cpu)


def _aot_rope(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, rot_dim: int, norm: bool | str, gated: int = 0,
    e4m3: bool = False, v_norm: bool = False, k_is_v: bool = False,
) -> AotCase:  # fmt: skip
    """Make the AotCase. norm: True with head norms, or the dtype of their weights. e4m3: the caches are e4m3."""
    tensors = dict.fromkeys(("qkv", "q_out"), f"*{dtype}")
    tensors |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv" if e4m3 else f"*{dtype}")
    scales = ("k_scales", "v_scales")
    tensors |= dict.fromkeys(scales, "*u8") if e4m3 else {}
    tensors |= dict.fromkeys(("q_norm", "k_norm"), f"*{norm if isinstance(norm, str) else dtype}")
    inputs = {"eps": "fp32", "cos_sin": "*fp32", "positions": "*i32", "slot_mapping": "*i32"}
    sizes = {
        "HQ": num_heads,
        "HKV": num_kv_heads,
        "D": head_dim,
        "GATED": gated,
        "HALF": rot_dim // 2,
        "PAGE": 16,
        "HAS_NORM": bool(norm),
        "V_NORM": v_norm,
        "K_IS_V": k_is_v,
    }
    blocks = _blocks(head_dim, rot_dim)
    constants: dict[str, object] = sizes | blocks | {"OVERLAP": True} | ({} if e4m3 else dict.fromkeys(scales))
    return AotCase(_rope_and_cache_kernel, tensors | inputs, constants, num_warps=_warps(blocks))


AOT: list[AotCase] = [
    _aot_rope("bf16", 32, 8, 128, 128, True),
    *(_aot_rope("bf16", 4 * heads, heads, 128, 128, True) for heads in (4, 2, 1)),  # and its ranks
    _aot_rope("bf16", 32, 8, 128, 128, False),
    _aot_rope("bf16", 14, 2, 64, 64, True),
    _aot_rope("bf16", 8, 8, 256, 64, False),
    _aot_rope("fp16", 32, 8, 80, 80, True),
    _aot_rope("fp32", 3, 1, 24, 24, True),
    _aot_rope("bf16", 16, 0, 128, 128, True),
    _aot_rope("bf16", 16, 4, 256, 64, "fp32"),
    _aot_rope("bf16", 16, 2, 256, 64, "fp32"),
    _aot_rope("bf16", 8, 1, 256, 64, "fp32"),
    _aot_rope("fp16", 24, 4, 256, 64, "fp32"),
    _aot_rope("bf16", 16, 4, 256, 64, "fp32", gated=1),
    _aot_rope("bf16", 16, 8, 256, 256, "fp32", v_norm=True),  # Gemma 4, sliding and full
    _aot_rope("bf16", 16, 2, 512, 512, "fp32", v_norm=True, k_is_v=True),
    _aot_rope("bf16", 8, 0, 512, 512, "fp32"),
    _aot_rope("bf16", 0, 8, 128, 128, True),  # keys and values alone
    _aot_rope("bf16", 0, 8, 128, 128, True, e4m3=True),
    _aot_rope("bf16", 16, 2, 512, 512, "fp32", e4m3=True, v_norm=True, k_is_v=True),
    _aot_rope("bf16", 32, 8, 128, 128, True, e4m3=True),
    _aot_rope("bf16", 32, 8, 128, 128, False, e4m3=True),
    _aot_rope("fp16", 32, 8, 80, 80, True, e4m3=True),
    _aot_rope("bf16", 16, 4, 256, 64, "fp32", gated=1, e4m3=True),
]
