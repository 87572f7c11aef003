"""Matrix products of experts with e4m3 weights.

Owns the ops ``expert_fp8_gate_up``, ``expert_fp8_gate_up_fp8`` (with a quantised result), ``expert_fp8_up`` (experts
without a gate) and ``expert_fp8_down``. They are ``kernels/moe/experts.py`` with the arithmetic of
``kernels/gemm/fp8.py``: a token's activations are quantised once, by 128 columns or by row like the weight's scales,
and a pair's row is the product of e4m3 values over K in steps of 128 and in order. So a row's bits depend on that row
and its expert's weight. Weights are the tile's rows, tokens its columns. The inner activations are quantised the same
way before ``down``. On Hopper, prompts' products run on the kernel of ``gluon.py`` if :data:`exact_fp8_experts` found
the same bits.

Shapes: M tokens, H features, I intermediate features, E experts in the stack with a fused shared one, P = M * top_k
pairs,
B(n) = ceil(n / 128). Scales: w_scales of gate and up fp32 [E, 2 B(I), B(H)], gate's rows first, or [E, 2 I]; of down
[E, B(H), B(I)] or [E, H].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8 import e4m3_product, widened_weight
from unisono.kernels.gemm.fp8_quantize import (
    GROUP,
    Quantised,
    empty_quantised,
    launch_quantize,
    padded_quantize_cpu,
    quantize,
    widened_activations,
)
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.library import AotCase, op
from unisono.kernels.moe import gluon as experts_gluon
from unisono.kernels.moe.experts import (
    Products,
    down_cpu,
    gate_up_cpu,
    gate_up_rows,
    same_products,
    store_gated,
    up_cpu,
    up_rows,
)
from unisono.kernels.moe.plan import (
    LEAD_PAIRS,
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
from unisono.kernels.norm.activation import relu_squared_product
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

Operands = tuple[torch.Tensor, torch.Tensor]
"""(weight, scales) of a stack."""

_Key = tuple[torch.Size, int, torch.dtype]
"""(shape of a stack, dimensions of its scales, dtype of activations)."""


_TILES = {  # rows of a plan's tile -> blocking
    16: ExpertTiles(Tile(16, 64, 128, 4, 6, across=True), Tile(16, 128, 128, 4, 2, across=True)),
    32: ExpertTiles(Tile(32, 64, 128, 4, 4, across=True), Tile(32, 64, 128, 4, 4, across=True)),
    64: ExpertTiles(Tile(64, 128, 128, 4, 3, across=True), Tile(64, 128, 128, 4, 3, across=True)),
}
"""Fastest tiles on an H200 at 64, 2048 and 8192 tokens of 35B-A3B. Larger tiles were slower."""

_TILES_OF_FEW = {  # maximum pairs of a plan that is not sorted -> blocking
    16: ExpertTiles(Tile(16, 64, 128, 4, 6, across=True), Tile(16, 64, 128, 4, 3, across=True)),
    LEAD_PAIRS: ExpertTiles(Tile(16, 128, 128, 4, 3, across=True), Tile(16, 128, 128, 4, 2, across=True)),
}
"""Fastest tiles of unsorted plans on an H200, at 1, 4 and 16 tokens: ``python -m benchmarks.fp8_experts``."""


@triton.jit
def _fp8_gate_up_kernel(x8, x_scales, weight, w_scales, h, ids, order, tiles, M, count, PADDED,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                    LEAD: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                    GELU: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
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
        store_gated(h, tl.trans(acc), part, pair, valid, I, TILE, HALF, GELU)


@triton.jit
def _fp8_down_kernel(h8, h_scales, weight, w_scales, y, ids, order, tiles, M, count, PADDED,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                 LEAD: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, BY_BLOCK: tl.constexpr,
                 UP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]. UP: h has a row for each token, and y is ReLU²."""
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
        source = tokens_of(pair, M, TOP_K) if UP else pair
        x_ptrs = h8 + source.to(tl.int64)[:, None] * I + ks[None, :]
        acc = e4m3_product(x_ptrs, valid, h_scales + source, w_ptrs, ws_ptrs, I, PADDED,
                           TILE, BLOCK_N, AHEAD, BY_BLOCK, False, EVEN)  # fmt: skip
        acc = tl.trans(acc)
        if UP:
            acc = relu_squared_product(acc, y.dtype.element_ty)
        store_pairs(y, acc, pair, valid, cols, H)


def fp8_tile_rows(pairs: int, experts: int) -> int:
    """Choose the rows of a tile for this number of pairs, for the kernels here."""
    return min(tile_of(pairs, experts), max(_TILES))


def fp8_expert_tile(pairs: int, experts: int, gate_up: Operands, dtype: torch.dtype) -> int:
    """Choose the rows of a tile in both products of a pass: those of ``gluon.py`` if its kernel serves this one.

    gate_up: the stack of gate and up. dtype: dtype of activations.
    """
    if (
        pairs > LEAD_PAIRS
        and pairs >= experts_gluon.FEWEST * experts
        and exact_fp8_experts.serves(_key(gate_up, dtype))
    ):
        return experts_gluon.TILE_PAIRS
    return fp8_tile_rows(pairs, experts)


def _tiles_of(rows: int, pairs: int) -> ExpertTiles:
    """Blocking of the products of a plan with tiles of so many rows."""
    few = (tiles for most, tiles in _TILES_OF_FEW.items() if pairs <= most and rows == tiles.rows)
    return next(few, _TILES[rows])


def _key(operands: Operands, dtype: torch.dtype) -> _Key:
    weight, w_scales = operands
    return weight.shape, w_scales.dim(), dtype


def _same_bits(gate_up: Operands, down: Operands, dtype: torch.dtype, experts: int, top_k: int) -> bool:
    """Compare both products, and with scales by block also the quantised result of the first one."""
    if not (experts_gluon.suits(gate_up[0]) and experts_gluon.suits(down[0])):
        return False

    def products(tile: int, quantises: bool) -> Products:
        def first(x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
            if not quantises:
                return launch_fp8_gate_up(x, *gate_up, plan)
            x8, x_scales = launch_quantize(x, GROUP)
            h8, scales = _gate_up_fp8_cuda(x8, x_scales, dtype, *gate_up, *plan)
            rows = experts_gluon.result_rows(gate_up[0], plan)
            return torch.cat((h8[:rows].float(), scales.t()[:rows]), 1)

        return Products(tile, first, lambda h, plan: launch_fp8_down(h, *down, plan))

    inputs = gate_up[0].shape[2], down[0].shape[2]
    for quantises in (False, True) if gate_up[1].dim() == 3 else (False,):
        ours, prompts = (products(tile, quantises) for tile in (max(_TILES), experts_gluon.TILE_PAIRS))
        if not same_products(ours, prompts, inputs, dtype, experts, top_k, gate_up[0].device):
            return False
    return True


exact_fp8_experts = ExactKernel(
    "fp8 experts of prompts",
    lambda gate_up, down, dtype, experts, top_k: (_key(gate_up, dtype), _key(down, dtype)),
    _same_bits,
)
"""The kernel of ``gluon.py`` for prompts, against the kernels here, by e4m3 stacks and dtype of activations."""


def _blocking(tile: Tile, by_block: bool) -> dict[str, int]:
    """Compile-time arguments of the tile and the scales."""
    return {
        "BLOCK_N": tile.n, "AHEAD": tile.ahead, "BY_BLOCK": by_block, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


def _group(w_scales: torch.Tensor) -> int:
    """Columns of activations that share a scale, by the kind of the weight's scales; 0: all."""
    return GROUP if w_scales.dim() == 3 else 0


def _launched(x: torch.Tensor | Quantised, w_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in e4m3 and its scales, quantised here if x is not."""
    return launch_quantize(x, _group(w_scales) or None) if isinstance(x, torch.Tensor) else x[:2]


def launch_fp8_gate_up(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan, gelu: bool = False
) -> torch.Tensor:
    """Launch the kernels of :func:`expert_fp8_gate_up`."""
    inner, by_block = weight.shape[1] // 2, w_scales.dim() == 3
    x8, x_scales = _launched(x, w_scales)
    if plan.tile == experts_gluon.TILE_PAIRS:
        return experts_gluon.launch_expert_rows(x8, weight, plan, True, x_scales, w_scales, x.dtype)
    tiles = _tiles_of(plan.tile, plan.ids.numel())
    parts = triton.cdiv(inner, tiles.up.n // 2)
    grid, results, options = product_launch(plan, len(weight), x8.shape[1], inner, parts, tiles.up.across)
    h = x8.new_empty(results, inner, dtype=x.dtype)
    _fp8_gate_up_kernel[grid](
        x8, x_scales, weight, w_scales, h, *plan.operands,
        x8.shape[0], **options, **_blocking(tiles.up, by_block), GELU=gelu, **overlapped(x8.device),
    )  # fmt: skip
    return h


def launch_fp8_down(
    h: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan, up: bool = False
) -> torch.Tensor:
    """Launch the kernels of :func:`expert_fp8_down`, or of :func:`expert_fp8_up`."""
    hidden, by_block = weight.shape[1], w_scales.dim() == 3
    h8, h_scales = _launched(h, w_scales)
    if plan.tile == experts_gluon.TILE_PAIRS:
        return experts_gluon.launch_expert_rows(h8, weight, plan, False, h_scales, w_scales, h.dtype)
    tiles = _tiles_of(plan.tile, plan.ids.numel())
    parts = triton.cdiv(hidden, tiles.down.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h8.shape[1], parts, tiles.up.across)
    y = h8.new_empty(results, hidden, dtype=h.dtype)
    _fp8_down_kernel[grid](
        h8, h_scales, weight, w_scales, y, *plan.operands,
        h8.shape[0], **options, **_blocking(tiles.down, by_block), UP=up, **overlapped(h8.device),
    )  # fmt: skip
    return y


def _as_quantised(x8, x_scales, dtype, w_scales, rows):
    return Quantised(x8, x_scales, _group(w_scales), rows, dtype)


def _gate_up_cuda(x8, x_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles, gelu=False):
    x = _as_quantised(x8, x_scales, dtype, w_scales, len(ids))
    return launch_fp8_gate_up(x, weight, w_scales, ExpertPlan(ids, experts, tile, order, tiles), gelu)


def _gate_up_fp8_cuda(x8, x_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles):
    plan = ExpertPlan(ids, experts, tile, order, tiles)
    if tile == experts_gluon.TILE_PAIRS:
        return experts_gluon.launch_quantised_rows(x8, x_scales, weight, w_scales, plan, dtype)
    x = _as_quantised(x8, x_scales, dtype, w_scales, len(ids))
    return launch_quantize(launch_fp8_gate_up(x, weight, w_scales, plan), GROUP)


def _down_cuda(h8, h_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles):
    h = _as_quantised(h8, h_scales, dtype, w_scales, 0)
    return launch_fp8_down(h, weight, w_scales, ExpertPlan(ids, experts, tile, order, tiles))


def _up_cuda(x8, x_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles):
    x = _as_quantised(x8, x_scales, dtype, w_scales, len(ids))
    return launch_fp8_down(x, weight, w_scales, ExpertPlan(ids, experts, tile, order, tiles), up=True)


def _up_meta(x8, dtype, weight, ids):
    return up_rows(x8, weight, ids, dtype)


def _gate_up_meta(x8, dtype, weight, ids, experts):
    return gate_up_rows(x8, weight, ids, experts, dtype)


def _gate_up_fp8_meta(x8, dtype, weight, ids, experts):
    h = _gate_up_meta(x8, dtype, weight, ids, experts)
    return empty_quantised(h, h.shape[0], h.shape[1], GROUP)


def _down_meta(x8, dtype, weight, ids, experts):
    return x8.new_empty(experts_gluon.result_rows(weight, ExpertPlan(ids, experts, 0)), weight.shape[1], dtype=dtype)


@op(cuda=_gate_up_cuda, meta=_gate_up_meta)
def expert_fp8_gate_up_op(
    x8: torch.Tensor, x_scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    def widened(expert: int) -> torch.Tensor:
        halves = zip(weight[expert].chunk(2), w_scales[expert].chunk(2), strict=True)
        return torch.cat([widened_weight(half, scales) for half, scales in halves])

    h = _gate_up_meta(x8, dtype, weight, ids, experts)
    return gate_up_cpu(h, widened_activations(x8, x_scales), widened, ids, experts, len(weight), gelu=gelu)


@op(cuda=_gate_up_fp8_cuda, meta=_gate_up_fp8_meta)
def expert_fp8_gate_up_fp8_op(
    x8: torch.Tensor, x_scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    h = expert_fp8_gate_up_op.cpu(x8, x_scales, dtype, weight, w_scales, ids, experts, tile, order, tiles)
    return padded_quantize_cpu(h, GROUP)


@op(cuda=_down_cuda, meta=_down_meta)
def expert_fp8_down_op(
    x8: torch.Tensor, x_scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    widened = lambda expert: widened_weight(weight[expert], w_scales[expert])  # noqa: E731
    y = _down_meta(x8, dtype, weight, ids, experts)
    return down_cpu(y, widened_activations(x8, x_scales), widened, ids, experts, len(weight))


@op(cuda=_up_cuda, meta=_up_meta)
def expert_fp8_up_op(
    x8: torch.Tensor, x_scales: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, w_scales: torch.Tensor,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    widened = lambda expert: widened_weight(weight[expert], w_scales[expert])  # noqa: E731
    h = _up_meta(x8, dtype, weight, ids)
    return up_cpu(h, widened_activations(x8, x_scales), widened, ids, experts)


def _operand(x: torch.Tensor | Quantised, w_scales: torch.Tensor) -> Quantised:
    """Quantise x for the weight's scales, if it is not quantised."""
    return quantize(x, _group(w_scales)) if isinstance(x, torch.Tensor) else x


def expert_fp8_gate_up(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan, gelu: bool = False
) -> torch.Tensor:
    """Compute ``silu(gate(x)) * up(x)`` of each pair for x [M, H]: [P (+ M), I] in x's dtype. weight e4m3 [E, 2 I, H].

    gelu: GELU by tanh in place of SiLU; the plan's tile must not be that of ``experts_gluon``. x may be quantised
    already, for the weight's scales.

    Rounded after the products, after SiLU and after its product. Rows of pairs without an expert are not written.
    """
    x = _operand(x, w_scales)
    return expert_fp8_gate_up_op(x.x8, x.scales, x.dtype, weight, w_scales, *plan, gelu)


def expert_fp8_gate_up_fp8(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan
) -> Quantised:
    """Compute :func:`expert_fp8_gate_up` of a weight with scales by block, quantised for :func:`expert_fp8_down`.

    Rows of padding and of pairs without an expert are undefined.
    """
    x = _operand(x, w_scales)
    h8, scales = expert_fp8_gate_up_fp8_op(x.x8, x.scales, x.dtype, weight, w_scales, *plan)
    return Quantised(h8, scales, GROUP, experts_gluon.result_rows(weight, plan), x.dtype)


def expert_fp8_down(
    h: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan
) -> torch.Tensor:
    """Multiply each row of h [P (+ M), I] by its expert's weight, e4m3 [E, H, I]: [P (+ M), H] in h's dtype.

    h may be quantised already, for the weight's scales.
    """
    h = _operand(h, w_scales)
    return expert_fp8_down_op(h.x8, h.scales, h.dtype, weight, w_scales, *plan)


def expert_fp8_up(
    x: torch.Tensor | Quantised, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan
) -> torch.Tensor:
    """Compute ``relu(x @ up^T)²`` of each pair for x [M, H] and experts without a gate, e4m3 [E, I, H]: [P, I] in x's
    dtype.

    The plan's tile must not be that of ``experts_gluon``. x may be quantised already, for the weight's scales. Rounded
    after the product and after the square. Rows of pairs without an expert are not written.
    """
    x = _operand(x, w_scales)
    return expert_fp8_up_op(x.x8, x.scales, x.dtype, weight, w_scales, *plan)


def _aot(shapes: Shapes, by_block: bool, gelu: bool = False) -> list[AotCase]:
    """AotCases of both products."""
    tile_m, cases = fp8_tile_rows(shapes.rows * shapes.top_k, shapes.experts), []
    chosen = _tiles_of(tile_m, shapes.rows * shapes.top_k)
    for kernel, names, tile in (
        (_fp8_gate_up_kernel, "x8 x_scales h", chosen.up),
        (_fp8_down_kernel, "h8 h_scales y", chosen.down),
    ):
        x, scales, out = names.split()
        tensors = {x: "*fp8e4nv", "weight": "*fp8e4nv", scales: "*fp32", "w_scales": "*fp32", out: "*bf16"}
        options = _blocking(tile, by_block) | ({"GELU": gelu} if kernel is _fp8_gate_up_kernel else {"UP": False})
        cases.append(product_case(kernel, tensors, shapes, tile_m, chosen.up.across, options, "PADDED"))
    return cases


def _aot_up(shapes: Shapes, by_block: bool) -> AotCase:
    """AotCase of the first product of experts without a gate, which is a ``down`` from H to I."""
    tile_m = fp8_tile_rows(shapes.rows * shapes.top_k, shapes.experts)
    tensors = {"h8": "*fp8e4nv", "weight": "*fp8e4nv", "h_scales": "*fp32", "w_scales": "*fp32", "y": "*bf16"}
    turned = shapes._replace(hidden=shapes.inner, inner=shapes.hidden)
    chosen = _tiles_of(tile_m, shapes.rows * shapes.top_k)
    options = _blocking(chosen.down, by_block) | {"UP": True}
    return product_case(_fp8_down_kernel, tensors, turned, tile_m, chosen.up.across, options, "PADDED")


AOT: list[AotCase] = [
    *(case for rows in (1, 16, 64, 512, 2048, 4096) for case in _aot(Shapes(rows, 2048, 512, 256, 8, True), True)),
    *(case for rows in (1, 512) for case in _aot(Shapes(rows, 2048, 768, 128, 8), False)),
    *_aot(Shapes(16, 2816, 704, 128, 8), True, gelu=True),  # Gemma 4
    *(case for rows in (1, 64) for case in _aot(Shapes(rows, 200, 100, 5, 2, True), True)),
    *(_aot_up(Shapes(rows, 2688, 1856, 128, 6), blocks) for rows in (1, 64, 2048) for blocks in (False, True)),
]
