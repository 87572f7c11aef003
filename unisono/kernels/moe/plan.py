"""Grouping of tokens by expert into tiles of matrix products. Owns the ``sort_pairs`` op.

A token and one of its experts are a *pair*: pair ``token * top_k + slot``. With a fused shared expert (expert E of the
stack), one more pair per token follows. Products write a pair's result to the pair's own row, so the plan affects speed
only.

There are two plans, chosen by the number of pairs alone. Up to LEAD_PAIRS, the first pair of each expert gathers the
expert's pairs, and nothing is sorted. Above that, three small kernels sort pairs by expert: count in blocks, convert
counts to places, place. No atomics, no host, and no shape depends on data: there are as many tiles as the worst choice
of experts needs, and unused tiles have no rows.

A product's kernel reads its rows with :func:`program_place`, :func:`tile_rows`, :func:`tile_pairs` and
:func:`tokens_of`, and stores them with :func:`store_pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, ints, op
from unisono.kernels.overlap import follow, overlapped

LEAD_PAIRS = 128
"""Maximum number of pairs that are not sorted."""

_COUNTED = 32
"""Blocks of counts added at once."""

_LISTED = 16
"""Tiles that one program lists."""

_TILE_ROWS = {4: 16, 32: 32, 96: 64, float("inf"): 128}
"""Maximum average number of pairs per expert -> rows of a tile."""


class ExpertPlan(NamedTuple):
    """Division of a pass's pairs into tiles.

    ids [M, top_k] i32: experts of each token; E: none. experts: E, the number of experts. tile: rows of a tile. order
    [P] i32: pairs sorted by expert, those without one last in any order. tiles [3, tiles] i32: expert of each tile, its
    first place in ``order`` and its number of rows, 0 in unused tiles. Both None: not sorted.
    """

    ids: torch.Tensor
    experts: int
    tile: int
    order: torch.Tensor | None = None
    tiles: torch.Tensor | None = None

    @property
    def listed(self) -> int:
        """Number of tiles, without a shared expert's."""
        return self.ids.numel() if self.tiles is None else self.tiles.shape[1]

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int]:
        """Arguments ``ids, order, tiles, M, count`` of a product's kernel."""
        return self.ids, self.order, self.tiles, self.ids.shape[0], self.listed


class Shapes(NamedTuple):
    """Sizes of a pass and its stack: M tokens, H features, I intermediate features, E experts. rides: with a fused
    shared expert."""

    rows: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    rides: bool = False


def product_launch(
    plan: ExpertPlan, stack: int, hidden: int, inner: int, parts: int, across: bool
) -> tuple[tuple[int], int, dict[str, Any]]:
    """(grid, rows of the result, compile-time arguments), shared by the products of all weight formats.

    stack: weights in the stack. parts: blocks of outputs. across: neighbours in the grid share rows.
    """
    (rows, top_k), rides, lead = plan.ids.shape, stack - plan.experts, plan.tiles is None
    tiles = plan.listed + (rides if lead else rides * triton.cdiv(rows, plan.tile))
    shapes = Shapes(rows, hidden, inner, plan.experts, top_k, rides > 0)
    return (tiles * parts,), rows * top_k + rides * rows, _product_sizes(shapes, plan.tile, across, lead)


def product_case(
    kernel: Any, tensors: Mapping[str, str | None], shapes: Shapes, tile: int, across: bool, options: dict[str, Any],
    scalars: str = "",
) -> AotCase:  # fmt: skip
    """Make the AotCase of a launch with the arguments of :func:`product_launch` and the weight format's ``options``.

    tensors: types of operands and result; None: absent. scalars: names of int32 arguments beside ``M count``.
    """
    signature = {name: kind for name, kind in tensors.items() if kind} | ints("ids order tiles", f"M count {scalars}")
    sizes = _product_sizes(shapes, tile, across, lead=shapes.rows * shapes.top_k <= LEAD_PAIRS) | options
    sizes |= dict.fromkeys(name for name, kind in tensors.items() if not kind)
    warps, stages = sizes.pop("num_warps"), sizes.pop("num_stages", AotCase.num_stages)
    return AotCase(kernel, signature, sizes | {"OVERLAP": True}, warps, stages)


def _product_sizes(shapes: Shapes, tile: int, across: bool, lead: bool) -> dict[str, Any]:
    rows, hidden, inner, experts, top_k, rides = shapes
    return {
        "H": hidden, "I": inner, "E": experts, "TOP_K": top_k, "TILE": tile, "ACROSS": across, "RIDES": rides,
        "LEAD": lead, "PAIRS": triton.next_power_of_2(rows * top_k) if lead else 1,
    }  # fmt: skip


def tile_of(pairs: int, experts: int) -> int:
    """Choose the rows of a tile in both products for this number of pairs, from shapes alone, for quantised weights."""
    return next(rows for most, rows in _TILE_ROWS.items() if pairs <= most * experts)


def num_tiles(pairs: int, experts: int, tile: int) -> int:
    """Maximum number of tiles for any choice of experts: each expert has at most one that is not full."""
    return min(pairs, pairs // tile + experts)


# ---- the rows of a tile, in a product's kernel ------------------------------------------------------


@triton.jit
def program_place(parts, ACROSS: tl.constexpr):
    """(tile of rows, block of outputs) of this program. parts: number of blocks of outputs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ACROSS:
        return program // parts, program % parts
    tiles = programs // parts
    return program % tiles, program // tiles


@triton.jit
def tile_rows(ids, tiles, t, M, count, E: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
              RIDES: tl.constexpr, LEAD: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """(expert, number of rows n, first, rank [PAIRS]) of tile ``t``.

    count: listed tiles. RIDES: a shared expert has tiles too. LEAD: not sorted: tile t is pair t, and has rows where
    that pair is its expert's first; n may exceed TILE. PAIRS: a power of two that holds all pairs. :func:`tile_pairs`
    takes the results.
    """
    pairs = M * TOP_K
    if LEAD:
        p = tl.arange(0, PAIRS)
        every = tl.load(ids + p, mask=p < pairs, other=-1)
        e = tl.load(ids + t, mask=t < pairs, other=E)
        same = (every == e).to(tl.int32)
        leads = (tl.min(tl.where(same != 0, p, PAIRS), 0) == t) & (e < E)
        n = tl.where(t < pairs, tl.where(leads, tl.sum(same, 0), 0), M)
        rank = tl.where(same != 0, tl.cumsum(same, 0) - 1, -1)
        first = tl.where(t < pairs, -1, pairs)
    else:
        shared = tl.cdiv(M, TILE) if RIDES else 0
        listed = t >= shared
        e = tl.load(tiles + t - shared, mask=listed, other=E)
        first = tl.load(tiles + count + t - shared, mask=listed, other=0)
        n = tl.load(tiles + 2 * count + t - shared, mask=listed, other=0)
        first, n = tl.where(listed, first, -1 - t * TILE), tl.where(listed, n, tl.minimum(M - t * TILE, TILE))
        rank = tl.zeros([PAIRS], tl.int32)
    return e, n, first, rank


@triton.jit
def tile_pairs(order, first, rank, base, n, M, TOP_K: tl.constexpr, TILE: tl.constexpr, LEAD: tl.constexpr,
               PAIRS: tl.constexpr):  # fmt: skip
    """(pair, mask), each [TILE], of rows ``base`` … of a tile."""
    r = base + tl.arange(0, TILE)
    valid, pairs = r < n, M * TOP_K
    if LEAD:
        p = tl.arange(0, PAIRS)
        own = tl.sum(tl.where(rank[None, :] == r[:, None], p[None, :], 0), 1)
        pair = tl.where(first < 0, own, first + r)
    else:
        own = tl.load(order + first + r, mask=valid & (first >= 0), other=0)
        pair = tl.where(first < 0, pairs - 1 - first + r, own)
    return pair, valid


@triton.jit
def tokens_of(pair, M, TOP_K: tl.constexpr):
    """Token of each pair."""
    return tl.where(pair < M * TOP_K, pair // TOP_K, pair - M * TOP_K)


@triton.jit
def store_pairs(out, value, pair, valid, cols, N: tl.constexpr):
    """Store value [TILE, cols] as columns ``cols`` of the pairs' rows of out [pairs, N]."""
    at = pair.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=valid[:, None] & (cols < N)[None, :])


# ---- the sort ---------------------------------------------------------------------------------------


@triton.jit
def _count_kernel(ids, counts, pairs, E, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Count each expert's pairs in each block of BLOCK pairs: counts [blocks, EXPERTS]."""
    follow(OVERLAP)
    block = tl.program_id(0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + p, mask=p < pairs, other=E)
    both = tl.histogram(tl.where(e < E, e, EXPERTS), 2 * EXPERTS).reshape(2, EXPERTS)  # the upper half has no expert
    half = tl.arange(0, 2)[:, None]
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), tl.sum(tl.where(half == 0, both, 0), 0))


@triton.jit
def _starts_kernel(counts, starts, firsts, totals, blocks, EXPERTS: tl.constexpr, EACH: tl.constexpr,
                   TILE: tl.constexpr, COUNTED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute the first place in the order of a block's pairs of each expert: starts [blocks, EXPERTS].

    firsts, totals [EXPERTS]: each expert's first tile and its number of pairs. Every program adds all counts and writes
    EACH experts.
    """
    follow(OVERLAP)
    e, r = tl.arange(0, EXPERTS), tl.arange(0, COUNTED)
    total = tl.zeros([EXPERTS], tl.int32)
    for block in range(0, blocks, COUNTED):
        at = (block + r)[:, None] * EXPERTS + e[None, :]
        total += tl.sum(tl.load(counts + at, mask=(block + r < blocks)[:, None], other=0), 0)
    if tl.program_id(0) == 0:
        of_each = (total + TILE - 1) // TILE
        tl.store(firsts + e, tl.cumsum(of_each, 0) - of_each)
        tl.store(totals + e, total)
    place = tl.cumsum(total, 0) - total
    own = tl.program_id(0) * EACH + tl.arange(0, EACH)
    run = tl.sum(tl.where(e[None, :] == own[:, None], place[None, :], 0), 1)
    for block in range(0, blocks, COUNTED):
        at = (block + r)[:, None] * EXPERTS + own[None, :]
        inside = (block + r < blocks)[:, None]
        count = tl.load(counts + at, mask=inside, other=0)
        tl.store(starts + at, run[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        run += tl.sum(count, 0)


@triton.jit
def _place_kernel(ids, starts, firsts, totals, order, tiles, pairs, blocks, count, E, EXPERTS: tl.constexpr,
                  BLOCK: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Place pairs and list tiles. Programs below ``blocks`` place a block's pairs, the others list LISTED tiles
    each.
    """
    follow(OVERLAP)
    block = tl.program_id(0)
    if block < blocks:
        i = tl.arange(0, BLOCK)
        p = block * BLOCK + i
        e = tl.load(ids + p, mask=p < pairs, other=E)
        before = tl.sum(((e[:, None] == e[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
        at = tl.load(starts + block * EXPERTS + e, mask=e < E, other=0) + before
        tl.store(order + at, p, mask=e < E)
    else:
        x = tl.arange(0, EXPERTS)
        first, total = tl.load(firsts + x), tl.load(totals + x)
        t = (block - blocks) * LISTED + tl.arange(0, LISTED)
        expert = tl.sum((first[None, :] <= t[:, None]).to(tl.int32), 1) - 1
        mine = x[None, :] == expert[:, None]
        begin = tl.sum(tl.where(mine, first[None, :], 0), 1)
        size = tl.sum(tl.where(mine, total[None, :], 0), 1)
        place = tl.sum(tl.where(x[None, :] < expert[:, None], total[None, :], 0), 1) + (t - begin) * TILE
        rows = tl.minimum(tl.maximum(size - (t - begin) * TILE, 0), TILE)
        tl.store(tiles + t, tl.where(rows > 0, expert, 0), mask=t < count)
        tl.store(tiles + count + t, tl.where(rows > 0, place, 0), mask=t < count)
        tl.store(tiles + 2 * count + t, rows, mask=t < count)


def _block(pairs: int) -> int:
    return 64 if pairs <= 8192 else 256


def launch_sort_pairs(ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs, device = ids.numel(), ids.device
    width, block = max(16, triton.next_power_of_2(experts)), _block(pairs)
    blocks, count = triton.cdiv(pairs, block), num_tiles(pairs, experts, tile)
    counts, starts = (torch.empty(blocks, width, dtype=torch.int32, device=device) for _ in range(2))
    firsts, totals = (torch.empty(width, dtype=torch.int32, device=device) for _ in range(2))
    order, tiles = torch.empty(pairs, dtype=torch.int32, device=device), ids.new_empty(3, count)
    _count_kernel[(blocks,)](ids, counts, pairs, experts, EXPERTS=width, BLOCK=block, num_warps=4, **overlapped(device))
    _starts_kernel[(width // 16,)](
        counts, starts, firsts, totals, blocks,
        EXPERTS=width, EACH=16, TILE=tile, COUNTED=_COUNTED, num_warps=8, **overlapped(device),
    )  # fmt: skip
    _place_kernel[(blocks + triton.cdiv(count, _LISTED),)](
        ids, starts, firsts, totals, order, tiles, pairs, blocks, count, experts,
        EXPERTS=width, BLOCK=block, TILE=tile, LISTED=_LISTED, num_warps=max(4, block // 32), **overlapped(device),
    )  # fmt: skip
    return order, tiles


def _sort_pairs_meta(ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ids.new_empty(ids.numel()), ids.new_empty(3, num_tiles(ids.numel(), experts, tile))


@op(cuda=launch_sort_pairs, meta=_sort_pairs_meta)
def sort_pairs_op(ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = ids.flatten()
    count, totals = num_tiles(flat.numel(), experts, tile), torch.bincount(flat, minlength=experts)[:experts]
    of_each = (totals + tile - 1) // tile
    tiles = torch.zeros(3, count, dtype=torch.int32)
    expert = torch.repeat_interleave(torch.arange(experts), of_each)
    begin = (torch.cumsum(of_each, 0) - of_each)[expert]
    done = (torch.arange(len(expert)) - begin) * tile
    tiles[0, : len(expert)] = expert
    tiles[1, : len(expert)] = (torch.cumsum(totals, 0) - totals)[expert] + done
    tiles[2, : len(expert)] = (totals[expert] - done).clamp(max=tile)
    return flat.argsort(stable=True).to(torch.int32), tiles


def plan_experts(ids: torch.Tensor, experts: int, tile: int) -> ExpertPlan:
    """ExpertPlan a pass whose tokens go to experts ``ids [M, top_k]`` of ``experts``, for tiles of ``tile`` rows.

    Rows of padding have id ``experts``: nothing is computed for them, and their rows of the products are not written.
    """
    if ids.numel() <= LEAD_PAIRS:
        return ExpertPlan(ids, experts, tile)
    return ExpertPlan(ids, experts, tile, *sort_pairs_op(ids, experts, tile))


AOT: list[AotCase] = [
    case
    for width, block, tile in ((256, 64, 32), (256, 256, 128), (128, 64, 16), (16, 64, 64))
    for case in (
        AotCase(_count_kernel, ints("ids counts", "pairs E"), {"EXPERTS": width, "BLOCK": block, "OVERLAP": True}),
        AotCase(
            _starts_kernel,
            ints("counts starts firsts totals", "blocks"),
            {"EXPERTS": width, "EACH": 16, "TILE": tile, "COUNTED": _COUNTED, "OVERLAP": True},
            num_warps=8,
        ),
        AotCase(
            _place_kernel,
            ints("ids starts firsts totals order tiles", "pairs blocks count E"),
            {"EXPERTS": width, "BLOCK": block, "TILE": tile, "LISTED": _LISTED, "OVERLAP": True},
        ),
    )
]
