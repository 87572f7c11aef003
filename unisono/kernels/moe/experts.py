"""Matrix products of experts, one row per pair of a token and an expert.

Owns the ops ``expert_gate_up`` and ``expert_down``; called by ``layers``. A stack of weights [E, N, K] is multiplied
tile by tile: a tile is some rows of one expert, divided by a :class:`ExpertPlan`. K is summed in one sequence in fp32,
so a row's bits depend on that row and its expert's weight: never on the tile, the plan or the other rows. On Hopper,
prompts' products with 16-bit weights run on the kernel of ``gluon.py`` if :data:`exact_experts` found the same bits.

Shapes: M tokens, H features, I intermediate features, P = M * top_k pairs; with a fused shared expert, the last one of
the stack, M more pairs after those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, fitting_stages, shared_memory
from unisono.kernels.gemm.cpu import row_exact_product, slice_of
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.library import DTYPES, AotCase, op
from unisono.kernels.moe import gluon as experts_gluon
from unisono.kernels.moe.plan import (
    ExpertPlan,
    Shapes,
    plan_experts,
    product_case,
    product_launch,
    program_place,
    store_pairs,
    tile_pairs,
    tile_rows,
    tokens_of,
)
from unisono.kernels.norm.activation import (
    GELU_TANH,
    SILU,
    ExpertGate,
    gated_cpu,
    gated_product,
    relu_squared_product,
)
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

GATE_UP, UP, DOWN = "gate_up", "up", "down"
"""Products of a stack: gate and up combined, ReLU² of up, and down."""

Step = tuple[int, int, int, int]
"""(n, k, warps, stages) of a tile."""


def _tiles(rows: int, up: Step, down: Step, across: bool) -> ExpertTiles:
    return ExpertTiles(Tile(rows, *up, across=across), Tile(rows, *down, across=across))


TILES: dict[float, ExpertTiles] = {  # upper bound of the average number of pairs per expert
    0.5: _tiles(16, (32, 128, 4, 4), (64, 256, 4, 2), across=True),
    2: _tiles(16, (32, 128, 4, 4), (64, 128, 4, 4), across=True),
    16: _tiles(16, (64, 128, 4, 4), (128, 128, 4, 4), across=True),
    64: _tiles(32, (64, 64, 4, 4), (128, 64, 4, 4), across=False),
    float("inf"): _tiles(128, (128, 64, 8, 4), (256, 64, 8, 4), across=True),
}
"""Fastest blocking of 16-bit weights on an H200 (benchmarks/experts.py, *tune*); the first in a layer, on an H100."""

_PROOF_TOKENS = 300
"""Tokens in the comparison of kernels: about 150 pairs for each expert that has any."""

_FP32: dict[float, ExpertTiles] = {
    16: _tiles(16, (32, 64, 4, 2), (32, 64, 4, 2), across=True),
    float("inf"): _tiles(64, (32, 32, 4, 2), (64, 32, 4, 2), across=False),
}


def expert_tiles(pairs: int, experts: int, dtype: torch.dtype, shared: int = HOPPER) -> ExpertTiles:
    """Choose the fastest known tiles for this number of pairs, from shapes alone, so that a captured pass has one
    plan. shared: bytes of shared memory, which bound the stages.
    """
    table: dict[float, ExpertTiles] = _FP32 if dtype is torch.float32 else TILES
    up, down = next(tiles for most, tiles in table.items() if pairs < most * experts)

    def fitting(tile: Tile, outputs: int) -> Tile:
        step = (tile.m + outputs) * tile.k * dtype.itemsize
        return tile._replace(stages=fitting_stages(tile.stages, step, shared))

    return ExpertTiles(fitting(up, 2 * up.n), fitting(down, down.n))


def expert_tile(pairs: int, experts: int, weight: torch.Tensor, plain: bool = True, gated: bool = True) -> int:
    """Rows of a tile in both products of a pass with this number of pairs.

    weight: the stack of gate and up, or of up if not ``gated``. plain: no biases, and the gate is SiLU if there is one.
    """
    key = _key(weight, GATE_UP if gated else UP)
    if plain and pairs >= experts_gluon.FEWEST * experts and exact_experts.serves(key):
        return experts_gluon.TILE_PAIRS
    return expert_tiles(pairs, experts, weight.dtype).rows


def _is_fast(weight: torch.Tensor, product: str, plan: ExpertPlan, plain: bool = True) -> bool:
    """Return True if the kernel of ``gluon.py`` computes this product. plain: see :func:`expert_tile`."""
    fits = plan.tile == experts_gluon.TILE_PAIRS and plan.tiles is not None and plain
    return fits and exact_experts.serves(_key(weight, product)) and experts_gluon.suits(weight)


@triton.jit
def biased(y, bias, e, first, cols, OF: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """Round fp32 products [rows, cols] to ``dtype`` and add expert e's bias. bias [E, OF], N from ``first`` on."""
    b = tl.load(bias + e.to(tl.int64) * OF + first + tl.minimum(cols, N - 1))
    return y.to(dtype).to(tl.float32) + b.to(tl.float32)[None, :]


@triton.jit
def store_gated(h, acc, part, pair, valid, I: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,  # noqa: E741
                GELU: tl.constexpr):  # fmt: skip
    """Store ``silu(gate) * up`` of products acc [TILE, 2 HALF], gates first, as block ``part`` of h [pairs, I].

    GELU: in place of SiLU.
    """
    gate, up = tl.split(acc.reshape(TILE, 2, HALF).permute(0, 2, 1))
    cols = part * HALF + tl.arange(0, HALF)
    at = pair.to(tl.int64)[:, None] * I + cols[None, :]
    tl.store(
        h + at, gated_product(gate, up, h.dtype.element_ty, 1.0, 0.0, GELU), mask=valid[:, None] & (cols < I)[None, :]
    )


@triton.jit
def _gate_up_kernel(x, weight, bias, h, ids, order, tiles, M, count,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                    ACROSS: tl.constexpr, RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr,
                    BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """Compute h [pairs, I]. weight [E, 2 I, H]: an expert's gate rows, then its up rows; bias [E, 2 I] with BIAS."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(I, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols, ks = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # The last outputs repeat: that is cheaper than a mask, and they are not stored.
    gates = weight + e.to(tl.int64) * (2 * I * H) + tl.minimum(cols, I - 1)[None, :] * H + ks[:, None]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        rows = x + tokens_of(pair, M, TOP_K).to(tl.int64)[:, None] * H + ks[None, :]
        gate, up = tl.zeros((TILE, BLOCK_N), tl.float32), tl.zeros((TILE, BLOCK_N), tl.float32)
        for k in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            if H % BLOCK_K == 0:
                a = tl.load(rows + k, mask=valid[:, None], other=0.0)
                g, u = tl.load(gates + k), tl.load(gates + I * H + k)
            else:
                inside = ks < H - k
                a = tl.load(rows + k, mask=valid[:, None] & inside[None, :], other=0.0)
                g = tl.load(gates + k, mask=inside[:, None], other=0.0)
                u = tl.load(gates + I * H + k, mask=inside[:, None], other=0.0)
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
        if BIAS:
            gate = biased(gate, bias, e, 0, cols, 2 * I, I, h.dtype.element_ty)
            up = biased(up, bias, e, I, cols, 2 * I, I, h.dtype.element_ty)
        store_pairs(h, gated_product(gate, up, h.dtype.element_ty, ALPHA, LIMIT, GELU), pair, valid, cols, I)


@triton.jit
def _down_kernel(h, weight, bias, y, ids, order, tiles, M, count,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                 ACROSS: tl.constexpr, RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr,
                 BIAS: tl.constexpr, OVERLAP: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Compute y [pairs, H]. weight [E, H, I]; bias [E, H] with BIAS. UP: h has a row for each token, and y is ReLU²."""
    follow(OVERLAP)
    t, part = program_place(tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols, ks = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weights = weight + e.to(tl.int64) * (H * I) + tl.minimum(cols, H - 1)[None, :] * I + ks[:, None]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        source = tokens_of(pair, M, TOP_K) if UP else pair
        rows = h + source.to(tl.int64)[:, None] * I + ks[None, :]
        total = tl.zeros((TILE, BLOCK_N), tl.float32)
        for k in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            if I % BLOCK_K == 0:
                a = tl.load(rows + k, mask=valid[:, None], other=0.0)
                w = tl.load(weights + k)
            else:
                inside = ks < I - k
                a = tl.load(rows + k, mask=valid[:, None] & inside[None, :], other=0.0)
                w = tl.load(weights + k, mask=inside[:, None], other=0.0)
            total = tl.dot(a, w, total, input_precision="ieee")
        if BIAS:
            total = biased(total, bias, e, 0, cols, H, H, y.dtype.element_ty)
        if UP:
            total = relu_squared_product(total, y.dtype.element_ty)
        store_pairs(y, total, pair, valid, cols, H)


def _blocking(tile: Tile) -> dict[str, int]:
    """Compile-time arguments of the tile."""
    return {"BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps}


def launch_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: ExpertPlan,
    tile: Tile | None = None,
    bias: torch.Tensor | None = None,
    gate: ExpertGate = SILU,
) -> torch.Tensor:
    """Launch the kernel of :func:`expert_gate_up`. tile: overrides the blocking (speed only)."""
    x, weight, inner = x.contiguous(), weight.contiguous(), weight.shape[1] // 2
    tile = tile or expert_tiles(plan.ids.numel(), plan.experts, x.dtype, shared_memory(x.device)).up
    parts = triton.cdiv(inner, tile.n)
    grid, results, options = product_launch(plan, len(weight), x.shape[1], inner, parts, tile.across)
    h = x.new_empty(results, inner)
    _gate_up_kernel[grid](
        x, weight, bias, h, *plan.operands, **options, **_blocking(tile),
        BIAS=bias is not None, **gate.constants, **overlapped(x.device),
    )  # fmt: skip
    return h


def launch_down(
    h: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, tile: Tile | None = None, bias: torch.Tensor | None = None,
    up: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel of :func:`expert_down`, or of :func:`expert_up`. tile: overrides the blocking (speed only)."""
    h, weight, hidden = h.contiguous(), weight.contiguous(), weight.shape[1]
    tile = tile or expert_tiles(plan.ids.numel(), plan.experts, h.dtype, shared_memory(h.device)).down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tile.across)
    y = h.new_empty(results, hidden)
    _down_kernel[grid](
        h, weight, bias, y, *plan.operands, **options,
        **_blocking(tile), BIAS=bias is not None, UP=up, **overlapped(h.device),
    )  # fmt: skip
    return y


def pairs_by_expert(ids: torch.Tensor, experts: int, stack: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its pairs, their tokens) of each expert with pairs, the shared one last. For CPU twins."""
    (rows, top_k), flat = ids.shape, ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts + 1)
    for expert, pairs in enumerate(flat.argsort(stable=True).split(counts.tolist())[:experts]):
        if len(pairs):
            yield expert, pairs, pairs // top_k
    if stack > experts:
        tokens = torch.arange(rows)
        yield experts, rows * top_k + tokens, tokens


def gate_up_rows(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Allocate rows h [P (+ M), I] for the product of x and gate_up's weight [E (+ 1), 2 I, …]. dtype: None: that of
    x.
    """
    return x.new_empty(ids.numel() + (weight.shape[0] - experts) * ids.shape[0], weight.shape[1] // 2, dtype=dtype)


def down_rows(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Allocate rows y [P (+ M), H] for the product of h and down's weight [E (+ 1), H, …], in h's dtype."""
    return h.new_empty(h.shape[0], weight.shape[1])


def up_rows(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate rows h [P, I] for the product of x and up's weight [E, I, …]. dtype: None: that of x."""
    return x.new_empty(ids.numel(), weight.shape[1], dtype=dtype)


def up_cpu(
    h: torch.Tensor, x: torch.Tensor, weight_of: Callable[[int], torch.Tensor], ids: torch.Tensor, experts: int
) -> torch.Tensor:
    """Fill and return h = ReLU² of products, for CPU twins of any weight format. weight_of: an expert's weight [I, H]
    in x's dtype."""
    for expert, pairs, tokens in pairs_by_expert(ids, experts, experts):
        product = row_exact_product(x[tokens], weight_of(expert)).to(h.dtype).clamp(min=0)
        h[pairs] = product * product
    return h


def gate_up_cpu(
    h: torch.Tensor, x: torch.Tensor, weight_of: Callable[[int], torch.Tensor], ids: torch.Tensor, experts: int,
    stack: int, bias: torch.Tensor | None = None, alpha: float = SILU.alpha, limit: float = SILU.limit,
    gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Fill and return h, for CPU twins of any weight format. weight_of: an expert's weight [2 I, H] in x's dtype."""
    for expert, pairs, tokens in pairs_by_expert(ids, experts, stack):
        product = row_exact_product(x[tokens], weight_of(expert)).to(h.dtype)
        h[pairs] = gated_cpu(product, None if bias is None else bias[expert], alpha, limit, gelu)
    return h


def down_cpu(
    y: torch.Tensor, h: torch.Tensor, weight_of: Callable[[int], torch.Tensor], ids: torch.Tensor, experts: int,
    stack: int, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fill and return y, for CPU twins of any weight format. weight_of: an expert's weight [H, I] in h's dtype."""
    for expert, pairs, _ in pairs_by_expert(ids, experts, stack):
        product = row_exact_product(h[pairs], weight_of(expert)).to(y.dtype)
        y[pairs] = product if bias is None else product + bias[expert]
    return y


def _gate_up_cuda(x, weight, ids, experts, tile, order, tiles, bias, alpha, limit, gelu=False):
    plan, gate = ExpertPlan(ids, experts, tile, order, tiles), ExpertGate(alpha, limit, gelu)
    if _is_fast(weight, GATE_UP, plan, bias is None and gate == SILU):
        return experts_gluon.launch_expert_rows(x, weight, plan, gated=True)
    return launch_gate_up(x, weight, plan, None, bias, gate)


def _down_cuda(h, weight, ids, experts, tile, order, tiles, bias):
    plan = ExpertPlan(ids, experts, tile, order, tiles)
    if _is_fast(weight, DOWN, plan, bias is None):
        return experts_gluon.launch_expert_rows(h, weight, plan, gated=False)
    return launch_down(h, weight, plan, None, bias)


def _key(weight: torch.Tensor, product: str) -> Hashable:
    """Key of a stack's product in :data:`exact_experts`: GATE_UP, UP or DOWN."""
    return weight.shape, weight.dtype, product


def _stack_keys(
    gate_up: torch.Tensor, down: torch.Tensor, experts: int, top_k: int, gated: bool = True
) -> tuple[Hashable, ...]:
    return _key(gate_up, GATE_UP if gated else UP), _key(down, DOWN)


def _same_bits(gate_up: torch.Tensor, down: torch.Tensor, experts: int, top_k: int, gated: bool = True) -> bool:
    """Compare both kernels. gate_up [E (+ 1), 2 I, H], down [E (+ 1), H, I], or a rank's part of either; experts: E.

    gated: False: gate_up is the stack of up alone [E, I, H], see :func:`expert_up`.
    """
    if not (experts_gluon.suits(gate_up) and experts_gluon.suits(down)):
        return False
    ours = Products(
        expert_tiles(_PROOF_TOKENS * top_k, experts, gate_up.dtype).rows,
        lambda x, plan: launch_gate_up(x, gate_up, plan) if gated else launch_down(x, gate_up, plan, up=True),
        lambda h, plan: launch_down(h, down, plan),
    )
    prompts = Products(
        experts_gluon.TILE_PAIRS,
        lambda x, plan: experts_gluon.launch_expert_rows(x, gate_up, plan, gated=gated, up=not gated),
        lambda h, plan: experts_gluon.launch_expert_rows(h, down, plan, gated=False),
    )
    inputs = gate_up.shape[2], down.shape[2]
    return same_products(ours, prompts, inputs, gate_up.dtype, experts, top_k, gate_up.device)


exact_experts = ExactKernel("experts of prompts", _stack_keys, _same_bits)
"""The kernel of ``gluon.py`` for prompts, against the kernels here, by stacks and products."""


class Products(NamedTuple):
    """Both products of one implementation: (rows of a plan's tile, (x, plan) -> h, (h, plan) -> y)."""

    tile: int
    gate_up: Callable[[torch.Tensor, ExpertPlan], torch.Tensor]
    down: Callable[[torch.Tensor, ExpertPlan], torch.Tensor]


def same_products(
    one: Products, other: Products, inputs: tuple[int, int], dtype: torch.dtype, experts: int, top_k: int,
    device: torch.device, tokens: int | None = None,
) -> bool:  # fmt: skip
    """Compare two implementations on random rows: in full tiles, and in tiles with few pairs and with none.

    inputs: of gate and up, and of down. dtype: dtype of the rows. tokens: None: _PROOF_TOKENS. The input of ``down`` is
    random too, since a rank computes only a part of it.
    """
    generator = torch.Generator(device).manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, device=device)
    tokens = tokens or _PROOF_TOKENS
    x = random(tokens, inputs[0]).to(dtype)
    ids = random(tokens, min(experts, 2 * top_k)).argsort(1)[:, :top_k].to(torch.int32).contiguous()
    plans = [plan_experts(ids, experts, kernels.tile) for kernels in (one, other)]
    h = one.gate_up(x, plans[0])
    if not torch.equal(h, other.gate_up(x, plans[1])):
        return False
    h = random(len(h), inputs[1]).to(dtype)
    return torch.equal(one.down(h, plans[0]), other.down(h, plans[1]))


@op(cuda=_gate_up_cuda, meta=gate_up_rows)
def expert_gate_up_op(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None,
    tiles: torch.Tensor | None, bias: torch.Tensor | None, alpha: float, limit: float, gelu: bool = False,
) -> torch.Tensor:  # fmt: skip
    h = gate_up_rows(x, weight, ids, experts)
    return gate_up_cpu(h, x, functools.partial(slice_of, weight), ids, experts, len(weight), bias, alpha, limit, gelu)


@op(cuda=_down_cuda, meta=down_rows)
def expert_down_op(
    h: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None,
    tiles: torch.Tensor | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return down_cpu(down_rows(h, weight), h, functools.partial(slice_of, weight), ids, experts, len(weight), bias)


def expert_gate_up(
    x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, bias: torch.Tensor | None = None, gate: ExpertGate = SILU
) -> torch.Tensor:
    """Compute ``silu(x @ gate^T) * (x @ up^T)`` of each pair, or another ``gate``, for x [M, H]: [P, I] in x's dtype.

    weight [E, 2 I, H], gate rows first; [E + 1, 2 I, H] with a fused shared expert, and the result then has
    M rows more. bias [E (+ 1), 2 I] is added to the products. Rows of pairs without an expert are not written. Rounded
    after the products, after the bias, after SiLU and after its product, as :func:`~unisono.kernels.silu_mul`.
    """
    return expert_gate_up_op(x, weight, *plan, bias, *gate)


def expert_down(
    h: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row of h [P (+ M), I] by its expert's weight [E (+ 1), H, I]: [P (+ M), H].

    bias [E (+ 1), H] is added to the rounded product.
    """
    return expert_down_op(h, weight, *plan, bias)


def _up_cuda(x, weight, ids, experts, tile, order, tiles):
    plan = ExpertPlan(ids, experts, tile, order, tiles)
    if _is_fast(weight, UP, plan):
        return experts_gluon.launch_expert_rows(x, weight, plan, gated=False, up=True)
    return launch_down(x, weight, plan, up=True)


@op(cuda=_up_cuda, meta=up_rows)
def expert_up_op(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, tile: int, order: torch.Tensor | None,
    tiles: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return up_cpu(up_rows(x, weight, ids), x, functools.partial(slice_of, weight), ids, experts)


def expert_up(x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
    """Compute ``relu(x @ up^T)²`` of each pair, for x [M, H] and experts without a gate [E, I, H]: [P, I] in x's dtype.

    Rounded after the product and after the square. Rows of pairs without an expert are not written.
    """
    return expert_up_op(x, weight, *plan)


def _aot(shared: int, dtype: str, shapes: Shapes, gate: ExpertGate = SILU, biased: bool = False) -> list[AotCase]:
    """AotCases of both products. biased: the experts have biases."""
    chosen = expert_tiles(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype], shared)
    cases = []
    for kernel, (x, out), tile, more in (
        (_gate_up_kernel, "xh", chosen.up, gate.constants),
        (_down_kernel, "hy", chosen.down, {"UP": False}),
    ):
        tensors = {x: f"*{dtype}", "weight": f"*{dtype}", "bias": f"*{dtype}" if biased else None, out: f"*{dtype}"}
        options = _blocking(tile) | more | {"BIAS": biased}
        cases.append(product_case(kernel, tensors, shapes, chosen.rows, tile.across, options))
    return cases


def _aot_up(shared: int, dtype: str, shapes: Shapes) -> AotCase:
    """AotCase of the first product of experts without a gate, which is a ``down`` from H to I."""
    chosen = expert_tiles(shapes.rows * shapes.top_k, shapes.experts, DTYPES[dtype], shared)
    tensors = {"h": f"*{dtype}", "weight": f"*{dtype}", "bias": None, "y": f"*{dtype}"}
    turned = shapes._replace(hidden=shapes.inner, inner=shapes.hidden)
    options = _blocking(chosen.down) | {"BIAS": False, "UP": True}
    return product_case(_down_kernel, tensors, turned, chosen.rows, chosen.down.across, options)


GPT_OSS = ExpertGate(1.702, 7.0)


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    chosen: list[tuple[str, Shapes, ExpertGate, bool]] = [
        *(("bf16", Shapes(rows, 2048, 512, 256, 8, True), SILU, False) for rows in (1, 16, 64, 512, 2048, 4096)),
        *(("bf16", Shapes(rows, 2048, 768, 128, 8), SILU, False) for rows in (1, 64, 4096)),
        *(("bf16", Shapes(rows, 4096, 14336, 8, 2), SILU, False) for rows in (1, 64, 512)),
        *(("bf16", Shapes(rows, 2880, 2880, 32, 4), GPT_OSS, True) for rows in (1, 512)),
        *(("bf16", Shapes(rows, 2816, 704, 128, 8), GELU_TANH, False) for rows in (1, 512)),  # Gemma 4
        *((kind, Shapes(rows, 100, 60, 5, 2, True), SILU, False) for kind in ("fp16", "fp32") for rows in (1, 512)),
    ]
    up = [_aot_up(shared, "bf16", Shapes(rows, 2688, 1856, 128, 6)) for rows in (1, 64, 2048)]  # Nemotron-3-Nano
    return [*(case for each in chosen for case in _aot(shared, *each)), *up]


AOT = aot(HOPPER)
