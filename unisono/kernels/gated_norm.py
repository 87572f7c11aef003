"""A head's RMSNorm times a gate. Owns the ``gated_norm`` op; called by ``models``.

One program takes whole heads, and the head's size alone fixes the order of its sum, so a row's bits do not depend on
the batch.

Shapes: M rows, Hv heads, V elements of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, define, register
from unisono.kernels.overlap import follow, overlapped

_HEADS = 8
"""Heads of a program."""


@triton.jit
def _gated_norm_kernel(
    o, z, weight, out, eps, z_stride, HEADS, V: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, V)
    at = head[:, None] * V + dim[None, :]
    inside = (head < HEADS)[:, None]
    x = tl.load(o + row * HEADS * V + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)
    w = tl.load(weight + dim)
    y = (x * scale[:, None]) * w[None, :] * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * HEADS * V + at, y.to(out.dtype.element_ty), mask=inside)


def launch_gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    o = o.contiguous()
    z = z if z.stride(1) == 1 else z.contiguous()
    out, size = torch.empty_like(o), weight.shape[0]
    heads = o.shape[1] // size
    if len(o):
        _gated_norm_kernel[(len(o), triton.cdiv(heads, _HEADS))](
            o, z, weight, out, eps, z.stride(0), heads, V=size, BLOCK=_HEADS, num_warps=4, **overlapped(o.device)
        )
    return out


def gated_norm_cpu(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = o.float().unflatten(1, (-1, weight.shape[0])).contiguous()
    gate = z.float().contiguous()
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * (gate / (1.0 + torch.exp(-gate)))).to(o.dtype)


def _gated_norm_meta(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return o.new_empty(o.shape)


define("gated_norm(Tensor o, Tensor z, Tensor weight, float eps) -> Tensor")
register("gated_norm", cuda=launch_gated_norm, cpu=gated_norm_cpu, meta=_gated_norm_meta)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``o * rsqrt(mean(o^2) + eps) * weight * silu(z)`` by heads, for o, z [M, Hv V], weight [V] fp32 -> [M, Hv V].

    z's rows may have any stride. V is a power of two. Computed in fp32 with one rounding, to o's dtype.
    """
    return torch.ops.unisono.gated_norm(o, z, weight, eps)


AOT: list[AotCase] = [
    AotCase(
        _gated_norm_kernel,
        {**dict.fromkeys(("o", "z", "out"), f"*{dtype}"), "weight": "*fp32", "eps": "fp32", "z_stride": "i32",
         "HEADS": "i32"},
        {"V": size, "BLOCK": _HEADS, "OVERLAP": True},
    )
    for dtype, size in (("bf16", 128), ("bf16", 32), ("fp16", 128), ("fp32", 64))
]  # fmt: skip
