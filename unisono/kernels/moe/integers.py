"""Matrix products of experts with weights of 4 or 8 bits.

Owns the ops ``expert_integer_gate_up``, ``expert_integer_up`` (experts without a gate) and ``expert_integer_down``.

They are ``kernels/moe/experts.py`` with weights that are decoded in registers (``integer_product`` of
``kernels/gemm/decoded.py``) and rounded to the activations' dtype: the same product of the same values in the same
order, at any number of tokens. On Hopper 4-bit weights run on the kernel of ``packed_gluon.py`` if
:data:`exact_int4_experts` found the same bits.

Shapes: M tokens, H features, I intermediate features, E experts in the stack with a fused shared one, P = M * top_k
pairs, G(k) = ceil(k / group). Weights uint8 [E, 2 I, H / b] and [E, H, I / b] with b numbers in a byte, 2 or 1, which
the shapes tell; scales fp32 and zeros int8 or int16 [E, 2 I, G(H)] and [E, H, G(I)].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, shared_memory
from unisono.kernels.gemm.decoded import integer_product, integer_steps
from unisono.kernels.gemm.int4 import unpack_cpu
from unisono.kernels.gemm.int8_weights import int8_decode
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.library import DTYPES, AotCase, op
from unisono.kernels.moe.experts import (
    down_cpu,
    down_rows,
    gate_up_cpu,
    gate_up_rows,
    store_gated,
    up_cpu,
    up_rows,
)
from unisono.kernels.moe.packed_gluon import PackedExperts
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
from unisono.kernels.norm.activation import relu_squared_product
from unisono.kernels.overlap import follow, overlapped

TILES = {
    16: ExpertTiles(Tile(16, 64, 0, 4, 4, across=True), Tile(16, 64, 0, 4, 4, across=True)),
    32: ExpertTiles(Tile(32, 128, 0, 4, 3), Tile(32, 64, 0, 4, 3)),
    64: ExpertTiles(Tile(64, 128, 0, 8, 3), Tile(64, 128, 0, 8, 3)),
    128: ExpertTiles(Tile(128, 128, 0, 8, 2), Tile(128, 128, 0, 8, 2)),
}
"""Blocking by rows of a plan's tile. Also used for MXFP4 weights, for which it was not tuned."""

_LARGE_TILES = 161 * 1024
"""Bytes of shared memory that tiles of 64 and 128 rows take at most."""


def packed_tiles(rows: int, shared: int = HOPPER) -> ExpertTiles:
    """Choose the blocking of a plan's tile. shared: bytes of shared memory of a block; few take a stage less."""
    tiles = TILES[rows]
    if rows < 64 or shared >= _LARGE_TILES:
        return tiles
    return ExpertTiles(*(tile._replace(stages=tile.stages - 1) for tile in tiles))


def integer_tiles(rows: int, shared: int, group: int, each: int) -> ExpertTiles:
    """:func:`packed_tiles`; on small cards 8-bit weights in groups of 32 leave room for one stage, or one less in tiles
    of few rows, whose activations may be fp32. each: numbers in a byte."""
    tiles = packed_tiles(rows, shared)
    if shared >= _LARGE_TILES or each > 1 or group % 64 == 0:
        return tiles
    return ExpertTiles(*(tile._replace(stages=tile.stages - 1 if rows < 64 else 1) for tile in tiles))


def packed_tile_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Choose the rows of a tile in both products for this number of pairs, from shapes alone."""
    return 16 if dtype is torch.float32 else tile_of(pairs, experts)


@triton.jit
def _integer_gate_up_kernel(x, weight, scales, zeros, h, ids, order, tiles, M, count, group,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                    LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                    HAS_ZEROS: tl.constexpr, EACH: tl.constexpr, GELU: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
    follow(OVERLAP)
    HALF: tl.constexpr = BLOCK_N // 2
    t, part = program_place(tl.cdiv(I, HALF), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    r = tl.arange(0, BLOCK_N)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    rows = tl.minimum(part * HALF + r % HALF, I - 1) + (r // HALF) * I
    w_ptrs = weight + e.to(tl.int64) * (2 * I * H // EACH)
    w_ptrs = w_ptrs + rows[:, None] * (H // EACH) + tl.arange(0, WIDTH // EACH)[None, :]
    of_rows = (e.to(tl.int64) * (2 * I) + rows) * tl.cdiv(H, group)
    z_ptrs = zeros + of_rows if HAS_ZEROS else zeros
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        x_ptrs = x + tokens_of(pair, M, TOP_K).to(tl.int64)[:, None] * H + tl.arange(0, WIDTH)[None, :]
        acc = integer_product(x_ptrs, valid, w_ptrs, scales + of_rows, z_ptrs, H, group,
                           TILE, BLOCK_N, WIDTH, STEPS, H % (WIDTH * STEPS) == 0, HAS_ZEROS, EACH)  # fmt: skip
        store_gated(h, acc, part, pair, valid, I, TILE, HALF, GELU)


@triton.jit
def _integer_down_kernel(h, weight, scales, zeros, y, ids, order, tiles, M, count, group,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                 LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                 HAS_ZEROS: tl.constexpr, EACH: tl.constexpr, UP: tl.constexpr,
                 OVERLAP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]. UP: h has a row for each token, and y is ReLU²."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(cols, H - 1)
    w_ptrs = weight + e.to(tl.int64) * (H * I // EACH)
    w_ptrs = w_ptrs + rows[:, None] * (I // EACH) + tl.arange(0, WIDTH // EACH)[None, :]
    of_rows = (e.to(tl.int64) * H + rows) * tl.cdiv(I, group)
    z_ptrs = zeros + of_rows if HAS_ZEROS else zeros
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        source = tokens_of(pair, M, TOP_K) if UP else pair
        x_ptrs = h + source.to(tl.int64)[:, None] * I + tl.arange(0, WIDTH)[None, :]
        acc = integer_product(x_ptrs, valid, w_ptrs, scales + of_rows, z_ptrs, I, group,
                           TILE, BLOCK_N, WIDTH, STEPS, I % (WIDTH * STEPS) == 0, HAS_ZEROS, EACH)  # fmt: skip
        if UP:
            acc = relu_squared_product(acc, y.dtype.element_ty)
        store_pairs(y, acc, pair, valid, cols, H)


def _blocking(tile: Tile, group: int, has_zeros: bool, each: int) -> dict[str, int]:
    """Compile-time arguments of the tile and the weight. each: numbers in a byte."""
    width, steps = integer_steps(group)
    return {
        "BLOCK_N": tile.n, "WIDTH": width, "STEPS": steps, "HAS_ZEROS": has_zeros, "EACH": each,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def launch_integer_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
    gelu: bool = False,
) -> torch.Tensor:
    """Launch the kernel of :func:`expert_integer_gate_up`."""
    x, inner, each = x.contiguous(), weight.shape[1] // 2, x.shape[1] // weight.shape[2]
    tile = integer_tiles(plan.tile, shared_memory(x.device), group, each).up
    parts = triton.cdiv(inner, tile.n // 2)
    grid, results, options = product_launch(plan, len(weight), x.shape[1], inner, parts, tile.across)
    h = x.new_empty(results, inner)
    _integer_gate_up_kernel[grid](
        x, weight, scales, zeros, h, *plan.operands, group, **options,
        **_blocking(tile, group, zeros is not None, each), GELU=gelu, **overlapped(x.device),
    )  # fmt: skip
    return h


def launch_integer_down(
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
    up: bool = False,
) -> torch.Tensor:
    """Launch the kernel of :func:`expert_integer_down`, or of :func:`expert_integer_up`."""
    h, hidden, each = h.contiguous(), weight.shape[1], h.shape[1] // weight.shape[2]
    tile = integer_tiles(plan.tile, shared_memory(h.device), group, each).down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tile.across)
    y = h.new_empty(results, hidden)
    _integer_down_kernel[grid](
        h, weight, scales, zeros, y, *plan.operands, group,
        **options, **_blocking(tile, group, zeros is not None, each), UP=up,
        **overlapped(h.device),
    )  # fmt: skip
    return y


exact_int4_experts = PackedExperts(
    "int4 experts",
    lambda *operands: operands,
    launch_integer_gate_up,
    functools.partial(launch_integer_down, up=True),
    launch_integer_down,
)
"""The kernel of ``packed_gluon.py``, against the kernels here with two numbers in a byte."""


def _gate_up_cuda(x, weight, scales, zeros, group, ids, experts, tile, order, tiles, gelu=False):
    operands, plan = (weight, scales, zeros, group), ExpertPlan(ids, experts, tile, order, tiles)
    if not gelu and weight.shape[2] < x.shape[1] and exact_int4_experts.runs(x, plan, True, *operands):
        return exact_int4_experts.launch(x, plan, True, False, *operands)
    return launch_integer_gate_up(x, *operands, plan, gelu)


def _down_cuda(h, weight, scales, zeros, group, ids, experts, tile, order, tiles, up=False):
    operands, plan = (weight, scales, zeros, group), ExpertPlan(ids, experts, tile, order, tiles)
    if weight.shape[2] < h.shape[1] and exact_int4_experts.runs(h, plan, False, *operands):
        return exact_int4_experts.launch(h, plan, False, up, *operands)
    return launch_integer_down(h, *operands, plan, up)


def _up_cuda(*args):
    return _down_cuda(*args, up=True)


def _decoded(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, x: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    """Make a function that decodes one expert's weight for the product with x."""
    decode = int8_decode if weight.shape[2] == x.shape[1] else unpack_cpu
    return lambda e: decode(weight[e], scales[e], None if zeros is None else zeros[e], group, x.dtype)


@op(cuda=_gate_up_cuda, meta=gate_up_rows)
def expert_integer_gate_up_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    h, decoded = gate_up_rows(x, weight, ids, experts), _decoded(weight, scales, zeros, group, x)
    return gate_up_cpu(h, x, decoded, ids, experts, len(weight), gelu=gelu)


@op(cuda=_down_cuda, meta=down_rows)
def expert_integer_down_op(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    decoded = _decoded(weight, scales, zeros, group, h)
    return down_cpu(down_rows(h, weight), h, decoded, ids, experts, len(weight))


@op(cuda=_up_cuda, meta=up_rows)
def expert_integer_up_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int,
    ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    decoded = _decoded(weight, scales, zeros, group, x)
    return up_cpu(up_rows(x, weight, ids), x, decoded, ids, experts)


def expert_integer_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
    gelu: bool = False,
) -> torch.Tensor:
    """Compute ``silu(gate(x)) * up(x)`` of each pair for x [M, H]: [P (+ M), I] in x's dtype; gate's rows first in the
    weight.

    gelu: GELU by tanh in place of SiLU. group: inputs that share a scale, as in ``int4_linear``. Rounded after the
    products, after SiLU and after its product. Rows of pairs without an expert are not written.
    """
    return expert_integer_gate_up_op(x, weight, scales, zeros, group, *plan, gelu)


def expert_integer_down(
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
) -> torch.Tensor:
    """Multiply each row of h [P (+ M), I] by its expert's weight: [P (+ M), H] in h's dtype."""
    return expert_integer_down_op(h, weight, scales, zeros, group, *plan)


def expert_integer_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
) -> torch.Tensor:
    """Compute ``relu(x @ up^T)²`` of each pair for x [M, H] and experts without a gate: [P, I] in x's dtype.

    Rounded after the product and after the square. Rows of pairs without an expert are not written.
    """
    return expert_integer_up_op(x, weight, scales, zeros, group, *plan)


def _aot(shared: int, dtype: str, shapes: Shapes, group: int, gelu: bool = False, each: int = 2) -> list[AotCase]:
    """AotCases of both products. With a fused shared expert there are zeros. each: numbers in a byte."""
    tile_m, zeros, cases = packed_tile_rows(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype]), shapes.rides, []
    tiles, stored_zeros = integer_tiles(tile_m, shared, group, each), "*i8" if each == 2 else "*i16"
    for kernel, (x, out), tile in ((_integer_gate_up_kernel, "xh", tiles.up), (_integer_down_kernel, "hy", tiles.down)):
        tensors = {x: f"*{dtype}", "weight": "*u8", "scales": "*fp32", "zeros": stored_zeros, out: f"*{dtype}"}
        options = _blocking(tile, group, zeros, each)
        options |= {"GELU": gelu} if kernel is _integer_gate_up_kernel else {"UP": False}
        cases.append(product_case(kernel, tensors, shapes, tile_m, tile.across, options, "group"))
    return cases


def _aot_up(shared: int, dtype: str, shapes: Shapes, group: int, each: int) -> AotCase:
    """AotCase of the first product of experts without a gate, which is a ``down`` from H to I, without zeros."""
    tile_m = packed_tile_rows(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype])
    tensors = {"h": f"*{dtype}", "weight": "*u8", "scales": "*fp32", "zeros": None, "y": f"*{dtype}"}
    turned, tile = (
        shapes._replace(hidden=shapes.inner, inner=shapes.hidden),
        integer_tiles(tile_m, shared, group, each).down,
    )
    options = _blocking(tile, group, False, each) | {"UP": True}
    return product_case(_integer_down_kernel, tensors, turned, tile_m, tile.across, options, "group")


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    return [
        *(
            case
            for rows in (1, 16, 512, 2048, 4096)
            for case in _aot(shared, "bf16", Shapes(rows, 2048, 512, 256, 8, True), 128)
        ),
        *(case for rows in (1, 512) for case in _aot(shared, "bf16", Shapes(rows, 2048, 768, 128, 8), 128)),
        *_aot(shared, "bf16", Shapes(16, 2816, 704, 128, 8), 64, gelu=True),  # Gemma 4
        *(case for dtype in ("fp16", "fp32") for case in _aot(shared, dtype, Shapes(16, 192, 96, 5, 2, True), 32)),
        *(
            case
            for rows in (1, 512, 4096)
            for case in _aot(shared, "bf16", Shapes(rows, 2048, 768, 128, 8), 128, each=1)
        ),
        *(
            case
            for rows in (16, 2048)
            for case in _aot(shared, "bf16", Shapes(rows, 2048, 512, 256, 8, True), 32, each=1)
        ),
        *_aot(shared, "fp32", Shapes(16, 192, 96, 5, 2, True), 32, each=1),
        *(
            _aot_up(shared, "bf16", Shapes(rows, 2688, 1856, 128, 6), 128, each)
            for rows in (1, 64, 2048)
            for each in (1, 2)
        ),
    ]


AOT = aot(HOPPER)
