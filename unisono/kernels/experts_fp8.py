"""The matrix products of experts whose weights are e4m3. Owns ``expert_fp8_gate_up`` and ``expert_fp8_down``.

They are ``kernels/experts.py`` with the arithmetic of ``kernels/fp8.py``: a token's activations are quantised once, by
128 columns or by row as the weight's scales are, and a pair's row is the product of e4m3 values over K in steps of 128
and in order. So a row's bits are fixed by that row and its expert's weight. Weights are the tile's rows, tokens its
columns, at any number of tokens. The inner activations are quantised the same way before ``down``.

Shapes: M tokens, H features, I of an expert, E experts in the stack with one that rides along, P = M * top_k pairs,
B(n) = ceil(n / 128). Scales: w_scales of gate and up fp32 [E, 2 B(I), B(H)], gate's rows first, or [E, 2 I]; of down
[E, B(H), B(I)] or [E, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unisono.kernels.experts import down_cpu, down_rows, gate_up_cpu, gate_up_rows, store_gated
from unisono.kernels.experts_plan import (
    Plan,
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
from unisono.kernels.fp8 import e4m3_product, widened_weight
from unisono.kernels.fp8_quantize import GROUP, Quantised, launch_quantize, quantize, quantize_cpu, widened_activations
from unisono.kernels.library import AotCase, define, register
from unisono.kernels.overlap import follow, overlapped


@dataclass(frozen=True)
class Tile:
    """Blocking of a product: outputs (of gate and up together), warps, stages; ``ahead``: see ``kernels/fp8.py``."""

    n: int
    warps: int
    stages: int
    ahead: bool


@dataclass(frozen=True)
class Tiles:
    """Blocking of both products. across: as in ``kernels/experts.py``."""

    up: Tile
    down: Tile
    across: bool


_TILES = {  # by rows of a plan's tile
    16: Tiles(Tile(64, 4, 6, False), Tile(128, 4, 3, False), True),
    32: Tiles(Tile(64, 4, 4, False), Tile(64, 4, 4, False), True),
    64: Tiles(Tile(128, 4, 3, False), Tile(128, 4, 3, False), True),
}
"""For an H200: the best of those tried at 1, 16, 64, 2048 and 8192 tokens of 35B-A3B. Larger tiles were slower."""


@triton.jit
def _fp8_gate_up_kernel(x8, x_scales, weight, w_scales, h, ids, order, tiles, M, count, PADDED,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                    LEAD: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
    follow(OVERLAP)
    HALF: tl.constexpr = BLOCK_N // 2
    t, part = program_place(tl.cdiv(I, HALF), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    ks, r = tl.arange(0, 128), tl.arange(0, BLOCK_N)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    outputs, up = tl.minimum(part * HALF + r % HALF, I - 1), r // HALF
    rows = outputs + up * I
    w_ptrs = weight + e.to(tl.int64) * (2 * I * H) + rows[:, None] * H + ks[None, :]
    STEPS: tl.constexpr = (H + 127) // 128
    BLOCKS: tl.constexpr = (I + 127) // 128
    if BY_BLOCK:
        ws_ptrs = w_scales + e * (2 * BLOCKS * STEPS) + (outputs // 128 + up * BLOCKS) * STEPS
    else:
        ws_ptrs = w_scales + e * (2 * I) + rows
    EVEN: tl.constexpr = H % (512 if AHEAD else 128) == 0
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        token = tokens_of(pair, M, TOP_K)
        x_ptrs = x8 + token.to(tl.int64)[:, None] * H + ks[None, :]
        acc = e4m3_product(x_ptrs, valid, x_scales + token, w_ptrs, ws_ptrs, H, PADDED,
                           TILE, BLOCK_N, AHEAD, BY_BLOCK, True, EVEN)  # fmt: skip
        store_gated(h, tl.trans(acc), part, pair, valid, I, TILE, HALF)


@triton.jit
def _fp8_down_kernel(h8, h_scales, weight, w_scales, y, ids, order, tiles, M, count, PADDED,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                 LEAD: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                 OVERLAP: tl.constexpr):  # fmt: skip
    """y [pairs, H]."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    ks, cols = tl.arange(0, 128), part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(cols, H - 1)
    w_ptrs = weight + e.to(tl.int64) * (H * I) + rows[:, None] * I + ks[None, :]
    STEPS: tl.constexpr = (I + 127) // 128
    if BY_BLOCK:
        ws_ptrs = w_scales + (e * ((H + 127) // 128) + part * BLOCK_N // 128) * STEPS
    else:
        ws_ptrs = w_scales + e * H + rows
    EVEN: tl.constexpr = I % (512 if AHEAD else 128) == 0
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        x_ptrs = h8 + pair.to(tl.int64)[:, None] * I + ks[None, :]
        acc = e4m3_product(x_ptrs, valid, h_scales + pair, w_ptrs, ws_ptrs, I, PADDED,
                           TILE, BLOCK_N, AHEAD, BY_BLOCK, False, EVEN)  # fmt: skip
        store_pairs(y, tl.trans(acc), pair, valid, cols, H)


def fp8_tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile of a pass with this number of pairs."""
    return min(tile_of(pairs, experts), max(_TILES))


def _blocking(tile: Tile, by_block: bool) -> dict[str, int]:
    """The compile-time arguments that are the tile's and the scales'."""
    return {
        "BLOCK_N": tile.n, "AHEAD": tile.ahead, "BY_BLOCK": by_block, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


def launch_fp8_gate_up(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """The kernels of :func:`expert_fp8_gate_up`."""
    inner, tiles, by_block = weight.shape[1] // 2, _TILES[plan.tile], w_scales.dim() == 3
    x8, x_scales = launch_quantize(x, GROUP if by_block else None) if isinstance(x, torch.Tensor) else x[:2]
    parts = triton.cdiv(inner, tiles.up.n // 2)
    grid, results, options = product_launch(plan, len(weight), x8.shape[1], inner, parts, tiles.across)
    h = x8.new_empty(results, inner, dtype=x.dtype)
    _fp8_gate_up_kernel[grid](
        x8, x_scales, weight, w_scales, h, *plan.operands,
        x8.shape[0], **options, **_blocking(tiles.up, by_block), **overlapped(x8.device),
    )  # fmt: skip
    return h


def launch_fp8_down(h: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The kernels of :func:`expert_fp8_down`."""
    hidden, tiles, by_block = weight.shape[1], _TILES[plan.tile], w_scales.dim() == 3
    h8, h_scales = launch_quantize(h, GROUP if by_block else None)
    parts = triton.cdiv(hidden, tiles.down.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tiles.across)
    y = h.new_empty(results, hidden)
    _fp8_down_kernel[grid](
        h8, h_scales, weight, w_scales, y, *plan.operands,
        h8.shape[0], **options, **_blocking(tiles.down, by_block), **overlapped(h.device),
    )  # fmt: skip
    return y


def _gate_up_cuda(x8, x_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles):
    x = Quantised(x8, x_scales, GROUP if w_scales.dim() == 3 else 0, len(ids), dtype)
    return launch_fp8_gate_up(x, weight, w_scales, Plan(ids, experts, tile, order, tiles))


def _down_cuda(h, weight, w_scales, ids, experts, tile, order, tiles):
    return launch_fp8_down(h, weight, w_scales, Plan(ids, experts, tile, order, tiles))


def expert_fp8_gate_up_cpu(x8, x_scales, dtype, weight, w_scales, ids, experts, *plan):
    def widened(expert: int) -> torch.Tensor:
        halves = zip(weight[expert].chunk(2), w_scales[expert].chunk(2), strict=True)
        return torch.cat([widened_weight(half, scales) for half, scales in halves])

    h = _gate_up_meta(x8, x_scales, dtype, weight, w_scales, ids, experts)
    return gate_up_cpu(h, widened_activations(x8, x_scales), widened, ids, experts, len(weight))


def expert_fp8_down_cpu(h, weight, w_scales, ids, experts, *plan):
    values = widened_activations(*quantize_cpu(h, GROUP if w_scales.dim() == 3 else None))
    widened = lambda expert: widened_weight(weight[expert], w_scales[expert])  # noqa: E731
    return down_cpu(down_rows(h, weight), values, widened, ids, experts, len(weight))


def _gate_up_meta(x8, x_scales, dtype, weight, w_scales, *plan):
    return gate_up_rows(x8, weight, *plan, dtype=dtype)


for _name, _x, _cuda, _cpu, _meta in (
    ("gate_up", "Tensor x8, Tensor x_scales, ScalarType dtype", _gate_up_cuda, expert_fp8_gate_up_cpu, _gate_up_meta),
    ("down", "Tensor h", _down_cuda, expert_fp8_down_cpu, down_rows),
):
    define(
        f"expert_fp8_{_name}({_x}, Tensor weight, Tensor w_scales, Tensor ids, int experts, int tile, Tensor? order,"
        " Tensor? tiles) -> Tensor"
    )
    register(f"expert_fp8_{_name}", cuda=_cuda, cpu=_cpu, meta=_meta)


def expert_fp8_gate_up(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """x [M, H] -> ``silu(gate(x)) * up(x)`` of each pair, [P (+ M), I] in x's dtype; weight e4m3 [E, 2 I, H].

    x may be quantised already, as the weight's scales ask.

    Rounded after the products, after SiLU and after its product. Rows of pairs without an expert are not written.
    """
    if isinstance(x, torch.Tensor):
        x = quantize(x, GROUP if w_scales.dim() == 3 else 0)
    return torch.ops.unisono.expert_fp8_gate_up(x.x8, x.scales, x.dtype, weight, w_scales, *plan)


def expert_fp8_down(h: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: Plan) -> torch.Tensor:
    """h [P (+ M), I] -> each row times its own expert's weight, [P (+ M), H] in h's dtype; weight e4m3 [E, H, I]."""
    return torch.ops.unisono.expert_fp8_down(h, weight, w_scales, *plan)


def _aot(shapes: Shapes, by_block: bool) -> list[AotCase]:
    """Both products."""
    tile_m, cases = fp8_tile_rows(shapes.rows * shapes.top_k, shapes.experts), []
    chosen = _TILES[tile_m]
    for kernel, names, tile in (
        (_fp8_gate_up_kernel, "x8 x_scales h", chosen.up),
        (_fp8_down_kernel, "h8 h_scales y", chosen.down),
    ):
        x, scales, out = names.split()
        tensors = {x: "*fp8e4nv", "weight": "*fp8e4nv", scales: "*fp32", "w_scales": "*fp32", out: "*bf16"}
        options = _blocking(tile, by_block)
        cases.append(product_case(kernel, tensors, shapes, tile_m, chosen.across, options, "PADDED"))
    return cases


AOT: list[AotCase] = [
    *(case for rows in (1, 16, 512, 2048, 4096) for case in _aot(Shapes(rows, 2048, 512, 256, 8, True), True)),
    *(case for rows in (1, 512) for case in _aot(Shapes(rows, 2048, 768, 128, 8), False)),
    *(case for rows in (1, 64) for case in _aot(Shapes(rows, 200, 100, 5, 2, True), True)),
]
