"""Low-rank products of adapters (LoRA), added to the outputs of a linear layer. Owns the ``adapter_*`` ops.

A row with adapter e gets ``y += (x · A[e]ᵀ) · B[e]ᵀ``, in three steps:

* *shrink*: x · A[e]ᵀ. K is cut at multiples of SPLIT; within a cut it is summed in one sequence in fp32.
* the sums of the cuts are added in order in fp32, and rounded once to the activations' type.
* *expand*: · B[e]ᵀ, summed over the rank in one sequence in fp32; the base output, rounded already, is added in
  fp32, and the sum is rounded once.

The cuts depend on K alone, and tiles affect speed only, so a row's bits depend on the row, its adapter and the base
output: they are the same in prompts, rounds and verification, whatever adapters the other rows have. Rows without an
adapter keep the base output's bits: nothing is added to them, not even zero.

There are two implementations with the same bits. Small passes over plain weights need no launch: the base product's
kernel does all three steps (``kernels/lora/adapters_linear.py``). Elsewhere the kernels here do: shrinking runs beside
the base product, since it does not read its output, and expanding follows; the gates of an MLP expand while SiLU reads
them.

Rows of one adapter are tiled together (:class:`AdapterPlan`). A pass has as many tiles as the worst choice of adapters
needs; the programs of unused tiles return at once.

Shapes: M rows, K inputs, N outputs, L adapters, P projections that the layer computes as one product, R rank,
C = P · R, S cuts of K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.cpu import row_exact_product
from unisono.kernels.library import DTYPES, AotCase, Mutated, ints, op
from unisono.kernels.moe.plan import sort_pairs_op
from unisono.kernels.norm.activation import silu_mul, silu_product
from unisono.kernels.overlap import follow, overlapped, overlapping

SPLIT = 512
"""Inputs summed in one sequence. Part of the arithmetic: it changes bits."""

MAX_PROJECTIONS = 4
"""Maximum projections of one layer."""

SMALL_ROWS, SMALL_RANK = 64, 64
"""Up to this number of rows tiles are small; up to this rank a program holds the whole rank."""

ARRIVAL_WORDS = 32
"""Stride of the counters of arrivals in int32 words, so that no two share a cache line."""


class AdapterPlan:
    """Adapters of a pass's rows.

    ids [M] i32: adapter of each row; ``adapters``: none. products: number of counters for linear layers. tile: rows of
    a tile.
    """

    def __init__(self, ids: torch.Tensor, adapters: int, products: int = 0) -> None:
        self.ids, self.adapters, self.tile = ids, adapters, 16 if ids.shape[0] <= SMALL_ROWS else 32
        self._products = products
        self._counters: Iterator[torch.Tensor] | None = None
        self._sorted: tuple[torch.Tensor, torch.Tensor] | None = None

    def sort(self) -> None:
        """Divide the rows into tiles of one adapter each, unless they are divided already.

        At least one launch must come between this and ``shrink``, which reads the tiles before it waits.
        """
        if self._sorted is None:
            self._sorted = sort_pairs_op(self.ids, self.adapters + 1, self.tile)

    @property
    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result of :meth:`sort`: (order, tiles). Raises RuntimeError if it was not called.

        order [M] i32: rows sorted by adapter, those without one last. tiles [3, tiles] i32: adapter of each tile, or
        ``adapters`` for none; its first place in ``order``; its number of rows, 0 in unused tiles.
        """
        if self._sorted is None:
            raise RuntimeError("the rows of an AdapterPlan are sorted a launch before they are needed: call sort()")
        return self._sorted

    def counter(self) -> torch.Tensor | None:
        """Return a counter [ARRIVAL_WORDS] i32 with value 0 for one product of the pass; None if all ``products`` have
        one.
        """
        if self._counters is None:
            self._counters = iter(self.ids.new_zeros(self._products, ARRIVAL_WORDS))
        return next(self._counters, None)


def padded_rank(rank: int) -> int:
    """Round ``rank`` up to the rank of stacks: 16, 32, or a multiple of 64."""
    return next((size for size in (16, 32) if rank <= size), -(-rank // 64) * 64)


@triton.jit
def _rows_of_tile(order, tiles, t, count, BLOCK_M: tl.constexpr):
    """(adapter or L for none, rows [BLOCK_M], mask of rows) of tile ``t``."""
    n = tl.load(tiles + 2 * count + t)
    e = tl.load(tiles + t)
    first = tl.load(tiles + count + t)
    i = tl.arange(0, BLOCK_M)
    rows = tl.load(order + first + i, mask=i < n, other=0)
    return e, rows.to(tl.int64), i < n


@overlapping(reads_early=True)
@triton.jit
def _adapter_shrink_kernel(x, a, h, order, tiles, M, K, C, L, count, SPLIT: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
                           OVERLAP: tl.constexpr):  # fmt: skip
    """Shrink: h [S, M, C] fp32. Runs beside the base product, the kernel before it, which also only reads x."""
    e, rows, row_ok = _rows_of_tile(order, tiles, tl.program_id(0), count, BLOCK_M)
    row_ok = row_ok & (e < L)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.program_id(2) * SPLIT
    ks = begin + tl.arange(0, BLOCK_K)
    needed = tl.max(row_ok.to(tl.int32), 0) > 0
    col_ok = cols < C
    x_ptrs = x + rows[:, None] * K + ks[None, :]
    a_ptrs = a + (e.to(tl.int64) * C + cols)[None, :] * K + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    if needed:
        for start in range(0, SPLIT, BLOCK_K):
            k_ok = ks < K - start
            x_tile = tl.load(x_ptrs + start, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
            a_tile = tl.load(a_ptrs + start, mask=col_ok[None, :] & k_ok[:, None], other=0.0)
            acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    follow(OVERLAP)
    at = (tl.program_id(2) * M + rows)[:, None] * C + cols[None, :]
    tl.store(h + at, acc, mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _adapter_sum_kernel(h, out, total, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Add the cuts' sums h [S, M, C] in order and round: out [M, C]. total: M · C."""
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, h_ptrs = tl.zeros((BLOCK,), tl.float32), h + at
    for _ in tl.static_range(SPLITS):
        value += tl.load(h_ptrs, mask=at < total, other=0.0)
        h_ptrs += total
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < total)


@triton.jit
def plus(base, added):
    """Compute base + added, fp32, as an fma. With a plain sum the compiler starts the product at base: other bits."""
    return tl.fma(added, 1.0, base)


@triton.jit
def _low(h_ptrs, cut, row_ok, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add the cuts' sums at h_ptrs, ``cut`` elements apart, in order: [BLOCK_M, BLOCK_R] fp32."""
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for s in tl.static_range(SPLITS):
        low += tl.load(h_ptrs + s * cut, mask=row_ok[:, None], other=0.0).to(tl.float32)
    return low


@triton.jit
def projection(p, n0, n1, n2, N, EACH: tl.constexpr):
    """Projection of block ``p`` of EACH outputs: (index, first output, end, block within the projection).

    Blocks of a projection are neighbours. n0, n1, n2: sizes of the projections.
    """
    p1 = tl.cdiv(n0, EACH)
    p2 = p1 + tl.cdiv(n1, EACH)
    p3 = p2 + tl.cdiv(n2, EACH)
    part = (p >= p1).to(tl.int32) + (p >= p2).to(tl.int32) + (p >= p3).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, p1, tl.where(part == 2, p2, p3)))
    begin = tl.where(part == 0, 0, tl.where(part == 1, n0, tl.where(part == 2, n0 + n1, n0 + n1 + n2)))
    end = tl.where(part == 0, n0, tl.where(part == 1, n0 + n1, tl.where(part == 2, n0 + n1 + n2, N)))
    return part, begin, end, p - before


@overlapping(reads_early=True)
@triton.jit
def _adapter_expand_kernel(y, h, b, order, tiles, M, N, C, L, count, n0, n1, n2, SPLITS: tl.constexpr,
                           RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
                           STRIP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Expand: y [M, N] += h [S, M, C] · b [L, N, RANK]ᵀ. n0, n1, n2: outputs of the first projections.

    A program has STRIP blocks of outputs of one projection. The plan and the first weights are read early.
    """
    e, rows, row_ok = _rows_of_tile(order, tiles, tl.program_id(0), count, BLOCK_M)
    row_ok = row_ok & (e < L)
    needed = tl.max(row_ok.to(tl.int32), 0) > 0
    part, begin, end, block = projection(tl.program_id(1), n0, n1, n2, N, BLOCK_N * STRIP)
    r = tl.arange(0, BLOCK_R)
    cols = begin + block * (BLOCK_N * STRIP) + tl.arange(0, BLOCK_N)
    b_ptrs = b + (e.to(tl.int64) * N + cols)[None, :] * RANK + r[:, None]
    h_ptrs = h + rows[:, None] * C + (part * RANK + r)[None, :]
    y_ptrs = y + rows[:, None] * N + cols[None, :]
    cut = M * C
    if (STRIP == 1) & (RANK == BLOCK_R):
        inside = needed & (cols < end)
        b_tile = tl.load(b_ptrs, mask=inside[None, :], other=0.0)
        follow(OVERLAP)
        if needed:
            low = _low(h_ptrs, cut, row_ok, SPLITS, BLOCK_M, BLOCK_R).to(b_tile.dtype)
            acc = tl.dot(low, b_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), input_precision="ieee")
            mask = row_ok[:, None] & inside[None, :]
            base = tl.load(y_ptrs, mask=mask, other=0.0)
            tl.store(y_ptrs, plus(base.to(tl.float32), acc).to(base.dtype), mask=mask)
    else:
        follow(OVERLAP)
        if needed:
            low = _low(h_ptrs, cut, row_ok, SPLITS, BLOCK_M, BLOCK_R).to(b.dtype.element_ty)
            for step in range(STRIP):
                inside = cols + step * BLOCK_N < end
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, RANK, BLOCK_R):
                    if RANK > BLOCK_R:
                        low = _low(h_ptrs + k, cut, row_ok, SPLITS, BLOCK_M, BLOCK_R).to(b.dtype.element_ty)
                    b_tile = tl.load(b_ptrs + step * (BLOCK_N * RANK) + k, mask=inside[None, :], other=0.0)
                    acc = tl.dot(low, b_tile, acc, input_precision="ieee")
                mask = row_ok[:, None] & inside[None, :]
                base = tl.load(y_ptrs + step * BLOCK_N, mask=mask, other=0.0)
                tl.store(y_ptrs + step * BLOCK_N, plus(base.to(tl.float32), acc).to(base.dtype), mask=mask)


@overlapping(reads_early=True)
@triton.jit
def _adapter_silu_kernel(y, h, b, out, order, tiles, M, I, L, count, SPLITS: tl.constexpr,  # noqa: E741
                         RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
                         OVERLAP: tl.constexpr):  # fmt: skip
    """Expand and apply SiLU: out [M, I] = silu(gate) * up, (gate, up) = y [M, 2 I] + h [S, M, 2 RANK] · b [L, 2 I,
    RANK]ᵀ.

    Rows without an adapter are in tiles, too. A program has STRIP blocks of outputs.
    """
    e, rows, row_ok = _rows_of_tile(order, tiles, tl.program_id(0), count, BLOCK_M)
    adapted = e < L
    r = tl.arange(0, RANK)
    first = tl.program_id(1) * (BLOCK_N * STRIP) + tl.arange(0, BLOCK_N)
    b_ptrs = b + (e.to(tl.int64) * (2 * I) + first)[None, :] * RANK + r[:, None]
    h_ptrs = h + rows[:, None] * (2 * RANK) + r[None, :]
    dtype: tl.constexpr = y.dtype.element_ty
    follow(OVERLAP)
    if tl.max(row_ok.to(tl.int32), 0) > 0:
        low_gate = _low(h_ptrs, M * (2 * RANK), row_ok & adapted, SPLITS, BLOCK_M, RANK).to(dtype)
        low_up = _low(h_ptrs + RANK, M * (2 * RANK), row_ok & adapted, SPLITS, BLOCK_M, RANK).to(dtype)
        y_ptrs = y + rows[:, None] * (2 * I) + first[None, :]
        here = row_ok[:, None] & (first < I)[None, :]
        next_gate, next_up = tl.load(y_ptrs, mask=here, other=0.0), tl.load(y_ptrs + I, mask=here, other=0.0)
        for step in tl.static_range(STRIP):
            cols = first + step * BLOCK_N
            col_ok = (cols < I)[None, :]
            mask = row_ok[:, None] & col_ok
            gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
            if step + 1 < STRIP:  # prefetch the next block before this one is stored
                y_ptrs += BLOCK_N
                there = row_ok[:, None] & (cols + BLOCK_N < I)[None, :]
                next_gate = tl.load(y_ptrs, mask=there, other=0.0)
                next_up = tl.load(y_ptrs + I, mask=there, other=0.0)
            if adapted:
                weight = b_ptrs + step * (BLOCK_N * RANK)
                nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                b_gate = tl.load(weight, mask=col_ok, other=0.0)
                gate = plus(gate, tl.dot(low_gate, b_gate, nothing, input_precision="ieee"))
                b_up = tl.load(weight + I * RANK, mask=col_ok, other=0.0)
                up = plus(up, tl.dot(low_up, b_up, nothing, input_precision="ieee"))
            tl.store(out + rows[:, None] * I + cols[None, :], silu_product(gate, up, dtype), mask=mask)


# ---- launches ---------------------------------------------------------------------------------------


def _shrink_blocks(rows: int, low: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_C, BLOCK_K): the whole cut at once in small passes."""
    if dtype is torch.float32:
        return 16, 64
    return (16, SPLIT) if rows <= SMALL_ROWS else (min(64, triton.next_power_of_2(low)), 128)


def _expand_blocks(rows: int, outputs: int, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_N, STRIP)."""
    if dtype is torch.float32:
        return 32, 1
    if rows <= SMALL_ROWS and rank <= SMALL_RANK:
        return (64 if outputs <= 8192 else 128), 1
    return 128, 4


def _silu_blocks(rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_N, STRIP)."""
    return (32, 1) if dtype is torch.float32 else (64, 1 if rows <= SMALL_ROWS else 2)


def _sums_first(rows: int, rank: int) -> bool:
    """Return True if a separate kernel adds the cuts, False if the expanding kernel does."""
    return rank > (SMALL_RANK if rows <= SMALL_ROWS else 32)


def shrink_cuda(x: torch.Tensor, a: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, tile: int,
                rank: int) -> torch.Tensor:  # fmt: skip
    (rows, k), (adapters, low, _), count = x.shape, a.shape, tiles.shape[1]
    cuts = triton.cdiv(k, SPLIT)
    h = x.new_empty(cuts, rows, low, dtype=torch.float32)
    block_c, block_k = _shrink_blocks(rows, low, x.dtype)
    _adapter_shrink_kernel[(count, triton.cdiv(low, block_c), cuts)](
        x, a, h, order, tiles, rows, k, low, adapters, count,
        SPLIT=SPLIT, BLOCK_M=tile, BLOCK_C=block_c, BLOCK_K=block_k, num_warps=4,
        num_stages=1 if block_k == SPLIT else 3, **overlapped(x.device),
    )  # fmt: skip
    if not _sums_first(rows, rank) or rows == 0:
        return h
    out, total = x.new_empty(1, rows, low), rows * low
    _adapter_sum_kernel[(triton.cdiv(total, 1024),)](h, out, total, SPLITS=cuts, BLOCK=1024, **overlapped(x.device))
    return out


def expand_cuda(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, projections: Sequence[int], order: torch.Tensor,
                tiles: torch.Tensor, tile: int) -> None:  # fmt: skip
    (rows, n), (adapters, _, rank), count = y.shape, b.shape, tiles.shape[1]
    block_n, strip = _expand_blocks(rows, n, rank, y.dtype)
    programs = sum(triton.cdiv(each, block_n * strip) for each in projections)
    _adapter_expand_kernel[(count, programs)](
        y, h, b, order, tiles, rows, n, h.shape[2], adapters, count, *first_sizes(projections),
        SPLITS=h.shape[0], RANK=rank, BLOCK_M=tile, BLOCK_N=block_n, BLOCK_R=min(rank, 64), STRIP=strip,
        num_warps=4, **overlapped(y.device),
    )  # fmt: skip


def first_sizes(projections: Sequence[int]) -> tuple[int, ...]:
    """Sizes n0, n1, n2 of the projections, for the kernels."""
    return (*projections, 0, 0)[: MAX_PROJECTIONS - 1]


def silu_cuda(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor,
              tile: int) -> torch.Tensor:  # fmt: skip
    (rows, n), (adapters, _, rank), count = y.shape, b.shape, tiles.shape[1]
    out, (block_n, strip) = y.new_empty(rows, n // 2), _silu_blocks(rows, y.dtype)
    _adapter_silu_kernel[(count, triton.cdiv(n // 2, block_n * strip))](
        y, h, b, out, order, tiles, rows, n // 2, adapters, count,
        SPLITS=h.shape[0], RANK=rank, BLOCK_M=tile, BLOCK_N=block_n, STRIP=strip, num_warps=4, **overlapped(y.device),
    )  # fmt: skip
    return out


# ---- CPU twins --------------------------------------------------------------------------------------


def _tiles(order: torch.Tensor, tiles: torch.Tensor, adapters: int) -> list[tuple[int, torch.Tensor]]:
    """(adapter, rows) of each tile with rows."""
    return [(e, order[first : first + n].long()) for e, first, n in tiles.t().tolist() if n and e < adapters]


def _summed(h: torch.Tensor) -> torch.Tensor:
    """Add the cuts' sums h [S, M, C] in order: [M, C] fp32."""
    total = h[0].float()
    for cut in h[1:]:
        total = total + cut
    return total


# ---- ops --------------------------------------------------------------------------------------------


def _shrink_meta(x: torch.Tensor, a: torch.Tensor, rank: int) -> torch.Tensor:
    if _sums_first(x.shape[0], rank):
        return x.new_empty(1, x.shape[0], a.shape[1])
    return x.new_empty(-(-x.shape[1] // SPLIT), x.shape[0], a.shape[1], dtype=torch.float32)


@op(cuda=shrink_cuda, meta=_shrink_meta)
def adapter_shrink_op(x: torch.Tensor, a: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, tile: int,
               rank: int) -> torch.Tensor:  # fmt: skip
    cuts = x.shape[1] // SPLIT + (x.shape[1] % SPLIT > 0)
    h = x.new_zeros(cuts, x.shape[0], a.shape[1], dtype=torch.float32)
    for e, rows in _tiles(order, tiles, len(a)):
        inputs, weight = x[rows].float(), a[e].float()
        for cut in range(cuts):
            part = slice(cut * SPLIT, (cut + 1) * SPLIT)
            h[cut, rows] = row_exact_product(inputs[:, part], weight[:, part])
    return _summed(h).to(x.dtype)[None] if _sums_first(x.shape[0], rank) else h


@op(cuda=expand_cuda)
def adapter_expand_op(
    y: Mutated[torch.Tensor], h: torch.Tensor, b: torch.Tensor, projections: Sequence[int], order: torch.Tensor,
    tiles: torch.Tensor, tile: int,
) -> None:  # fmt: skip
    rank = b.shape[2]
    low = _summed(h).to(y.dtype).float()
    for e, rows in _tiles(order, tiles, len(b)):
        done = 0
        for part, outputs in enumerate(projections):
            inputs = low[rows, part * rank : (part + 1) * rank]
            delta = row_exact_product(inputs, b[e, done : done + outputs].float())
            y[rows, done : done + outputs] = (y[rows, done : done + outputs].float() + delta).to(y.dtype)
            done += outputs


@op(cuda=silu_cuda, shape=lambda y: (y.shape[0], y.shape[1] // 2))
def adapter_silu_op(
    y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, tile: int
) -> torch.Tensor:
    y = y.clone()
    adapter_expand_op.cpu(y, h, b, [y.shape[1] // 2] * 2, order, tiles, tile)
    return silu_mul.cpu(y)


def shrink(x: torch.Tensor, a: torch.Tensor, rank: int, plan: AdapterPlan) -> torch.Tensor:
    """Compute each row's ``x [M, K] · A[e]ᵀ`` for :func:`expand` and :func:`expand_silu`: the cuts' sums, or their sum.

    a [L, P · R, K]: per adapter the layer's projections, one after the other. x and the sorted plan must be complete
    before the previous launch; x is contiguous.
    """
    return adapter_shrink_op(x, a, *plan.sorted, plan.tile, rank)


def expand(
    y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, projections: Sequence[int], plan: AdapterPlan
) -> torch.Tensor:
    """Add to ``y [M, N]``, in place, each row's ``h · B[e]ᵀ``; returns it. Rows of no adapter keep their bits.

    b [L, N, R]. projections: outputs of each projection.
    """
    adapter_expand_op(y, h, b, list(projections), *plan.sorted, plan.tile)
    return y


def expand_silu(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, plan: AdapterPlan) -> torch.Tensor:
    """Compute :func:`expand` of two projections y [M, 2 I] and ``silu_mul`` of it, in one launch: [M, I]."""
    return adapter_silu_op(y, h, b, *plan.sorted, plan.tile)


def _aot(rows: int, dtype: str, low: int, outputs: int, rank: int, cuts: int) -> list[AotCase]:
    kind = DTYPES[dtype]
    tile, plan = 16 if rows <= SMALL_ROWS else 32, {"order": "*i32", "tiles": "*i32"}
    block_c, block_k = _shrink_blocks(rows, low, kind)
    block_n, strip = _expand_blocks(rows, outputs, rank, kind)
    gate_n, gate_strip = _silu_blocks(rows, kind)
    summed = _sums_first(rows, rank)
    pointers = {"x": f"*{dtype}", "a": f"*{dtype}", "h": "*fp32"}
    tensors = {"y": f"*{dtype}", "h": f"*{dtype}" if summed else "*fp32", "b": f"*{dtype}", **plan}
    sizes = {"SPLITS": 1 if summed else cuts, "RANK": rank, "BLOCK_M": tile, "OVERLAP": True}
    return [
        AotCase(
            _adapter_shrink_kernel,
            {**pointers, **plan, **ints("", "M K C L count")},
            {"SPLIT": SPLIT, "BLOCK_M": tile, "BLOCK_C": block_c, "BLOCK_K": block_k, "OVERLAP": True},
            num_stages=1 if block_k == SPLIT else 3,
        ),
        AotCase(
            _adapter_sum_kernel,
            {"h": "*fp32", "out": f"*{dtype}", "total": "i32"},
            {"SPLITS": cuts, "BLOCK": 1024, "OVERLAP": True},
        ),
        AotCase(
            _adapter_expand_kernel,
            tensors | ints("", "M N C L count n0 n1 n2"),
            sizes | {"BLOCK_N": block_n, "BLOCK_R": min(rank, 64), "STRIP": strip},
        ),
        *[
            AotCase(
                _adapter_silu_kernel,
                tensors | {"out": f"*{dtype}"} | ints("", "M I L count"),
                sizes | {"BLOCK_N": gate_n, "STRIP": gate_strip},
            )
        ]
        * (rank <= SMALL_RANK),
    ]


AOT: list[AotCase] = [
    case
    for sizes in (
        (16, "bf16", 48, 6144, 16, 8), (16, "bf16", 32, 24576, 16, 8), (16, "bf16", 16, 4096, 16, 24),
        (64, "fp16", 64, 4096, 64, 8), (2048, "bf16", 48, 6144, 16, 8), (2048, "bf16", 512, 4096, 512, 24),
        (2048, "bf16", 32, 24576, 16, 8), (2048, "bf16", 64, 4096, 64, 24),
        (16, "bf16", 256, 4096, 256, 8), (16, "fp32", 48, 6144, 16, 8), (2048, "fp32", 48, 6144, 16, 8),
    )
    for case in _aot(*sizes)
]  # fmt: skip
