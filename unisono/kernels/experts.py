"""The matrix products of experts: each pair of a token and an expert gets its row. Owns ``expert_gate_up`` and
``expert_down``; called by ``layers``.

A stack of weights [E, N, K] is multiplied tile by tile: a tile is some rows of one expert, as a :class:`Plan` divides
them. K is summed in one sequence in fp32, so a row's bits are fixed by that row and its expert's weight: never by the
tile, the plan or the other rows.

Shapes: M tokens, H features, I of an expert, P = M * top_k pairs; with a shared expert that rides along as the stack's
last, M more pairs after those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unisono.kernels.activation import silu_mul_cpu, silu_product
from unisono.kernels.experts_plan import LEAD_PAIRS, Plan, product_launch, tile_pairs, tile_rows, tokens_of
from unisono.kernels.library import AotCase, define, fixed_rows_matmul, ints, register
from unisono.kernels.overlap import follow, overlapped


@dataclass(frozen=True)
class Tile:
    """Blocking of a product. It decides about speed and changes no bit of the result.

    n, k: outputs and inputs of a step. across: neighbours in the grid share rows and take the next outputs; otherwise
    they share outputs and take the next tile of rows.
    """

    n: int
    k: int
    warps: int
    stages: int
    across: bool


@dataclass(frozen=True)
class Tiles:
    """rows: of a tile, the same in both products, for both follow one plan."""

    rows: int
    up: Tile
    down: Tile


TILES: dict[float, Tiles] = {  # below this average number of pairs per expert
    0.5: Tiles(16, Tile(16, 256, 4, 4, True), Tile(32, 128, 4, 4, True)),
    2: Tiles(16, Tile(32, 128, 4, 4, True), Tile(64, 128, 4, 4, True)),
    16: Tiles(16, Tile(64, 128, 4, 4, True), Tile(128, 128, 4, 4, True)),
    64: Tiles(32, Tile(64, 64, 4, 4, False), Tile(128, 64, 4, 4, False)),
    float("inf"): Tiles(128, Tile(128, 64, 8, 4, True), Tile(256, 64, 8, 4, True)),
}
"""For 16-bit weights on an H200 (benchmarks/experts.py, *tune*)."""

_FP32: dict[float, Tiles] = {
    16: Tiles(16, Tile(32, 64, 4, 2, True), Tile(32, 64, 4, 2, True)),
    float("inf"): Tiles(64, Tile(32, 32, 4, 2, False), Tile(64, 32, 4, 2, False)),
}


def expert_tiles(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """The fastest known tiles for this number of pairs; from shapes alone, so that a captured pass has one plan."""
    table: dict[float, Tiles] = _FP32 if dtype is torch.float32 else TILES
    return next(tiles for most, tiles in table.items() if pairs < most * experts)


@triton.jit
def _split(program, programs, parts, ACROSS: tl.constexpr):
    """(tile of rows, block of outputs) of a program; ``parts`` blocks of outputs."""
    if ACROSS:
        return program // parts, program % parts
    tiles = programs // parts
    return program % tiles, program // tiles


@triton.jit
def _gate_up_kernel(x, weight, h, ids, order, tiles, M, count,
                    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                    ACROSS: tl.constexpr, RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    """h [pairs, I]; weight [E, 2 I, H]: an expert's gate rows, then its up rows."""
    follow(OVERLAP)
    t, part = _split(tl.program_id(0), tl.num_programs(0), tl.cdiv(I, BLOCK_N), ACROSS)
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
        at = pair.to(tl.int64)[:, None] * I + cols[None, :]
        tl.store(h + at, silu_product(gate, up, h.dtype.element_ty), mask=valid[:, None] & (cols < I)[None, :])


@triton.jit
def _down_kernel(h, weight, y, ids, order, tiles, M, count,
                 H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,  # noqa: E741
                 TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                 ACROSS: tl.constexpr, RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr,
                 OVERLAP: tl.constexpr):  # fmt: skip
    """y [pairs, H]; weight [E, H, I]."""
    follow(OVERLAP)
    t, part = _split(tl.program_id(0), tl.num_programs(0), tl.cdiv(H, BLOCK_N), ACROSS)
    e, n, first, rank = tile_rows(ids, tiles, t, M, count, E, TOP_K, TILE, RIDES, LEAD, PAIRS)
    cols, ks = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weights = weight + e.to(tl.int64) * (H * I) + tl.minimum(cols, H - 1)[None, :] * I + ks[:, None]
    for base in range(0, n, TILE):
        pair, valid = tile_pairs(order, first, rank, base, n, M, TOP_K, TILE, LEAD, PAIRS)
        rows = h + pair.to(tl.int64)[:, None] * I + ks[None, :]
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
        at = pair.to(tl.int64)[:, None] * H + cols[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=valid[:, None] & (cols < H)[None, :])


def _blocking(tile: Tile) -> dict[str, int]:
    """The compile-time arguments that are the tile's."""
    return {"BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps}


def launch_gate_up(x: torch.Tensor, weight: torch.Tensor, plan: Plan, tile: Tile | None = None) -> torch.Tensor:
    """The kernel of :func:`expert_gate_up`; ``tile`` overrides the blocking (speed only)."""
    x, weight, inner = x.contiguous(), weight.contiguous(), weight.shape[1] // 2
    tile = tile or expert_tiles(plan.ids.numel(), plan.experts, x.dtype).up
    parts = triton.cdiv(inner, tile.n)
    grid, results, options = product_launch(plan, len(weight), x.shape[1], inner, parts, tile.across)
    h = x.new_empty(results, inner)
    _gate_up_kernel[grid](
        x,
        weight,
        h,
        plan.ids,
        plan.order,
        plan.tiles,
        x.shape[0],
        plan.listed,
        **options,
        **_blocking(tile),
        **overlapped(x.device),
    )
    return h


def launch_down(h: torch.Tensor, weight: torch.Tensor, plan: Plan, tile: Tile | None = None) -> torch.Tensor:
    """The kernel of :func:`expert_down`; ``tile`` overrides the blocking (speed only)."""
    h, weight, hidden = h.contiguous(), weight.contiguous(), weight.shape[1]
    tile = tile or expert_tiles(plan.ids.numel(), plan.experts, h.dtype).down
    parts = triton.cdiv(hidden, tile.n)
    grid, results, options = product_launch(plan, len(weight), hidden, h.shape[1], parts, tile.across)
    y = h.new_empty(results, hidden)
    _down_kernel[grid](
        h, weight, y, plan.ids, plan.order, plan.tiles, plan.ids.shape[0], plan.listed, **options, **_blocking(tile),
        **overlapped(h.device),
    )  # fmt: skip
    return y


def pairs_by_expert(ids: torch.Tensor, experts: int, stack: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its pairs, their tokens) of each expert that has some, the shared one last. For CPU twins."""
    (rows, top_k), flat = ids.shape, ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts + 1)
    for expert, pairs in enumerate(flat.argsort(stable=True).split(counts.tolist())[:experts]):
        if len(pairs):
            yield expert, pairs, pairs // top_k
    if stack > experts:
        tokens = torch.arange(rows)
        yield experts, rows * top_k + tokens, tokens


def _gate_up_cuda(x, weight, ids, experts, tile, order, tiles):
    return launch_gate_up(x, weight, Plan(ids, experts, tile, order, tiles))


def _down_cuda(h, weight, ids, experts, tile, order, tiles):
    return launch_down(h, weight, Plan(ids, experts, tile, order, tiles))


def expert_gate_up_cpu(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, *plan: object
) -> torch.Tensor:
    h = _gate_up_meta(x, weight, ids, experts)
    for expert, pairs, tokens in pairs_by_expert(ids, experts, weight.shape[0]):
        h[pairs] = silu_mul_cpu(fixed_rows_matmul(x[tokens], weight[expert].t()))
    return h


def expert_down_cpu(
    h: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, *plan: object
) -> torch.Tensor:
    y = _down_meta(h, weight, ids, experts)
    for expert, pairs, _ in pairs_by_expert(ids, experts, weight.shape[0]):
        y[pairs] = fixed_rows_matmul(h[pairs], weight[expert].t())
    return y


def _gate_up_meta(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, *plan: object
) -> torch.Tensor:
    return x.new_empty(ids.numel() + (weight.shape[0] - experts) * ids.shape[0], weight.shape[1] // 2)


def _down_meta(h: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int, *plan: object) -> torch.Tensor:
    return h.new_empty(h.shape[0], weight.shape[1])


for _name, _cuda, _cpu, _meta in (
    ("expert_gate_up", _gate_up_cuda, expert_gate_up_cpu, _gate_up_meta),
    ("expert_down", _down_cuda, expert_down_cpu, _down_meta),
):
    define(
        f"{_name}(Tensor x, Tensor weight, Tensor ids, int experts, int tile, Tensor? order, Tensor? tiles) -> Tensor"
    )
    register(_name, cuda=_cuda, cpu=_cpu, meta=_meta)


def expert_gate_up(x: torch.Tensor, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """x [M, H] -> ``silu(x @ gate^T) * (x @ up^T)`` of each pair, [P, I], in x's dtype.

    weight [E, 2 I, H], gate rows first; [E + 1, 2 I, H] with a shared expert that rides along, and the result then has
    M rows more. Rows of pairs without an expert are not written. Rounded after the products, after SiLU and after its
    product, as :func:`~unisono.kernels.silu_mul`.
    """
    return torch.ops.unisono.expert_gate_up(x, weight, *plan)


def expert_down(h: torch.Tensor, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """h [P (+ M), I] -> ``h @ weight^T`` with each row's own expert, [P (+ M), H]; weight [E (+ 1), H, I]."""
    return torch.ops.unisono.expert_down(h, weight, *plan)


def _aot(dtype: str, rows: int, hidden: int, inner: int, experts: int, top_k: int, rides: bool) -> list[AotCase]:
    """Both products of ``rows`` tokens."""
    pairs = rows * top_k
    lead = pairs <= LEAD_PAIRS
    chosen = expert_tiles(pairs, experts, torch.float32 if dtype == "fp32" else torch.bfloat16)
    cases = []
    for kernel, names, tile in (
        (_gate_up_kernel, ("x", "weight", "h"), chosen.up),
        (_down_kernel, ("h", "weight", "y"), chosen.down),
    ):
        signature = {**dict.fromkeys(names, f"*{dtype}"), **ints("ids order tiles", "M count")}
        sizes = {
            "H": hidden, "I": inner, "E": experts, "TOP_K": top_k, "TILE": chosen.rows, "BLOCK_N": tile.n,
            "BLOCK_K": tile.k, "STAGES": tile.stages, "ACROSS": tile.across, "RIDES": rides, "LEAD": lead,
            "PAIRS": triton.next_power_of_2(pairs) if lead else 1, "OVERLAP": True,
        }  # fmt: skip
        cases.append(AotCase(kernel, signature, sizes, num_warps=tile.warps))
    return cases


AOT: list[AotCase] = [
    *(case for rows in (1, 16, 64, 512, 2048, 4096) for case in _aot("bf16", rows, 2048, 512, 256, 8, True)),
    *(case for rows in (1, 64, 4096) for case in _aot("bf16", rows, 2048, 768, 128, 8, False)),
    *(case for rows in (1, 64, 512) for case in _aot("bf16", rows, 4096, 14336, 8, 2, False)),
    *(case for dtype in ("fp16", "fp32") for rows in (1, 512) for case in _aot(dtype, rows, 100, 60, 5, 2, True)),
]
