"""RMSNorm over all query heads together and over all key heads together, in place, before they are rotated.

Owns the ``norm_joint_heads`` op; called by the attention block. One program takes the queries or the keys of one token,
and the order of its sum depends on their number only, so a token's bits do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.norm.rms_norm import rms_norm, rounded_before_weight, row_warps, square
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _joint_norm_kernel(qkv, q_norm, k_norm, eps, stride, Q, K, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Norm columns 0 … Q - 1 (second program index 0) or Q … Q + K - 1 of one row."""
    follow(OVERLAP)
    of_keys, cols = tl.program_id(1) == 1, tl.arange(0, BLOCK)
    width = tl.where(of_keys, K, Q)
    inside = cols < width
    at = qkv + tl.program_id(0).to(tl.int64) * stride + tl.where(of_keys, Q, 0) + cols
    weight = q_norm
    if of_keys:
        weight = k_norm
    w = tl.load(weight + cols, mask=inside, other=0.0)
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    scale = tl.rsqrt(tl.sum(square(value), axis=0) / width + eps)
    normed = rounded_before_weight(value * scale, w.dtype, dtype) * w.to(tl.float32)
    tl.store(at, normed.to(dtype), mask=inside)


def launch_norm_joint_heads(qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float) -> None:
    """See :func:`norm_joint_heads`."""
    if qkv.stride(1) != 1:
        raise ValueError(f"rows of {list(qkv.shape)} have stride {qkv.stride(1)}: make them contiguous")
    block = triton.next_power_of_2(max(len(q_norm), len(k_norm)))
    _joint_norm_kernel[(qkv.shape[0], 2)](
        qkv, q_norm, k_norm, eps, qkv.stride(0), len(q_norm), len(k_norm),
        BLOCK=block, num_warps=row_warps(block), **overlapped(qkv.device),
    )  # fmt: skip


@op(cuda=launch_norm_joint_heads)
def norm_joint_heads(qkv: Mutated[torch.Tensor], q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float) -> None:
    """Norm the first len(q_norm) columns of qkv [T, N], and the next len(k_norm), as ``rms_norm`` does, in place.

    q_norm [Hq · D], k_norm [Hkv · D]: weights of one dtype. The other columns stay.
    """
    for part, weight in zip(qkv.split((len(q_norm), len(k_norm), qkv.shape[1] - len(q_norm) - len(k_norm)), dim=1)[:2],
                            (q_norm, k_norm), strict=True):  # fmt: skip
        part.copy_(rms_norm.cpu(part, weight, eps))


AOT: list[AotCase] = [
    AotCase(
        _joint_norm_kernel,
        {**dict.fromkeys(("qkv", "q_norm", "k_norm"), f"*{dtype}"), "eps": "fp32",
         **dict.fromkeys(("stride", "Q", "K"), "i32")},
        {"BLOCK": block, "OVERLAP": True},
        num_warps=row_warps(block),
    )
    for dtype, block in (("bf16", 8192), ("fp16", 2048))
]  # fmt: skip
