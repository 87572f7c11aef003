"""A head's RMSNorm times a gate. Owns the ``gated_norm`` op; called by ``models``.

One program takes whole heads, and the order of a head's sum depends on its size only, so a row's bits do not depend on
the batch.

``gated_norm_fp8`` stores the result quantised (``kernels/gemm/fp8_quantize.py``), for products with e4m3 weights.

Shapes: M rows, Hv heads, V elements of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.gemm.fp8_quantize import (
    GROUP,
    Quantised,
    empty_quantised,
    handed_on,
    quantised_cpu,
    store_quantised,
)
from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import square
from unisono.kernels.overlap import follow, overlapped, overlapping

_HEADS = 8
"""Heads of a program."""


@overlapping(reads_early=True, leads=True)
@triton.jit
def _gated_norm_kernel(
    o, z, weight, out, scales, eps, z_stride, HEADS, M, PADDED, V: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, SIGMOID: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute ``gated_norm``. COLUMNS: columns that share a scale of an e4m3 out; 0: out has o's dtype."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, V)
    w = tl.load(weight + dim)
    follow(OVERLAP, COLUMNS > 0)
    at = head[:, None] * V + dim[None, :]
    inside = (head < HEADS)[:, None]
    if COLUMNS > 0:
        inside = inside & (row < M)
    x = tl.load(o + row * HEADS * V + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(square(x), axis=1) / V + eps)
    upper = tl.full(gate.shape, 1.0, tl.float32) if SIGMOID else gate
    y = (x * scale[:, None]) * w[None, :] * (upper / (1.0 + tl.exp(-gate)))
    if COLUMNS > 0:
        first = tl.program_id(1) * (BLOCK * V)
        y = tl.where(inside, y, 0.0)  # padding becomes 0, not -0
        store_quantised(y.to(o.dtype.element_ty), out, scales, tl.program_id(0), first, HEADS * V, PADDED, COLUMNS)
    else:
        tl.store(out + row * HEADS * V + at, y.to(out.dtype.element_ty), mask=inside)


def launch_gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    """See :func:`gated_norm`."""
    o = o.contiguous()
    z = z if z.stride(1) == 1 else z.contiguous()
    out, size = torch.empty_like(o), weight.shape[0]
    heads = o.shape[1] // size
    if len(o):
        _gated_norm_kernel[(len(o), triton.cdiv(heads, _HEADS))](
            o, z, weight, out, None, eps, z.stride(0), heads, None, None, V=size, BLOCK=_HEADS, COLUMNS=0,
            SIGMOID=sigmoid, num_warps=4, **overlapped(o.device),
        )  # fmt: skip
    return out


def quantises(size: int, group: int) -> bool:
    """Return True if the kernel can quantise groups of this many columns, for heads of ``size``: it has 8 heads of a
    row.
    """
    return 0 < group <= _HEADS * size and _HEADS * size % group == 0


def launch_gated_norm_fp8(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, group: int, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`gated_norm_fp8`."""
    o, z = o.contiguous(), z if z.stride(1) == 1 else z.contiguous()
    (rows, width), size = o.shape, weight.shape[0]
    x8, scales = empty_quantised(o, rows, width, group)
    if rows:
        _gated_norm_kernel[(len(x8), triton.cdiv(width // size, _HEADS))](
            o, z, weight, x8, scales, eps, z.stride(0), width // size, rows, len(x8), V=size, BLOCK=_HEADS,
            COLUMNS=group, SIGMOID=sigmoid, num_warps=4, **overlapped(o.device),
        )  # fmt: skip
    return x8, scales


@op(cuda=launch_gated_norm)
def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    """Compute ``o * rsqrt(mean(o^2) + eps) * weight * silu(z)`` by head, for o, z [M, Hv V], weight [V] fp32: [M, Hv
    V].

    sigmoid: the gate is ``sigmoid(z)``. z's rows may have any stride. V is a power of two. Computed in fp32 with one
    rounding, to o's dtype.
    """
    heads = o.float().unflatten(1, (-1, weight.shape[0])).contiguous()
    gate = z.float().contiguous()
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight
    upper = torch.ones_like(gate) if sigmoid else gate
    return (normed.flatten(1) * (upper / (1.0 + torch.exp(-gate)))).to(o.dtype)


@op(cuda=launch_gated_norm_fp8, meta=lambda o, group: empty_quantised(o, o.shape[0], o.shape[1], group))
def gated_norm_fp8_op(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, group: int, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    return quantised_cpu(gated_norm.cpu(o, z, weight, eps, sigmoid), group)


def gated_norm_fp8(o: Tensor, z: Tensor, weight: Tensor, eps: float, group: int, sigmoid: bool = False) -> Quantised:
    """Compute :func:`gated_norm` in e4m3, with the bits of ``quantize(gated_norm(o, z, weight, eps, sigmoid), group)``.

    For groups that :func:`quantises` accepts.
    """
    return handed_on(gated_norm_fp8_op(o, z, weight, eps, group, sigmoid), o, group)


def _aot(dtype: str, size: int, group: int, sigmoid: bool = False) -> AotCase:
    tensors = dict.fromkeys(("o", "z"), f"*{dtype}") | {"out": "*fp8e4nv" if group else f"*{dtype}", "weight": "*fp32"}
    numbers = {"eps": "fp32", "z_stride": "i32", "HEADS": "i32"}
    options = {"V": size, "BLOCK": _HEADS, "COLUMNS": group, "SIGMOID": sigmoid, "OVERLAP": True}
    if group:
        return AotCase(
            _gated_norm_kernel, tensors | numbers | {"scales": "*fp32", "M": "i32", "PADDED": "i32"}, options
        )
    return AotCase(_gated_norm_kernel, tensors | numbers, options | dict.fromkeys(("scales", "M", "PADDED")))


AOT: list[AotCase] = [
    *(_aot(dtype, size, 0) for dtype, size in (("bf16", 128), ("bf16", 32), ("fp16", 128), ("fp32", 64))),
    *(_aot("bf16", size, GROUP) for size in (128, 32)),
    *(_aot("bf16", 128, group, sigmoid=True) for group in (0, GROUP)),
]
