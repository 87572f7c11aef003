"""Input of a draft module: a token's normed embedding and a normed hidden state. Owns the ``concat_norm`` op.

One launch instead of a gather, two norms and a concatenation, with the bits of ``rms_norm``. Draft heads call it.

Shapes: T tokens, V vocabulary, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, op
from unisono.kernels.norm.rms_norm import rms_norm, rms_norm_formula, row_warps


@triton.jit
def _concat_norm_kernel(
    token_ids, table, hidden, table_weight, hidden_weight, out, eps, H, BLOCK_H: tl.constexpr
):  # fmt: skip
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, weight = hidden + row * H, hidden_weight
    if half == 0:
        x, weight = table + tl.load(token_ids + row).to(tl.int64) * H, table_weight
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    value = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + (2 * row + half) * H + cols, (normed * w).to(out.dtype.element_ty), mask=inside)


def launch_concat_norm(
    token_ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Triton implementation of :func:`concat_norm`."""
    tokens, size = hidden.shape
    out = hidden.new_empty(tokens, 2 * size)
    block = triton.next_power_of_2(size)
    _concat_norm_kernel[(tokens, 2)](
        token_ids, table, hidden.contiguous(), table_weight, hidden_weight, out, eps, size,
        BLOCK_H=block, num_warps=row_warps(block),
    )  # fmt: skip
    return out


def _concat_norm_formula(
    token_ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    embedding = torch.nn.functional.embedding(token_ids, table).to(hidden.dtype)
    return torch.cat((rms_norm_formula(embedding, table_weight, eps), rms_norm_formula(hidden, hidden_weight, eps)), 1)


def _concat_norm_meta(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1])


@op(cuda=launch_concat_norm, meta=_concat_norm_meta, gradient=_concat_norm_formula)
def concat_norm(
    token_ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Concatenate ``rms_norm(table[token_ids])`` and ``rms_norm(hidden)``: [T, 2 H].

    token_ids [T] int32, in range; table [V, H]; hidden [T, H]; weights of the norms [H]; all but the ids of one dtype.
    H up to 16384.
    """
    embedding = table[token_ids.long()]
    return torch.cat((rms_norm.cpu(embedding, table_weight, eps), rms_norm.cpu(hidden, hidden_weight, eps)), 1)


AOT: list[AotCase] = [
    AotCase(
        _concat_norm_kernel,
        dict.fromkeys(("table", "hidden", "table_weight", "hidden_weight", "out"), f"*{dtype}")
        | {"token_ids": "*i32", "eps": "fp32", "H": "i32"},
        {"BLOCK_H": block},
        num_warps=row_warps(block),
    )
    for dtype, block in (("bf16", 4096), ("fp16", 4096), ("fp32", 256))
]
