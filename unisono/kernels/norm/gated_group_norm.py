"""RMSNorm over groups of gated rows, the norm of Mamba2. Owns the ``gated_group_norm`` op; called by ``models``.

One program takes one group of a row, and the order of its sum depends on the group's size only, so a row's bits do not
depend on the batch.

Shapes: M rows, I elements of a row, G groups.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import row_warps, square
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _gated_group_norm_kernel(x, z, weight, out, eps, x_stride, z_stride, I, SIZE,  # noqa: E741
                             BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Norm group ``program_id(1)``, of SIZE elements, of one row."""
    follow(OVERLAP)
    row, own = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    cols, inside = tl.program_id(1) * SIZE + own, own < SIZE
    value = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + cols, mask=inside, other=0.0)
    gated = value * (gate / (1.0 + tl.exp(-gate)))
    scale = tl.rsqrt(tl.sum(square(gated), axis=0) / SIZE + eps)
    tl.store(out + row * I + cols, ((gated * scale) * w).to(out.dtype.element_ty), mask=inside)


def launch_gated_group_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """See :func:`gated_group_norm`."""
    x, z = (each if each.stride(1) == 1 else each.contiguous() for each in (x, z))
    out = x.new_empty(x.shape)
    size = x.shape[1] // groups
    block = triton.next_power_of_2(size)
    if len(x):
        _gated_group_norm_kernel[(len(x), groups)](
            x, z, weight, out, eps, x.stride(0), z.stride(0), x.shape[1], size,
            BLOCK=block, num_warps=row_warps(block), **overlapped(x.device),
        )  # fmt: skip
    return out


@op(cuda=launch_gated_group_norm, shape=lambda x: x.shape)
def gated_group_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Compute ``y * rsqrt(mean(y^2) + eps) * weight`` by group for ``y = x * silu(z)``, x, z [M, I]: [M, I].

    weight [I] fp32. groups: G, which divides I. Rows of x and z may have any stride. Computed in fp32 with one
    rounding, to x's dtype.
    """
    gate = z.float().contiguous()
    gated = (x.float().contiguous() * (gate / (1.0 + (-gate).exp()))).unflatten(1, (groups, -1))
    normed = gated * (gated.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed.flatten(1) * weight).to(x.dtype)


AOT: list[AotCase] = [
    AotCase(
        _gated_group_norm_kernel,
        {**dict.fromkeys(("x", "z", "out"), f"*{dtype}"), "weight": "*fp32", "eps": "fp32",
         **dict.fromkeys(("x_stride", "z_stride", "I", "SIZE"), "i32")},
        {"BLOCK": block, "OVERLAP": True},
        num_warps=row_warps(block),
    )
    for dtype, block in (("bf16", 512), ("bf16", 8192), ("fp16", 4096), ("fp32", 64))
]  # fmt: skip
