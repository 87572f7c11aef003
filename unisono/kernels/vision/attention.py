"""Bidirectional attention of patches within their own segment. Owns the ``segment_attention`` op.

A segment is a frame of an image, or a window of one: consecutive rows that see each other and nothing else, given by
``[start, end)`` of each row. A program takes a tile of query rows and one head. It walks the keys of each segment that
overlaps its tile, in blocks counted from the segment's first row. So a row's bits depend on its own segment alone: not
on the segment's place in the pass, its neighbours, padding or the tile. Rows of other segments see scores of -inf,
which do not change the bits of their sums. Called by ``models/vision``.

Shapes: P patches, A heads, D elements of a head, W = A · D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unisono.kernels.attention.triton_kernels import LOG2_E
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped

KEYS = 64
"""Keys of a block. Part of the order of the sums, hence of the bits."""

CPU_ROWS = 256
"""Query rows that the CPU twin attends together, from the segment's first row on."""


@dataclass(frozen=True)
class QueryTile:
    """Query rows of a program. It affects speed only."""

    rows: int
    warps: int
    stages: int


MANY_ROWS = 2048
"""Minimum rows for the larger tile, which reads fewer keys: programs then occupy all multiprocessors."""


def _tile(patches: int, dtype: torch.dtype) -> QueryTile:
    if dtype is torch.float32:
        return QueryTile(32, 4, 2)
    return QueryTile(128, 8, 3) if patches >= MANY_ROWS else QueryTile(64, 4, 3)


def _parts(dim: int) -> dict[str, int]:
    """Pad a head to MAIN + REST dimensions, both powers of two: 72 to 64 + 16, 80 to 64 + 16."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(dim - main)) if dim > main else 0
    return {"MAIN": main, "REST": rest}


@triton.jit
def _rows_of(base, rows, dims, in_use, stride, D: tl.constexpr):
    """Load elements ``dims`` of a head of some rows; zeros for unused rows and beyond the head's end."""
    at = base + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    return tl.load(at, mask=in_use[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def _segment_attention_kernel(
    qkv, bounds, out, P, scale,
    HEADS: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    WIDTH: tl.constexpr = HEADS * D
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    last = tl.minimum(first + ROWS, P)
    rows = first + tl.arange(0, ROWS)
    in_use = rows < P
    starts = tl.load(bounds + rows * 2, mask=in_use, other=0)
    dims = tl.arange(0, MAIN)
    q_ptr = qkv + head * D
    q = _rows_of(q_ptr, rows, dims, in_use, 3 * WIDTH, D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS, 8], tl.float32)  # eight equal columns: a product, whose order is the same at any tile
    ones = tl.full([KEYS, 8], 1.0, qkv.dtype.element_ty)
    acc = tl.zeros([ROWS, MAIN], tl.float32)
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        q_rest = _rows_of(q_ptr, rows, more, in_use, 3 * WIDTH, D)
        acc_rest = tl.zeros([ROWS, REST], tl.float32)
    row = first
    while row < last:
        start, end = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
        mine = in_use & (starts == start) & (rows >= row) & (rows < end)
        for block in range(start, end, KEYS):
            keys = block + tl.arange(0, KEYS)
            known = keys < end
            k = _rows_of(q_ptr + WIDTH, keys, dims, known, 3 * WIDTH, D)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if REST > 0:
                k_rest = _rows_of(q_ptr + WIDTH, keys, more, known, 3 * WIDTH, D)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
            scores = tl.where(mine[:, None] & known[None, :], scores, float("-inf"))
            top = tl.maximum(m, tl.max(scores, 1) * scale)
            finite = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(tl.fma(scores, scale, -finite[:, None])).to(qkv.dtype.element_ty)
            shrink = tl.exp2(m - finite)[:, None]
            z = tl.dot(p, ones, z * shrink, input_precision="ieee")
            v = _rows_of(q_ptr + 2 * WIDTH, keys, dims, known, 3 * WIDTH, D)
            acc = tl.dot(p, v, acc * shrink, input_precision="ieee")
            if REST > 0:
                v_rest = _rows_of(q_ptr + 2 * WIDTH, keys, more, known, 3 * WIDTH, D)
                acc_rest = tl.dot(p, v_rest, acc_rest * shrink, input_precision="ieee")
            m = top
        row = tl.where(end > row, end, last)  # an empty segment is padding, as is everything after it
    total = tl.max(z, 1)
    factor = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]
    dtype = out.dtype.element_ty
    at = out + rows.to(tl.int64)[:, None] * WIDTH + head * D
    tl.store(at + dims[None, :], (acc * factor).to(dtype), mask=in_use[:, None] & (dims < D)[None, :])
    if REST > 0:
        tl.store(at + more[None, :], (acc_rest * factor).to(dtype), mask=in_use[:, None] & (more < D)[None, :])


def launch_segment_attention(
    qkv: torch.Tensor, bounds: torch.Tensor, num_heads: int, scale: float, tile: QueryTile | None = None
) -> torch.Tensor:
    """Launch the kernel. tile: overrides the rows of a program (speed only)."""
    qkv = qkv.contiguous()
    patches, width = qkv.shape[0], qkv.shape[1] // 3
    dim, tile = width // num_heads, tile or _tile(patches, qkv.dtype)
    out = qkv.new_empty(patches, width)
    _segment_attention_kernel[(triton.cdiv(patches, tile.rows), num_heads)](
        qkv, bounds.contiguous(), out, patches, scale * LOG2_E.value,
        HEADS=num_heads, D=dim, **_parts(dim), ROWS=tile.rows, KEYS=KEYS,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(qkv.device),
    )  # fmt: skip
    return out


@op(cuda=launch_segment_attention, shape=lambda qkv: (qkv.shape[0], qkv.shape[1] // 3))
def segment_attention(qkv: torch.Tensor, bounds: torch.Tensor, num_heads: int, scale: float) -> torch.Tensor:
    """Compute ``softmax(scale · q kᵀ) v`` of each head within each row's segment: [P, W] in qkv's dtype.

    qkv [P, 3 · W]: queries, keys and values of a patch, each A heads of D elements. bounds [P, 2] i32: start and
    end of each row's segment. Segments are runs of rows that do not overlap, and all rows of a segment have the same
    bounds. Rows of padding have bounds (0, 0) and come after all segments; they get zeros. Scores and
    sums are in fp32; the weights of the softmax are rounded to qkv's dtype before they are summed and multiplied.
    """
    patches, width = qkv.shape[0], qkv.shape[1] // 3
    out = torch.zeros(patches, width, dtype=qkv.dtype)
    for start, end in bounds.unique_consecutive(dim=0).tolist():
        if end > start:
            heads = qkv[start:end].float().view(end - start, 3, num_heads, -1).permute(1, 2, 0, 3).contiguous()
            for first in range(0, end - start, CPU_ROWS):
                rows = slice(first, min(first + CPU_ROWS, end - start))
                scores = (heads[0][:, rows].contiguous() @ heads[1].mT).mul_(scale)
                p = scores.sub_(scores.amax(-1, keepdim=True)).exp_().to(qkv.dtype).float()
                seen = p @ heads[2] / p.sum(-1, keepdim=True)
                out[start:end][rows] = seen.transpose(0, 1).flatten(1).to(qkv.dtype)
    return out


def _aot(dtype: torch.dtype, name: str, dim: int, patches: int) -> AotCase:
    tile = _tile(patches, dtype)
    return AotCase(
        _segment_attention_kernel,
        {"qkv": f"*{name}", "bounds": "*i32", "out": f"*{name}", "P": "i32", "scale": "fp32"},
        {"HEADS": 16, "D": dim, **_parts(dim), "ROWS": tile.rows, "KEYS": KEYS, "OVERLAP": True},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


AOT: list[AotCase] = [
    *(_aot(torch.bfloat16, "bf16", dim, patches) for dim in (64, 72, 80, 88) for patches in (64, MANY_ROWS)),
    _aot(torch.bfloat16, "bf16", 32, 64),
    _aot(torch.float16, "fp16", 72, MANY_ROWS),
    _aot(torch.float32, "fp32", 72, MANY_ROWS),
]
