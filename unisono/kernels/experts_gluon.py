"""The matrix products of experts over prompts, on Hopper: the bits of ``kernels/experts.py``, in less time.

There is a program for each multiprocessor, which takes tiles in turn: 128 pairs of an expert, and 256 outputs. Two warp
groups multiply, 64 pairs each; a group without pairs leaves its half out. A third one loads. The weight is loaded by
the tensor memory accelerator. The pairs' rows lie anywhere, so they are copied row by row, asynchronously; Triton has
no way to mix both. Stages fill while a tile's results are stored, which are the next tile's first ones.

K is summed in one sequence by products of 16, as in Triton's kernels. ``experts.prove_experts`` compares the bits on
the present GPU; ``kernels/experts.py`` launches this kernel where they are equal.

Shapes: as in ``kernels/experts.py``. A product has K inputs and N outputs: of gate and up N each, which become one.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from unisono.kernels.experts_plan import Plan, Shapes
from unisono.kernels.hopper import block_barrier, box_type, boxes, stage_barriers
from unisono.kernels.library import AotCase, ints
from unisono.kernels.staying import processors

PAIRS = gl.constexpr(64)
"""Pairs of a warp group: the rows of a ``wgmma``."""

TILE_PAIRS = 128
"""Of the plan's tiles: those of both groups."""

COLUMNS = gl.constexpr(128)
"""Outputs of either half of a tile: those of gate and those of up, or the first and the second ones of down."""

STEP = gl.constexpr(64)
"""Inputs of a step: 128 bytes, the widest swizzle."""

STAGES = gl.constexpr(4)
"""Steps that are held at once: 192 KiB."""

LOADERS = gl.constexpr(128)
"""Threads of the group that loads. All of them copy, and arrive when their copies are done."""

_REGISTERS = 168
"""Of a thread, on average: those that multiply take them from those that load."""

FEWEST = 16
"""From this average number of pairs per expert on the kernel is faster than Triton's (H200, benchmarks/experts.py)."""


@gluon.jit
def _tile(tiles, t, M, count, E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr):
    """(listed, expert, first, number of pairs) of tile ``t``: ``experts_plan.tile_rows`` of a sorted plan.

    listed: the pairs stand in the order from ``first`` on. Otherwise they are the shared expert's: pair ``first``
    and those after it.
    """
    shared = (M + 2 * PAIRS - 1) // (2 * PAIRS) if RIDES else 0
    listed = t >= shared
    at = tiles + gl.maximum(t - shared, 0)
    e, first, n = gl.load(at), gl.load(at + count), gl.load(at + 2 * count)
    e, first = gl.where(listed, e, E), gl.where(listed, first, M * TOP_K + t * (2 * PAIRS))
    return listed, e, first, gl.where(listed, n, gl.minimum(M - t * (2 * PAIRS), 2 * PAIRS))


@gluon.jit
def _pairs(order, listed, first, n, r):
    """The pairs at places ``r`` of a tile."""
    own = gl.load(order + first + r, mask=(r < n) & listed, other=0)
    return gl.where(listed, own, first + r)


@gluon.jit
def _rows(x, order, listed, first, n, group: gl.constexpr, M, K: gl.constexpr, TOP_K: gl.constexpr,
          GATED: gl.constexpr):  # fmt: skip
    """Where the first inputs of a group's rows are [PAIRS, STEP], and which rows there are [PAIRS, 1]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = group * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
    row = _pairs(order, listed, first, n, r)
    if GATED:  # a token's row serves all its pairs
        row = gl.where(listed, row // TOP_K, row - M * TOP_K)
    k = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    return x + (row.to(gl.int64) * K)[:, None] + k[None, :], (r < n)[:, None]


@gluon.jit
def _load(x, w_desc, order, tiles, rows, weights, full, free, M, count, items, K: gl.constexpr, N: gl.constexpr,
          E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr, GATED: gl.constexpr,
          PARTS: gl.constexpr):  # fmt: skip
    """One warp group's part: load all steps of the program's tiles."""
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        listed, e, first, n = _tile(tiles, item // PARTS, M, count, E, TOP_K, RIDES)
        if n > 0:
            upper, upper_there = _rows(x, order, listed, first, n, 0, M, K, TOP_K, GATED)
            lower, lower_there = _rows(x, order, listed, first, n, 1, M, K, TOP_K, GATED)
            left = e * (2 * N) + item % PARTS * COLUMNS if GATED else e * N + item % PARTS * (2 * COLUMNS)
            right = left + N if GATED else left + COLUMNS
            for k in range(0, K, STEP):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                bar, weight = full.index(stage), weights.index(stage)
                mbarrier.expect(bar, 2 * COLUMNS * STEP * 2)
                tma.async_copy_global_to_shared(w_desc, [left, k], bar, weight.slice(0, COLUMNS))
                tma.async_copy_global_to_shared(w_desc, [right, k], bar, weight.slice(COLUMNS, COLUMNS))
                async_copy.async_copy_global_to_shared(rows.index(2 * stage), upper + k, mask=upper_there)
                async_copy.async_copy_global_to_shared(rows.index(2 * stage + 1), lower + k, mask=lower_there)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                step += 1


@gluon.jit
def _store(out, y, pair, there, column, N: gl.constexpr):
    """Store y [PAIRS, COLUMNS] as columns from ``column`` on of the pairs' rows of out [pairs, N]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column += gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    at = (pair.to(gl.int64) * N)[:, None] + column[None, :]
    gl.store(out + at, gl.convert_layout(y, layout), mask=there[:, None] & (column < N)[None, :])


@gluon.jit
def _sums(rows, weights, full, free, step, group: gl.constexpr, K: gl.constexpr):
    """The sums [PAIRS, 2 COLUMNS] of the K / STEP steps from ``step`` on: the next step's product follows at once."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    acc = gl.zeros([PAIRS, 2 * COLUMNS], gl.float32, layout)
    for k in range(0, K, STEP):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        weight = weights.index(stage).permute([1, 0])
        acc = warpgroup_mma(rows.index(2 * stage + group), weight, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if k > 0:
            mbarrier.arrive(free.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index((step - 1) % STAGES))
    return acc


@gluon.jit
def _multiply(group: gl.constexpr, out, order, tiles, rows, weights, full, free, M, count, items, K: gl.constexpr,
              N: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr, GATED: gl.constexpr,
              PARTS: gl.constexpr):  # fmt: skip
    """A warp group's part: its half of the tiles' pairs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    r = group * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        listed, _, first, n = _tile(tiles, item // PARTS, M, count, E, TOP_K, RIDES)
        if n > group * PAIRS:
            pair = _pairs(order, listed, first, n, r)
            sums = _sums(rows, weights, full, free, step, group, K)
            left, right = gl.split(sums.reshape([PAIRS, 2, COLUMNS]).permute([0, 2, 1]))
            left, right = left.to(dtype), right.to(dtype)
            if GATED:  # activation.silu_product
                gate, up = left.to(gl.float32), right.to(gl.float32)
                silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
                _store(out, (silu * up).to(dtype), pair, r < n, item % PARTS * COLUMNS, N)
            else:
                _store(out, left, pair, r < n, item % PARTS * (2 * COLUMNS), N)
                _store(out, right, pair, r < n, item % PARTS * (2 * COLUMNS) + COLUMNS, N)
        elif n > 0:
            for i in range(K // STEP):
                mbarrier.wait(full.index((step + i) % STAGES), (step + i) // STAGES & 1)
                mbarrier.arrive(free.index((step + i) % STAGES))
        if n > 0:
            step += K // STEP


@gluon.jit(do_not_specialize=["M", "count"])
def expert_rows_kernel(x, w_desc, out, order, tiles, M, count, K: gl.constexpr, N: gl.constexpr, E: gl.constexpr,
                       TOP_K: gl.constexpr, RIDES: gl.constexpr, GATED: gl.constexpr,
                       PARTS: gl.constexpr):  # fmt: skip
    """x [tokens, K] and out [pairs, N] with GATED, else x [pairs, K]; order, tiles, count: of a :class:`Plan`.

    PARTS: blocks of outputs, which follow each other in the order of tiles, so that they share rows.
    """
    items = (count + ((M + 2 * PAIRS - 1) // (2 * PAIRS) if RIDES else 0)) * PARTS
    rows = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, PAIRS, STEP], w_desc.layout)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * COLUMNS, STEP], w_desc.layout)
    full, free = stage_barriers(STAGES, LOADERS + 1, 2)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, out, order, tiles, rows, weights, full, free, M, count, items, K, N, E, TOP_K, RIDES, GATED,
                PARTS)),
            (_multiply, (
                1, out, order, tiles, rows, weights, full, free, M, count, items, K, N, E, TOP_K, RIDES, GATED,
                PARTS)),
            (_load, (
                x, w_desc, order, tiles, rows, weights, full, free, M, count, items, K, N, E, TOP_K, RIDES, GATED,
                PARTS)),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip


def suits(weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply with this stack [E, N, K] on its device."""
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[2] % STEP.value == 0
    return weight.dtype.itemsize == 2 and aligned and processors(weight.device) > 0


def launch_expert_rows(x: torch.Tensor, weight: torch.Tensor, plan: Plan, gated: bool) -> torch.Tensor:
    """``expert_gate_up`` (gated) or ``expert_down`` of a sorted plan with tiles of TILE_PAIRS, without biases."""
    x, (m, top_k), rides = x.contiguous(), plan.ids.shape, len(weight) - plan.experts
    n, k = weight.shape[1] // (1 + gated), weight.shape[2]
    sizes = _sizes(Shapes(m, 0, 0, plan.experts, top_k, rides > 0), k, n, gated)
    out = x.new_empty(m * top_k + rides * m, n)
    tiles = plan.listed + rides * triton.cdiv(m, TILE_PAIRS)
    expert_rows_kernel[(min(processors(x.device), tiles * sizes["PARTS"]),)](
        x, boxes(weight.view(-1, k), COLUMNS.value), out, plan.order, plan.tiles, m, plan.listed,
        **sizes, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return out


def _sizes(shapes: Shapes, k: int, n: int, gated: bool) -> dict[str, int]:
    parts = triton.cdiv(n, COLUMNS.value * (1 if gated else 2))
    sizes = {"K": k, "N": n, "E": shapes.experts, "TOP_K": shapes.top_k, "RIDES": shapes.rides}
    return sizes | {"GATED": gated, "PARTS": parts}


def _case(dtype: str, shapes: Shapes, gated: bool) -> AotCase:
    k, n = (shapes.hidden, shapes.inner) if gated else (shapes.inner, shapes.hidden)
    signature = {"x": f"*{dtype}", "w_desc": box_type(dtype, COLUMNS.value), "out": f"*{dtype}"}
    sizes = _sizes(shapes, k, n, gated)
    return AotCase(expert_rows_kernel, signature | ints("order tiles", "M count"), sizes, 4, maxnreg=_REGISTERS)


AOT = [
    *(_case("bf16", Shapes(2048, 2048, 512, 256, 8, True), gated) for gated in (True, False)),
    *(_case("fp16", Shapes(2048, 2048, 768, 128, 8), gated) for gated in (True, False)),
]
