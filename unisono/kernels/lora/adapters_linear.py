"""The base product and its rows' adapters in one launch, for small passes. Owns the ``adapted_linear`` op.

The first programs of the grid compute ``x · A[e]ᵀ``: each has 16 of the low-rank columns of one adapter, and all of K.
All others compute a tile of the base product as ``kernels/gemm/linear.py`` does. While they read weights, the first
ones finish and increment a counter. A finished tile waits for the counter and adds ``· B[e]ᵀ`` before it is stored. So
adapters cost the reading of their weights and the end of a tile, but no launch.

No program waits for a later one in the grid, and the first ones wait for none: programs start in the grid's order, so
all awaited programs have started. The wait is bounded nevertheless: a tile that gives up stores NaN in rows with an
adapter. :data:`exact_adapted` compares the bits with those of separate launches when an engine starts.

Sums, roundings and shapes are those of ``kernels/lora/adapters.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, shared_memory
from unisono.kernels.gemm.linear import ROW_TILES, linear, linear_tile, tile_product
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import DTYPES, AotCase, Mutated, ints, op
from unisono.kernels.lora.adapters import (
    SMALL_RANK,
    SPLIT,
    AdapterPlan,
    adapter_expand_op,
    adapter_shrink_op,
    expand,
    first_sizes,
    plus,
    shrink,
)
from unisono.kernels.moe.plan import sort_pairs_op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

logger = logging.getLogger(__name__)

COLUMNS = 16
"""Low-rank columns of a program."""

MOST_ROWS = 32
"""Maximum rows of a pass. With 64 the first programs of eight adapters begin a wave of their own, and separate launches
take half the time."""

TILE_ROWS = tuple(rows for rows in ROW_TILES if rows <= MOST_ROWS)
"""Numbers of rows that exactly fill a tile."""

LOOKS = 1 << 22
"""Reads of the counter before a tile gives up: seconds."""


@triton.jit
def _low_columns(x, a, h, has, program, M, K, C, L, SPLIT: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Shrink by the program's 16 columns of a [L · C, K], those of one adapter, into h [M, P · L · RANK].

    has [BLOCK_M]: rows with this adapter; the others get zeros.
    """
    rows, ks, low_ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, COLUMNS)
    e = program * COLUMNS // C
    own = has == e
    total = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    if tl.max(own.to(tl.int32), 0) > 0:
        x_ptrs = x + rows.to(tl.int64)[:, None] * K + ks[None, :]
        a_ptrs = a + (program * COLUMNS + low_ks).to(tl.int64)[None, :] * K + ks[:, None]
        acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        for start in range(0, K, BLOCK_K):
            k_ok = ks < K - start
            x_tile = tl.load(x_ptrs + start, mask=own[:, None] & k_ok[None, :], other=0.0)
            a_tile = tl.load(a_ptrs + start, mask=k_ok[:, None], other=0.0)
            acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
            done = (start + BLOCK_K) % SPLIT == 0
            total = tl.where(done, total + acc, total)
            acc = tl.where(done, 0.0, acc)
        total += acc
    within = program * COLUMNS - e * C
    to = within // RANK * (L * RANK) + e * RANK + within % RANK
    at = rows[:, None] * (C * L) + (to + low_ks)[None, :]
    tl.store(h + at, tl.where(own[:, None], total, 0.0).to(h.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def _b_tile(b, has, cols, first, N, L, RANK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load b [L, N, RANK] of CHUNK // RANK adapters from ``first`` on, 0 for those without a row: [CHUNK, BLOCK_N]."""
    e, r = first + tl.arange(0, CHUNK // RANK), tl.arange(0, RANK)
    wanted = (tl.max((has[:, None] == e[None, :]).to(tl.int32), 0) > 0) & (e < L)
    at = (e.to(tl.int64) * N * RANK)[:, None, None] + r[None, :, None] + (cols * RANK)[None, None, :]
    tile = tl.load(b + at, mask=wanted[:, None, None] & (cols < N)[None, None, :], other=0.0)
    return tl.reshape(tile, (CHUNK, BLOCK_N))


@triton.jit
def _projection_of(col, n0, n1, n2):
    return (col >= n0).to(tl.int32) + (col >= n0 + n1).to(tl.int32) + (col >= n0 + n1 + n2).to(tl.int32)


@triton.jit
def _expanded(b_tile, b, h, has, cols, begin, last, M, N, C, L, n0, n1, n2, RANK: tl.constexpr,
              CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Compute the adapters' contribution to outputs ``cols``, ``begin`` … ``last``: [BLOCK_M, BLOCK_N] fp32. b_tile:
    the first one.

    Adapters lie one after the other along the sum. A row is zero except for its own adapter; zeros change no bit.
    """
    rows, j = tl.arange(0, BLOCK_M), tl.arange(0, CHUNK)
    part = _projection_of(cols, n0, n1, n2)
    first_part = _projection_of(begin, n0, n1, n2)
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for p in range(first_part, _projection_of(last, n0, n1, n2) + 1):
        for first in tl.range(0, L * RANK, CHUNK, num_stages=1):
            if (first > 0) | (p > first_part):
                b_tile = _b_tile(b, has, cols, first // RANK, N, L, RANK, CHUNK, BLOCK_N)
            at = rows[:, None] * (C * L) + (p * (L * RANK) + first + j)[None, :]
            low = tl.load(h + at, mask=(rows < M)[:, None] & (first + j < L * RANK)[None, :], other=0.0)
            added = tl.dot(low, b_tile, delta, input_precision="ieee")
            delta = tl.where((part == p)[None, :], added, delta)
    return delta


@triton.jit
def _count(arrived, LOADS: tl.constexpr):
    """Read the number of first programs that are done; their stores are visible afterwards.

    LOADS: every thread loads it. This needs no serialisation in the L2 and no barrier, unlike an atomic addition.
    """
    if LOADS:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [arrived], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")


@triton.jit
def _adapted_linear_kernel(x, weight, bias, out, a, b, h, ids, arrived, M, N, K, C, L, n0, n1, n2,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                           SWAPPED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr,
                           CHUNK: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr, LOW_K: tl.constexpr,
                           EARLY: tl.constexpr, LOOKS: tl.constexpr, LOADS: tl.constexpr,
                           OVERLAP: tl.constexpr):  # fmt: skip
    """Multiply and add adapters, M up to BLOCK_M.

    arrived: number of first programs that are done, 0 at the launch. n0, n1, n2: outputs of the first projections.
    CHUNK: block of the expansion's sum, a multiple of RANK. LOW_K: inputs that the first programs load together.
    EARLY: read b before the weights.

    """
    follow(OVERLAP)
    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < M
    has = tl.load(ids + rows, mask=row_ok, other=L)
    first = L * C // COLUMNS
    program = tl.program_id(0)
    if program < first:
        _low_columns(x, a, h, has, program, M, K, C, L, SPLIT, RANK, BLOCK_M, LOW_K, COLUMNS)
        tl.debug_barrier()  # everything is written before one thread counts the program in
        tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    else:
        begin = (program - first) * BLOCK_N
        cols = begin + tl.arange(0, BLOCK_N)
        col_ok = cols < N
        if EARLY:
            b_tile = _b_tile(b, has, cols, 0, N, L, RANK, CHUNK, BLOCK_N)
        # From here on as in kernels/gemm/linear.py.
        x_rows, w_rows = x + rows.to(tl.int64) * K, weight + tl.minimum(cols, N - 1).to(tl.int64) * K
        acc = tile_product(x_rows, w_rows, row_ok, K, BLOCK_M, BLOCK_N, BLOCK_K, SWAPPED, EVEN_K)
        y = acc.to(out.dtype.element_ty)
        if HAS_BIAS:
            added = tl.load(bias + cols, mask=col_ok, other=0.0)
            y = (y.to(tl.float32) + added.to(tl.float32)[None, :]).to(y.dtype)
        if not EARLY:
            b_tile = _b_tile(b, has, cols, 0, N, L, RANK, CHUNK, BLOCK_N)
        looks = 0
        seen = _count(arrived, LOADS)
        while (seen < first) & (looks < LOOKS):
            looks += 1
            seen = _count(arrived, LOADS)
        tl.debug_barrier()  # all threads have seen the count before any of them reads the stored values
        last = tl.minimum(begin + BLOCK_N, N) - 1
        delta = _expanded(b_tile, b, h, has, cols, begin, last, M, N, C, L, n0, n1, n2, RANK, CHUNK, BLOCK_M, BLOCK_N)
        delta = tl.where(seen < first, float("nan"), delta)
        y = tl.where((has < L)[:, None], plus(y.to(tl.float32), delta).to(y.dtype), y)
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out + at, y, mask=row_ok[:, None] & col_ok[None, :])


class _Blocks(NamedTuple):
    """Blocking beside the tile; it affects speed only. See the kernel."""

    chunk: int
    low_k: int
    early: bool

    @staticmethod
    def of(tile: Tile, rank: int, dtype: torch.dtype) -> _Blocks:
        """Choose the blocking as measured on an H200.

        The first programs load many inputs together, so that they finish before the others; a tile of 16 rows has
        registers for a part of b while it reads weights.
        """
        if dtype is torch.float32:
            return _Blocks(rank, tile.k, True)
        early = tile.m == 16
        return _Blocks(max(rank, 128 if early else 64), max(256, tile.k), early)


def adapted_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    projections: Sequence[int], ids: torch.Tensor, arrived: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    x = x.contiguous()
    (rows, k), n, (adapters, low, _), rank = x.shape, weight.shape[0], a.shape, b.shape[2]
    out, h = x.new_empty(rows, n), x.new_empty(rows, adapters * low)
    tile = linear_tile(rows, n, x.dtype, shared_memory(x.device))
    blocks = _Blocks.of(tile, rank, x.dtype)
    _adapted_linear_kernel[(adapters * low // COLUMNS + triton.cdiv(n, tile.n),)](
        x, weight, bias, out, a, b, h, ids, arrived, rows, n, k, low, adapters, *first_sizes(projections),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, SWAPPED=tile.swapped, EVEN_K=k % tile.k == 0,
        HAS_BIAS=bias is not None, RANK=rank, CHUNK=blocks.chunk, SPLIT=SPLIT, COLUMNS=COLUMNS, LOW_K=blocks.low_k,
        EARLY=blocks.early, LOOKS=LOOKS, LOADS=x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        **overlapped(x.device),
    )  # fmt: skip
    return out


@op(cuda=adapted_linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]))
def adapted_linear_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    projections: Sequence[int], ids: torch.Tensor, arrived: Mutated[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    y = linear.cpu(x, weight, bias, None)
    order, tiles = sort_pairs_op.cpu(ids, len(a) + 1, 16)
    adapter_expand_op.cpu(
        y, adapter_shrink_op.cpu(x, a, order, tiles, 16, b.shape[2]), b, projections, order, tiles, 16
    )
    return y


def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    projections: Sequence[int], plan: AdapterPlan,
) -> torch.Tensor | None:  # fmt: skip
    """Compute ``linear(x [M, K], weight, bias)`` plus each row's adapter: [M, N]. Returns None if separate launches
    must.

    a [L, C, K], b [L, N, R], projections: as in ``shrink`` and ``expand``, with the same bits.
    """
    if x.shape[0] > MOST_ROWS or b.shape[2] > SMALL_RANK or not exact_adapted.serves(_key(weight, a, b)):
        return None
    if (arrived := plan.counter()) is None:
        return None
    return adapted_linear_op(x, weight, bias, a, b, list(projections), plan.ids, arrived)


def _key(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Hashable:
    """(N, K, C, R, dtype)."""
    return *weight.shape, a.shape[1], b.shape[2], weight.dtype


def _keys(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, projections: Sequence[int]) -> tuple[Hashable, ...]:
    return (_key(weight, a, b),) if weight.device.type == "cuda" and b.shape[2] <= SMALL_RANK else ()


def _same_bits(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, projections: Sequence[int]) -> bool:
    """Compare with separate launches at each number of rows that fills a tile; some rows have no adapter."""
    same = all(_same_rows(weight, a, b, projections, rows) for rows in TILE_ROWS)
    if not same:
        key = _key(weight, a, b)
        logger.warning("adapters of a layer %s take launches of their own: other bits in one launch", key)
    return same


def _same_rows(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, projections: Sequence[int], rows: int) -> bool:
    adapters = min(3, a.shape[0])
    generator = torch.Generator(weight.device).manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype)

    x, a, b = random(rows, weight.shape[1]), random(adapters, *a.shape[1:]) / 64, random(adapters, *b.shape[1:])
    ids = torch.arange(rows, dtype=torch.int32, device=weight.device) % (adapters + 1)
    plan = AdapterPlan(ids, adapters, products=1)
    plan.sort()
    expected = expand(linear(x, weight), shrink(x, a, b.shape[2], plan), b, projections, plan)
    counter = plan.counter()
    assert counter is not None
    return torch.equal(adapted_linear_cuda(x, weight, None, a, b, projections, ids, counter), expected)


exact_adapted = ExactKernel("products with adapters in one launch", _keys, _same_bits, trusted=True)
"""The kernel of :func:`adapted_linear`, against separate launches, which serve where the bits differ."""


def _aot(shared: int, rows: int, dtype: str, n: int, rank: int, even_k: bool, bias: bool) -> AotCase:
    kind = DTYPES[dtype]
    tile: Tile = linear_tile(rows, n, kind, shared)
    blocks = _Blocks.of(tile, rank, kind)
    tensors = dict.fromkeys(("x", "weight", "bias", "out", "a", "b", "h"), f"*{dtype}")
    return AotCase(
        _adapted_linear_kernel,
        tensors | ints("ids arrived", "M N K C L n0 n1 n2"),
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "SWAPPED": tile.swapped,
            "EVEN_K": even_k, "HAS_BIAS": bias, "RANK": rank, "CHUNK": blocks.chunk, "SPLIT": SPLIT,
            "COLUMNS": COLUMNS, "LOW_K": blocks.low_k, "EARLY": blocks.early, "LOOKS": LOOKS, "LOADS": True,
            "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    return [
        *(_aot(shared, rows, "bf16", n, 16, True, False) for rows in TILE_ROWS for n in (4096, 6144, 24576)),
        _aot(shared, 16, "bf16", 6144, 64, True, True),
        _aot(shared, 32, "bf16", 6144, 32, True, True),
        _aot(shared, 16, "fp16", 4096, 32, False, True),
        *(_aot(shared, rows, "fp32", 6144, 16, False, False) for rows in TILE_ROWS),
    ]


AOT = aot(HOPPER)
