"""Rotary positions on two axes, between a vision block's QKV projection and its attention. Owns ``axial_rotary``.

One program takes one patch; every element is computed on its own. Called by ``models/vision``.

Shapes: P patches, A heads, D elements of a head, S positions of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _axial_rotary_kernel(qkv, cos_sin, positions, HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
                         BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    # Queries and keys of a patch are 2 * HEADS heads, one after the other; a program rotates GROUP of them.
    follow(OVERLAP)
    HALF: tl.constexpr = D // 2
    QUARTER: tl.constexpr = D // 4
    patch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    plane = tl.arange(0, BLOCK)[None, :]
    inside = (plane < HALF) & (head < 2 * HEADS)
    position = tl.load(positions + patch * 2 + plane // QUARTER, mask=plane < HALF, other=0).to(tl.int64)
    angle = cos_sin + position * HALF + plane % QUARTER
    cos = tl.load(angle, mask=plane < HALF, other=1.0)
    sin = tl.load(angle + QUARTER, mask=plane < HALF, other=0.0)
    at = qkv + (patch * 3 * HEADS + head) * D + plane
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(dtype), mask=inside)


def _group(heads: int) -> int:
    """Heads of a program."""
    return min(triton.next_power_of_2(2 * heads), 8)


def launch_axial_rotary(qkv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, num_heads: int) -> None:
    dim, group = qkv.shape[1] // (3 * num_heads), _group(num_heads)
    _axial_rotary_kernel[(qkv.shape[0], triton.cdiv(2 * num_heads, group))](
        qkv, cos_sin, positions.contiguous(), HEADS=num_heads, D=dim, GROUP=group,
        BLOCK=triton.next_power_of_2(dim // 2), num_warps=2, **overlapped(qkv.device),
    )  # fmt: skip


@op(cuda=launch_axial_rotary)
def axial_rotary(qkv: Mutated[torch.Tensor], cos_sin: torch.Tensor, positions: torch.Tensor, num_heads: int) -> None:
    """Rotate the queries and keys in qkv [P, 3 · A · D], in place, by each patch's row and column.

    cos_sin [S, D / 2] fp32: cosines, then sines, of D / 4 planes. positions [P, 2] i32, in range. Element i < D / 2 of
    a head rotates with element i + D / 2: the first D / 4 of them by the row, the others by the column. Computed in
    fp32. D is a multiple of 4; qkv is contiguous.
    """
    patches, dim = len(qkv), qkv.shape[1] // (3 * num_heads)
    angles = cos_sin[positions.long()].view(patches, 2, 2, dim // 4).transpose(1, 2).reshape(patches, 2, 1, dim // 2)
    cos, sin = angles[:, 0], angles[:, 1]
    heads = qkv.view(patches, 3 * num_heads, dim)[:, : 2 * num_heads]
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads.copy_(turned)


AOT: list[AotCase] = [
    AotCase(
        _axial_rotary_kernel,
        {"qkv": f"*{dtype}", "cos_sin": "*fp32", "positions": "*i32"},
        {
            "HEADS": 16, "D": dim, "GROUP": _group(16), "BLOCK": triton.next_power_of_2(dim // 2), "OVERLAP": True,
        },
        num_warps=2,
    )
    for dtype, dim in (("bf16", 64), ("bf16", 72), ("bf16", 80), ("bf16", 88), ("fp16", 72), ("fp32", 72))
]  # fmt: skip
