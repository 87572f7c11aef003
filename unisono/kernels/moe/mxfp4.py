"""Matrix products of experts with MXFP4 weights. Owns the ops ``expert_mxfp4_gate_up`` and ``expert_mxfp4_down``.

A weight is an e2m1 value (± 0, 0.5, 1, 1.5, 2, 3, 4, 6) times a power of two that 32 inputs share (OCP Microscaling
Formats 1.0). It is decoded in registers, in fp32, and then converted to the activations' dtype, exactly in bfloat16. So
a product is that of ``kernels/moe/experts.py`` on the decoded weights: the same values in the same order, at any number
of tokens. As in ``kernels/gemm/int4.py`` outputs are the instruction's M and tokens its N, so that it is always wgmma.

Shapes: M tokens, H features, I intermediate features, E experts in the stack, P = M * top_k pairs. Weights uint8 [E, 2
I, H / 2] and [E, H, I / 2], a byte holds inputs 2 i (low bits) and 2 i + 1; scales uint8 [E, 2 I, H / 32] and [E, H, I
/ 32], the power of two plus 127.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.nvfp4 import E2M1
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import DTYPES, AotCase, op
from unisono.kernels.moe.experts import GPT_OSS, biased, down_cpu, down_rows, gate_up_cpu, gate_up_rows
from unisono.kernels.moe.integers import TILES, packed_tile_rows
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
from unisono.kernels.norm.activation import SILU, ExpertGate, gated_product
from unisono.kernels.overlap import follow, overlapped

GROUP = 32
"""Inputs that share a scale."""

WIDTH = 64
"""Inputs of a step."""


def _steps(inputs: int) -> int:
    """Steps of an iteration: the largest divisor of their number, up to four."""
    return next((steps for steps in (4, 3, 2, 1) if inputs % (WIDTH * steps) == 0), 4)


@triton.jit
def _decoded(packed, scale, dtype: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Decode bytes [BLOCK_N, WIDTH / 2] with scales [BLOCK_N, WIDTH / 32] to weights [BLOCK_N, WIDTH] in ``dtype``.

    Exponent and mantissa of e2m1 in the places of those of fp32 are the value times 2 ** -126, subnormals too.
    """
    byte = packed.to(tl.int32)
    low = ((byte & 0x07) << 22) | ((byte & 0x08) << 28)
    high = ((byte & 0x70) << 18) | ((byte & 0x80) << 24)
    values = tl.reshape(tl.join(low, high), (BLOCK_N, WIDTH)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    exponent = scale.to(tl.int32)
    power = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    scaled = tl.reshape(values, (BLOCK_N, WIDTH // 32, 32)) * power[:, :, None]
    return tl.reshape(scaled, (BLOCK_N, WIDTH)).to(dtype)


@triton.jit
def _product(x_ptrs, x_ok, w_ptrs, s_ptrs, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             WIDTH: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Compute the product over K of x and a packed weight: fp32 [BLOCK_M, BLOCK_N].

    x_ptrs [BLOCK_M, WIDTH], w_ptrs [BLOCK_N, WIDTH / 2], s_ptrs [BLOCK_N, WIDTH / 32]: the first step's; rows of x that
    are not ``x_ok`` count as 0.
    """
    ks, bytes_, groups = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, WIDTH * STEPS):
        for j in tl.static_range(STEPS):
            k = first + j * WIDTH
            if K % (WIDTH * STEPS) == 0:
                x_tile = tl.load(x_ptrs + k, mask=x_ok[:, None], other=0.0)
                packed, scale = tl.load(w_ptrs + k // 2), tl.load(s_ptrs + k // 32)
            else:
                x_tile = tl.load(x_ptrs + k, mask=x_ok[:, None] & (ks < K - k)[None, :], other=0.0)
                packed = tl.load(w_ptrs + k // 2, mask=(bytes_ < (K - k) // 2)[None, :], other=0)
                scale = tl.load(s_ptrs + k // 32, mask=(groups < (K - k) // 32)[None, :], other=0)
            w_tile = _decoded(packed, scale, x_tile.dtype, BLOCK_N, WIDTH)
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
    return tl.trans(acc)


@triton.jit
def _mxfp4_gate_up_kernel(x, weight, scales, bias, h, ids, order, tiles, M, count,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                    LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                    BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. A tile's first half are outputs of gate, the other half the same outputs of up."""
    follow(OVERLAP)
    HALF: tl.constexpr = BLOCK_N // 2
    t, part = program_place(tl.cdiv(I, HALF), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    r = tl.arange(0, BLOCK_N)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    rows = e.to(tl.int64) * (2 * I) + tl.minimum(part * HALF + r % HALF, I - 1) + (r // HALF) * I
    w_ptrs = weight + rows[:, None] * (H // 2) + tl.arange(0, WIDTH // 2)[None, :]
    s_ptrs = scales + rows[:, None] * (H // 32) + tl.arange(0, WIDTH // 32)[None, :]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        x_ptrs = x + tokens_of(pair, M, TOP_K).to(tl.int64)[:, None] * H + tl.arange(0, WIDTH)[None, :]
        acc = _product(x_ptrs, valid, w_ptrs, s_ptrs, H, TILE, BLOCK_N, WIDTH, STEPS)
        gate, up = tl.split(acc.reshape(TILE, 2, HALF).permute(0, 2, 1))
        cols = part * HALF + tl.arange(0, HALF)
        if BIAS:
            gate = biased(gate, bias, e, 0, cols, 2 * I, I, h.dtype.element_ty)
            up = biased(up, bias, e, I, cols, 2 * I, I, h.dtype.element_ty)
        store_pairs(h, gated_product(gate, up, h.dtype.element_ty, ALPHA, LIMIT, GELU), pair, valid, cols, I)


@triton.jit
def _mxfp4_down_kernel(h, weight, scales, bias, y, ids, order, tiles, M, count,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, RIDES: tl.constexpr,
                 LEAD: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
                 BIAS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = e.to(tl.int64) * H + tl.minimum(cols, H - 1)
    w_ptrs = weight + rows[:, None] * (I // 2) + tl.arange(0, WIDTH // 2)[None, :]
    s_ptrs = scales + rows[:, None] * (I // 32) + tl.arange(0, WIDTH // 32)[None, :]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        x_ptrs = h + pair.to(tl.int64)[:, None] * I + tl.arange(0, WIDTH)[None, :]
        acc = _product(x_ptrs, valid, w_ptrs, s_ptrs, I, TILE, BLOCK_N, WIDTH, STEPS)
        if BIAS:
            acc = biased(acc, bias, e, 0, cols, H, H, y.dtype.element_ty)
        store_pairs(y, acc, pair, valid, cols, H)


def _blocking(tile: Tile, inputs: int) -> dict[str, int]:
    """Compile-time arguments of the tile and the weight."""
    return {
        "BLOCK_N": tile.n, "WIDTH": WIDTH, "STEPS": _steps(inputs), "num_warps": tile.warps, "num_stages": tile.stages
    }  # fmt: skip


def launch_mxfp4_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    plan: ExpertPlan,
    bias: torch.Tensor | None,
    gate: ExpertGate,
) -> torch.Tensor:
    """Launch the kernel of :func:`expert_mxfp4_gate_up`."""
    x, inner, tile = x.contiguous(), weight.shape[1] // 2, TILES[plan.tile].up
    parts = triton.cdiv(inner, tile.n // 2)
    grid, results, options = product_launch(plan, len(weight), x.shape[1], inner, parts, tile.across)
    h = x.new_empty(results, inner)
    _mxfp4_gate_up_kernel[grid](
        x, weight, scales, bias, h, *plan.operands, **options,
        **_blocking(tile, x.shape[1]), BIAS=bias is not None, **gate.constants,
        **overlapped(x.device),
    )  # fmt: skip
    return h


def launch_mxfp4_down(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, plan: ExpertPlan, bias: torch.Tensor | None
) -> torch.Tensor:
    """Launch the kernel of :func:`expert_mxfp4_down`."""
    h, hidden, tile = h.contiguous(), weight.shape[1], TILES[plan.tile].down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tile.across)
    y = h.new_empty(results, hidden)
    _mxfp4_down_kernel[grid](
        h, weight, scales, bias, y, *plan.operands, **options,
        **_blocking(tile, h.shape[1]), BIAS=bias is not None, **overlapped(h.device),
    )  # fmt: skip
    return y


_PAIRS = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])
_POWERS = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")], dtype=torch.float32)


def decode(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode bytes [..., N, K / 2] with scales [..., N, K / 32] to weights [..., N, K] in ``dtype``, in plain torch."""
    pairs, powers = (table.to(weight.device) for table in (_PAIRS, _POWERS))
    values = pairs.index_select(0, weight.flatten().int()).view(*scales.shape, GROUP)
    scaled = values * powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)
    return scaled.flatten(-2).to(dtype)


def _gate_up_cuda(x, weight, scales, ids, experts, tile, order, tiles, bias, alpha, limit, gelu=False):
    return launch_mxfp4_gate_up(
        x, weight, scales, ExpertPlan(ids, experts, tile, order, tiles), bias, ExpertGate(alpha, limit, gelu)
    )


def _down_cuda(h, weight, scales, ids, experts, tile, order, tiles, bias):
    return launch_mxfp4_down(h, weight, scales, ExpertPlan(ids, experts, tile, order, tiles), bias)


def _decoded_expert(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    """Make a function that decodes one expert's weight."""
    return lambda expert: decode(weight[expert], scales[expert], dtype)


@op(cuda=_gate_up_cuda, meta=gate_up_rows)
def expert_mxfp4_gate_up_op(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, experts: int, tile: int,
    order: torch.Tensor | None, tiles: torch.Tensor | None, bias: torch.Tensor | None, alpha: float, limit: float,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    h, decoded = gate_up_rows(x, weight, ids, experts), _decoded_expert(weight, scales, x.dtype)
    return gate_up_cpu(h, x, decoded, ids, experts, len(weight), bias, alpha, limit, gelu)


@op(cuda=_down_cuda, meta=down_rows)
def expert_mxfp4_down_op(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, experts: int, tile: int,
    order: torch.Tensor | None, tiles: torch.Tensor | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    decoded = _decoded_expert(weight, scales, h.dtype)
    return down_cpu(down_rows(h, weight), h, decoded, ids, experts, len(weight), bias)


def expert_mxfp4_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    plan: ExpertPlan,
    bias: torch.Tensor | None = None,
    gate: ExpertGate = SILU,
) -> torch.Tensor:
    """Compute ``expert_gate_up`` of ``kernels/moe/experts.py`` on the decoded weights, gate's rows first, with equal
    bits.
    """
    return expert_mxfp4_gate_up_op(x, weight, scales, *plan, bias, *gate)


def expert_mxfp4_down(
    h: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, plan: ExpertPlan, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``expert_down`` of ``kernels/moe/experts.py`` on the decoded weights, with equal bits."""
    return expert_mxfp4_down_op(h, weight, scales, *plan, bias)


def _aot(dtype: str, shapes: Shapes, gate: ExpertGate | None) -> list[AotCase]:
    """AotCases of both products. gate: gate of experts with biases; None: SiLU without biases."""
    tile_m, cases = packed_tile_rows(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype]), []
    tiles, of_bias = TILES[tile_m], f"*{dtype}" if gate else None
    for kernel, (x, out), tile, inputs, more in (
        (_mxfp4_gate_up_kernel, "xh", tiles.up, shapes.hidden, (gate or SILU).constants),
        (_mxfp4_down_kernel, "hy", tiles.down, shapes.inner, {}),
    ):
        tensors = {x: f"*{dtype}", "weight": "*u8", "scales": "*u8", "bias": of_bias, out: f"*{dtype}"}
        options = _blocking(tile, inputs) | more | {"BIAS": gate is not None}
        cases.append(product_case(kernel, tensors, shapes, tile_m, tile.across, options))
    return cases


AOT: list[AotCase] = [
    *(case for rows in (1, 64, 512, 2048) for case in _aot("bf16", Shapes(rows, 2880, 2880, 32, 4), GPT_OSS)),
    *(case for rows in (1, 512) for case in _aot("bf16", Shapes(rows, 2880, 2880, 128, 4), GPT_OSS)),
    *(case for dtype in ("fp16", "fp32") for case in _aot(dtype, Shapes(16, 96, 160, 5, 2), None)),
]
