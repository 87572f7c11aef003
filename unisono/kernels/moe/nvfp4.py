"""Matrix products of experts with NVFP4 weights.

Owns the ops ``expert_nvfp4_gate_up``, ``expert_nvfp4_up`` (experts without a gate) and ``expert_nvfp4_down``.

They are ``kernels/moe/experts.py`` with weights that are decoded in registers by the rule of ``kernels/gemm/nvfp4.py``:
the same product of the same values in the same order, at any number of tokens. On Hopper they run on the kernel of
``packed_gluon.py`` if :data:`exact_nvfp4_experts` found the same bits.

Shapes: M tokens, H features, I intermediate features, E experts in the stack with a fused shared one, P = M * top_k
pairs. Weights uint8 [E, 2 I, H / 2] and [E, H, I / 2]; scales uint8 [E, 2 I, H / 16] and [E, H, I / 16]; multipliers
fp32 [E, 2 I] and [E, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, shared_memory
from unisono.kernels.gemm.nvfp4 import STEPS, WIDTH, nvfp4_decode, nvfp4_product
from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP
from unisono.kernels.gemm.tile import Tile
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
from unisono.kernels.moe.integers import packed_tile_rows, packed_tiles
from unisono.kernels.moe.packed_gluon import PackedExperts
from unisono.kernels.moe.plan import (
    ExpertPlan,
    Shapes,
    product_case,
    product_launch,
    program_place,
    store_pairs,
    tile_pairs,
    tile_rows,
    tokens_of,
)
from unisono.kernels.norm.activation import relu_squared_product
from unisono.kernels.overlap import follow, overlapped


@triton.jit
def _nvfp4_gate_up_kernel(x, weight, scales, multipliers, h, ids, order, tiles, M, count,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                    LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                    GELU: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
    follow(OVERLAP)
    HALF: tl.constexpr = BLOCK_N // 2
    t, part = program_place(tl.cdiv(I, HALF), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    r = tl.arange(0, BLOCK_N)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    rows = e.to(tl.int64) * (2 * I) + tl.minimum(part * HALF + r % HALF, I - 1) + (r // HALF) * I
    w_ptrs = weight + rows[:, None] * (H // 2) + tl.arange(0, WIDTH // 2)[None, :]
    s_ptrs = scales + rows[:, None] * (H // 16) + tl.arange(0, WIDTH // 16)[None, :]
    multiplier = tl.load(multipliers + rows)
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        x_ptrs = x + tokens_of(pair, M, TOP_K).to(tl.int64)[:, None] * H + tl.arange(0, WIDTH)[None, :]
        acc = nvfp4_product(x_ptrs, valid, w_ptrs, s_ptrs, multiplier, H, TILE, BLOCK_N, WIDTH, STEPS,
                            H % (WIDTH * STEPS) == 0)  # fmt: skip
        store_gated(h, acc, part, pair, valid, I, TILE, HALF, GELU)


@triton.jit
def _nvfp4_down_kernel(h, weight, scales, multipliers, y, ids, order, tiles, M, count,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                 LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                 UP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]. UP: h has a row for each token, and y is ReLU²."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = e.to(tl.int64) * H + tl.minimum(cols, H - 1)
    w_ptrs = weight + rows[:, None] * (I // 2) + tl.arange(0, WIDTH // 2)[None, :]
    s_ptrs = scales + rows[:, None] * (I // 16) + tl.arange(0, WIDTH // 16)[None, :]
    multiplier = tl.load(multipliers + rows)
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        source = tokens_of(pair, M, TOP_K) if UP else pair
        x_ptrs = h + source.to(tl.int64)[:, None] * I + tl.arange(0, WIDTH)[None, :]
        acc = nvfp4_product(x_ptrs, valid, w_ptrs, s_ptrs, multiplier, I, TILE, BLOCK_N, WIDTH, STEPS,
                            I % (WIDTH * STEPS) == 0)  # fmt: skip
        if UP:
            acc = relu_squared_product(acc, y.dtype.element_ty)
        store_pairs(y, acc, pair, valid, cols, H)


def _blocking(tile: Tile) -> dict[str, int]:
    """Compile-time arguments of the tile."""
    return {"BLOCK_N": tile.n, "WIDTH": WIDTH, "STEPS": STEPS, "num_warps": tile.warps, "num_stages": tile.stages}


def launch_nvfp4_gate_up(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, plan: ExpertPlan,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel of :func:`expert_nvfp4_gate_up`."""
    x, inner, tile = x.contiguous(), weight.shape[1] // 2, packed_tiles(plan.tile, shared_memory(x.device)).up
    parts = triton.cdiv(inner, tile.n // 2)
    grid, results, options = product_launch(plan, len(weight), x.shape[1], inner, parts, tile.across)
    h = x.new_empty(results, inner)
    _nvfp4_gate_up_kernel[grid](
        x, weight, scales, multipliers, h, *plan.operands, **options, **_blocking(tile), GELU=gelu,
        **overlapped(x.device),
    )  # fmt: skip
    return h


def launch_nvfp4_down(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, plan: ExpertPlan,
    up: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel of :func:`expert_nvfp4_down`, or of :func:`expert_nvfp4_up`."""
    h, hidden, tile = h.contiguous(), weight.shape[1], packed_tiles(plan.tile, shared_memory(h.device)).down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tile.across)
    y = h.new_empty(results, hidden)
    _nvfp4_down_kernel[grid](
        h, weight, scales, multipliers, y, *plan.operands, **options, **_blocking(tile), UP=up, **overlapped(h.device)
    )
    return y


def _fitted(
    weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return weight, scales, multipliers, NVFP4_GROUP


exact_nvfp4_experts = PackedExperts(
    "NVFP4 experts",
    _fitted,
    launch_nvfp4_gate_up,
    functools.partial(launch_nvfp4_down, up=True),
    launch_nvfp4_down,
)
"""The kernel of ``packed_gluon.py``, against the kernels here."""


def _gate_up_cuda(x, weight, scales, multipliers, ids, experts, tile, order, tiles, gelu=False):
    operands, plan = (weight, scales, multipliers), ExpertPlan(ids, experts, tile, order, tiles)
    if not gelu and exact_nvfp4_experts.runs(x, plan, True, *operands):
        return exact_nvfp4_experts.launch(x, plan, True, False, *operands)
    return launch_nvfp4_gate_up(x, *operands, plan, gelu)


def _down_cuda(h, weight, scales, multipliers, ids, experts, tile, order, tiles, up=False):
    operands, plan = (weight, scales, multipliers), ExpertPlan(ids, experts, tile, order, tiles)
    if exact_nvfp4_experts.runs(h, plan, False, *operands):
        return exact_nvfp4_experts.launch(h, plan, False, up, *operands)
    return launch_nvfp4_down(h, *operands, plan, up)


def _up_cuda(*args):
    return _down_cuda(*args, up=True)


def _decoded_expert(
    weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, dtype: torch.dtype
) -> Callable[[int], torch.Tensor]:
    """Make a function that decodes one expert's weight."""
    return lambda e: nvfp4_decode(weight[e], scales[e], multipliers[e], dtype)


@op(cuda=_gate_up_cuda, meta=gate_up_rows)
def expert_nvfp4_gate_up_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, ids: torch.Tensor,
    experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None, gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    h, decoded = gate_up_rows(x, weight, ids, experts), _decoded_expert(weight, scales, multipliers, x.dtype)
    return gate_up_cpu(h, x, decoded, ids, experts, len(weight), gelu=gelu)


@op(cuda=_down_cuda, meta=down_rows)
def expert_nvfp4_down_op(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, ids: torch.Tensor,
    experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    decoded = _decoded_expert(weight, scales, multipliers, h.dtype)
    return down_cpu(down_rows(h, weight), h, decoded, ids, experts, len(weight))


@op(cuda=_up_cuda, meta=up_rows)
def expert_nvfp4_up_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, ids: torch.Tensor,
    experts: int, tile: int, order: torch.Tensor | None, tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    decoded = _decoded_expert(weight, scales, multipliers, x.dtype)
    return up_cpu(up_rows(x, weight, ids), x, decoded, ids, experts)


def expert_nvfp4_gate_up(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, plan: ExpertPlan,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute ``expert_gate_up`` of ``kernels/moe/experts.py`` on the decoded weights, gate's rows first, with equal
    bits. gelu: GELU by tanh in place of SiLU."""
    return expert_nvfp4_gate_up_op(x, weight, scales, multipliers, *plan, gelu)


def expert_nvfp4_down(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, plan: ExpertPlan
) -> torch.Tensor:
    """Compute ``expert_down`` of ``kernels/moe/experts.py`` on the decoded weights, with equal bits."""
    return expert_nvfp4_down_op(h, weight, scales, multipliers, *plan)


def expert_nvfp4_up(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor, plan: ExpertPlan
) -> torch.Tensor:
    """Compute ``expert_up`` of ``kernels/moe/experts.py`` on the decoded weights, with equal bits."""
    return expert_nvfp4_up_op(x, weight, scales, multipliers, *plan)


def _aot(shared: int, dtype: str, shapes: Shapes, gelu: bool = False) -> list[AotCase]:
    """AotCases of both products."""
    tile_m, cases = packed_tile_rows(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype]), []
    tiles = packed_tiles(tile_m, shared)
    for kernel, (x, out), tile in ((_nvfp4_gate_up_kernel, "xh", tiles.up), (_nvfp4_down_kernel, "hy", tiles.down)):
        tensors = {x: f"*{dtype}", "weight": "*u8", "scales": "*u8", "multipliers": "*fp32", out: f"*{dtype}"}
        options = _blocking(tile) | ({"GELU": gelu} if kernel is _nvfp4_gate_up_kernel else {"UP": False})
        cases.append(product_case(kernel, tensors, shapes, tile_m, tile.across, options))
    return cases


def _aot_up(shared: int, dtype: str, shapes: Shapes) -> AotCase:
    """AotCase of the first product of experts without a gate, which is a ``down`` from H to I."""
    tile_m = packed_tile_rows(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype])
    tensors = {"h": f"*{dtype}", "weight": "*u8", "scales": "*u8", "multipliers": "*fp32", "y": f"*{dtype}"}
    turned, tile = shapes._replace(hidden=shapes.inner, inner=shapes.hidden), packed_tiles(tile_m, shared).down
    return product_case(_nvfp4_down_kernel, tensors, turned, tile_m, tile.across, _blocking(tile) | {"UP": True})


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    return [
        *(case for rows in (1, 16, 512, 2048) for case in _aot(shared, "bf16", Shapes(rows, 2048, 512, 256, 8, True))),
        *_aot(shared, "bf16", Shapes(16, 2816, 704, 128, 8), gelu=True),  # Gemma 4
        *(case for dtype in ("fp16", "fp32") for case in _aot(shared, dtype, Shapes(16, 192, 96, 5, 2, True))),
        *(_aot_up(shared, "bf16", Shapes(rows, 2688, 1856, 128, 6)) for rows in (1, 64, 2048)),  # Nemotron-3-Nano
    ]


AOT = aot(HOPPER)
