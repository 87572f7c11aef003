"""Matrix products of experts with int8 weights and int8 activations (W8A8).

Owns the ops ``expert_int8_gate_up`` and ``expert_int8_down``. They are ``kernels/moe/experts.py`` with the arithmetic
of ``kernels/gemm/int8.py``: a token's activations are quantised once, by row, the sum of products of integers is exact
in int32, and a pair's row is ``(sum * scale of the row) * scale of the output`` in fp32. So no bit depends on the plan,
its tile or other rows. The inner activations are quantised the same way before ``down``. Weights are the tile's rows,
tokens its columns.

Shapes: M tokens, H features, I intermediate features, E experts in the stack with a fused shared one, P = M * top_k
pairs. Weights int8 [E, 2 I, H], gate's rows first, and [E, H, I]; scales fp32 [E, 2 I] and [E, H].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.int8 import BLOCK_K, launch_quantize_int8, quantize_int8_op
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.moe.experts import gate_up_rows, pairs_by_expert, store_gated
from unisono.kernels.moe.plan import (
    ExpertPlan,
    Shapes,
    product_case,
    product_launch,
    program_place,
    store_pairs,
    tile_of,
    tile_pairs,
    tile_rows,
    tokens_of,
)
from unisono.kernels.norm.activation import gated_cpu
from unisono.kernels.overlap import follow, overlapped

_TILES = {  # rows of a plan's tile -> blocking
    16: ExpertTiles(Tile(16, 64, BLOCK_K, 4, 4, across=True), Tile(16, 64, BLOCK_K, 4, 4, across=True)),
    32: ExpertTiles(Tile(32, 64, BLOCK_K, 4, 4, across=True), Tile(32, 64, BLOCK_K, 4, 4, across=True)),
    64: ExpertTiles(Tile(64, 128, BLOCK_K, 4, 3, across=True), Tile(64, 128, BLOCK_K, 4, 3, across=True)),
}
"""Those of e4m3 weights, except for their loads ahead. Not tuned."""


def int8_tile_rows(pairs: int, experts: int) -> int:
    """Choose the rows of a tile in both products for this number of pairs, from shapes alone."""
    return min(tile_of(pairs, experts), max(_TILES))


@triton.jit
def _int8_product(x_ptrs, valid, x_scales, w_ptrs, w_scales, K: tl.constexpr, TILE: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Compute the products of a tile, fp32 [TILE, BLOCK_N]. Pointers have the shapes [TILE, BLOCK_K], [TILE],
    [BLOCK_N, BLOCK_K], [BLOCK_N].
    """
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, TILE), tl.int32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + k, mask=valid[:, None], other=0)
            w = tl.load(w_ptrs + k)
        else:
            x = tl.load(x_ptrs + k, mask=valid[:, None] & (ks < K - k)[None, :], other=0)
            w = tl.load(w_ptrs + k, mask=(ks < K - k)[None, :], other=0)
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    y = tl.trans(acc).to(tl.float32) * tl.load(x_scales, mask=valid, other=0.0)[:, None]
    return y * tl.load(w_scales)[None, :]


@triton.jit
def _int8_gate_up_kernel(x8, x_scales, weight, w_scales, h, ids, order, tiles, M, count,
                         H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                         TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACROSS: tl.constexpr,
                         RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr, GELU: tl.constexpr,
                         OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
    follow(OVERLAP)
    HALF: tl.constexpr = BLOCK_N // 2
    t, part = program_place(tl.cdiv(I, HALF), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    ks, r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    rows = e.to(tl.int64) * (2 * I) + tl.minimum(part * HALF + r % HALF, I - 1) + (r // HALF) * I
    w_ptrs = weight + rows[:, None] * H + ks[None, :]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        token = tokens_of(pair, M, TOP_K).to(tl.int64)
        x_ptrs = x8 + token[:, None] * H + ks[None, :]
        y = _int8_product(x_ptrs, valid, x_scales + token, w_ptrs, w_scales + rows, H, TILE, BLOCK_N, BLOCK_K)
        store_gated(h, y, part, pair, valid, I, TILE, HALF, GELU)


@triton.jit
def _int8_down_kernel(h8, h_scales, weight, w_scales, y, ids, order, tiles, M, count,
                      H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                      TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACROSS: tl.constexpr,
                      RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    ks, cols = tl.arange(0, BLOCK_K), part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = e.to(tl.int64) * H + tl.minimum(cols, H - 1)
    w_ptrs = weight + rows[:, None] * I + ks[None, :]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        own = pair.to(tl.int64)
        x_ptrs = h8 + own[:, None] * I + ks[None, :]
        product = _int8_product(x_ptrs, valid, h_scales + own, w_ptrs, w_scales + rows, I, TILE, BLOCK_N, BLOCK_K)
        store_pairs(y, product, pair, valid, cols, H)


def _blocking(tile: Tile) -> dict[str, int]:
    """Compile-time arguments of the tile."""
    return {"BLOCK_N": tile.n, "BLOCK_K": tile.k, "num_warps": tile.warps, "num_stages": tile.stages}


def _launch_gate_up(x8, scales, dtype, weight, w_scales, plan, gelu):
    inner, tile = weight.shape[1] // 2, _TILES[plan.tile].up
    parts = triton.cdiv(inner, tile.n // 2)
    grid, results, options = product_launch(plan, len(weight), x8.shape[1], inner, parts, tile.across)
    h = x8.new_empty(results, inner, dtype=dtype)
    _int8_gate_up_kernel[grid](
        x8, scales, weight, w_scales, h, *plan.operands, **options, **_blocking(tile), GELU=gelu,
        **overlapped(x8.device),
    )  # fmt: skip
    return h


def _launch_down(h8, scales, dtype, weight, w_scales, plan):
    hidden, tile = weight.shape[1], _TILES[plan.tile].down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h8.shape[1], parts, tile.across)
    y = h8.new_empty(results, hidden, dtype=dtype)
    _int8_down_kernel[grid](
        h8, scales, weight, w_scales, y, *plan.operands, **options, **_blocking(tile), **overlapped(h8.device),
    )  # fmt: skip
    return y


def launch_int8_gate_up(
    x: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan, gelu: bool = False
) -> torch.Tensor:
    """Launch the kernels of :func:`expert_int8_gate_up`."""
    x8, scales, _ = launch_quantize_int8(x, None, False)
    return _launch_gate_up(x8, scales, x.dtype, weight, w_scales, plan, gelu)


def launch_int8_down(h: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
    """Launch the kernels of :func:`expert_int8_down`."""
    h8, scales, _ = launch_quantize_int8(h, None, False)
    return _launch_down(h8, scales, h.dtype, weight, w_scales, plan)


def _gate_up_cuda(x8, scales, dtype, weight, w_scales, ids, experts, tile, order, tiles, gelu=False):
    return _launch_gate_up(x8, scales, dtype, weight, w_scales, ExpertPlan(ids, experts, tile, order, tiles), gelu)


def _down_cuda(h8, scales, dtype, weight, w_scales, ids, experts, tile, order, tiles):
    return _launch_down(h8, scales, dtype, weight, w_scales, ExpertPlan(ids, experts, tile, order, tiles))


def _gate_up_meta(x8, dtype, weight, ids, experts):
    return gate_up_rows(x8, weight, ids, experts, dtype)


def _down_meta(h8, dtype, weight):
    return h8.new_empty(h8.shape[0], weight.shape[1], dtype=dtype)


def _product_cpu(x8: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor) -> torch.Tensor:
    """Compute one expert's product, fp32 [rows, N]."""
    total = (x8.double() @ weight.double().t()).to(torch.int32)  # exact
    return (total.float() * scales[:, None]) * w_scales


@op(cuda=_gate_up_cuda, meta=_gate_up_meta)
def expert_int8_gate_up_op(
    x8: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    h = gate_up_rows(x8, weight, ids, experts, dtype=dtype)
    for expert, pairs, tokens in pairs_by_expert(ids, experts, len(weight)):
        product = _product_cpu(x8[tokens], scales[tokens], weight[expert], w_scales[expert]).to(dtype)
        h[pairs] = gated_cpu(product, None, 1.0, 0.0, gelu)
    return h


@op(cuda=_down_cuda, meta=_down_meta)
def expert_int8_down_op(
    h8: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    y = _down_meta(h8, dtype, weight)
    for expert, pairs, _ in pairs_by_expert(ids, experts, len(weight)):
        y[pairs] = _product_cpu(h8[pairs], scales[pairs], weight[expert], w_scales[expert]).to(dtype)
    return y


def expert_int8_gate_up(
    x: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan, gelu: bool = False
) -> torch.Tensor:
    """Compute ``silu(gate(x)) * up(x)`` of each pair for x [M, H]: [P (+ M), I] in x's dtype.

    gelu: GELU by tanh in place of SiLU. Rounded after the products, after SiLU and after its product. Rows of pairs
    without an expert are not written.
    """
    x8, scales, _ = quantize_int8_op(x, None, False)
    return expert_int8_gate_up_op(x8, scales, x.dtype, weight, w_scales, *plan, gelu)


def expert_int8_down(h: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
    """Multiply each row of h [P (+ M), I] by its expert's weight, int8 [E, H, I]: [P (+ M), H] in h's dtype."""
    h8, scales, _ = quantize_int8_op(h, None, False)
    return expert_int8_down_op(h8, scales, h.dtype, weight, w_scales, *plan)


def _aot(dtype: str, shapes: Shapes, gelu: bool = False) -> list[AotCase]:
    """AotCases of both products."""
    tile_m, cases = int8_tile_rows(shapes.rows * shapes.top_k, shapes.experts), []
    chosen = _TILES[tile_m]
    for kernel, names, tile in (
        (_int8_gate_up_kernel, "x8 x_scales h", chosen.up),
        (_int8_down_kernel, "h8 h_scales y", chosen.down),
    ):
        x, scales, out = names.split()
        tensors = {x: "*i8", "weight": "*i8", scales: "*fp32", "w_scales": "*fp32", out: f"*{dtype}"}
        options = _blocking(tile) | ({"GELU": gelu} if kernel is _int8_gate_up_kernel else {})
        cases.append(product_case(kernel, tensors, shapes, tile_m, tile.across, options))
    return cases


AOT: list[AotCase] = [
    *(case for rows in (1, 512, 4096) for case in _aot("bf16", Shapes(rows, 2048, 768, 128, 8))),
    *_aot("bf16", Shapes(16, 2048, 512, 256, 8, True)),
    *_aot("bf16", Shapes(16, 2816, 704, 128, 8), gelu=True),  # Gemma 4
    *(case for dtype in ("fp16", "fp32") for case in _aot(dtype, Shapes(16, 200, 100, 5, 2, True))),
]
