"""The sum of what a token's experts said, and the residual. Owns the ``combine_experts`` op; called by ``layers``.

One program adds a part of a row, in the order of the token's choices, the shared expert last, so a row's bits do not
depend on the batch.

Shapes: M rows, H features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, register
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024


@triton.jit
def _combine_kernel(y, weights, shared, gates, residual, out, H, TOP_K: tl.constexpr, SHARED: tl.constexpr,
                    GATE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(y + (row * TOP_K + slot) * H + cols, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row * TOP_K + slot) * part
    if SHARED:
        part = tl.load(shared + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(gates + row) * part if GATE else part
    dtype = out.dtype.element_ty
    r = tl.load(residual + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + cols, (total.to(dtype).to(tl.float32) + r).to(dtype), mask=inside)


def launch_combine(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    y, residual = y.contiguous(), residual.contiguous()
    shared = None if shared is None else shared.contiguous()
    (rows, top_k), hidden = weights.shape, residual.shape[1]
    out = torch.empty_like(residual)
    _combine_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
        y, weights, shared, gates, residual, out, hidden, TOP_K=top_k, SHARED=shared is not None,
        GATE=gates is not None, BLOCK=_BLOCK, **overlapped(y.device),
    )  # fmt: skip
    return out


def combine_cpu(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    rows, top_k = weights.shape
    total = torch.zeros(residual.shape, dtype=torch.float32)
    for slot, part in enumerate(y.view(rows, top_k, -1).unbind(1)):
        total = total + weights[:, slot, None] * part.float()
    if shared is not None:
        total = total + (shared.float() if gates is None else gates[:, None] * shared.float())
    return total.to(residual.dtype) + residual


def _combine_meta(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(residual)


define("combine_experts(Tensor y, Tensor weights, Tensor? shared, Tensor? gates, Tensor residual) -> Tensor")
register("combine_experts", cuda=launch_combine, cpu=combine_cpu, meta=_combine_meta)


def combine_experts(
    y: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gates: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """``residual + sum of weights * y (+ gates * shared)`` -> [M, H] in residual's dtype.

    y [M * top_k, H]: a token's rows are neighbours; weights [M, top_k] fp32; shared [M, H], whose gates [M] fp32 are 1
    where None; residual [M, H]. The sum is fp32 in the order of the slots and rounded once, then the residual is added.
    """
    return torch.ops.unisono.combine_experts(y, weights, shared, gates, residual)


AOT: list[AotCase] = [
    AotCase(
        _combine_kernel,
        {
            **dict.fromkeys(("y", "shared", "residual", "out"), f"*{dtype}"), "weights": "*fp32", "gates": "*fp32",
            "H": "i32",
        },
        {"TOP_K": top_k, "SHARED": shared, "GATE": shared, "BLOCK": _BLOCK, "OVERLAP": True},
    )
    for dtype, top_k, shared in (("bf16", 8, True), ("bf16", 8, False), ("fp16", 2, False), ("fp32", 8, True))
]  # fmt: skip
