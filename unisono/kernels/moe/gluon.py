"""Matrix products of experts over prompts on Hopper, with 16-bit and e4m3 weights.

Bits are those of the kernels in ``kernels/moe/experts.py`` and ``kernels/moe/fp8.py``; this kernel is faster. There is
one program per multiprocessor, which takes tiles in turn: 128 pairs of an expert, and 256 outputs. Two warp groups
multiply 64 pairs each. They take smaller tiles alternately: one stores its results while the other multiplies. A third
group loads. The tensor memory accelerator loads the weight. The pairs' rows are scattered, so they are copied row by
row, asynchronously; Triton cannot mix both. The next tile's first stages fill while a tile's results are stored.

K is summed in one sequence, as in Triton's kernels: by products of 16; with e4m3 weights in steps of 128, each of which
is multiplied by its scales and added (``kernels/gemm/fp8.py``). ``experts.exact_experts`` and
``fp8.exact_fp8_experts`` compare the bits on the present GPU; this kernel is launched where they are equal.
The result of gate and up can be stored as e4m3 for ``down``: a tile has whole groups of a row.

Shapes: as in ``kernels/moe/experts.py``. A product has K inputs and N outputs; gate and up have N each, which are
combined.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from unisono.kernels.gemm.fp8_quantize import GROUP, empty_quantised, scaled_by, scales_of
from unisono.kernels.gemm.persistent import processors
from unisono.kernels.hopper import WIDTH, block_barrier, box_type, boxes, stage_barriers
from unisono.kernels.library import AotCase, ints
from unisono.kernels.moe.plan import ExpertPlan, Shapes

PAIRS = gl.constexpr(64)
"""Pairs of a warp group: the rows of a ``wgmma``."""

TILE_PAIRS = 128
"""Pairs of the plan's tiles: those of both groups."""

COLUMNS = gl.constexpr(GROUP)
"""Outputs of either half of a tile: of gate and of up, or the first and the second ones of down. As many as share a
scale in e4m3."""

STAGES = gl.constexpr(4)
"""Steps in shared memory at once: 192 KiB. A step is STEP inputs: WIDTH bytes of a row, the widest swizzle."""

LOADERS = gl.constexpr(128)
"""Threads of the group that loads. All of them copy, and arrive when their copies are done."""

_REGISTERS = 168
"""Registers per thread, on average: warps that multiply take them from those that load."""

FEWEST = 16
"""Average number of pairs per expert from which the kernel is faster than Triton's (H200, benchmarks/experts.py), also
with e4m3."""


@gluon.jit
def _tile(tiles, t, M, count, E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr):
    """(listed, expert, first, number of pairs) of tile ``t``: ``plan.tile_rows`` of a sorted plan.

    listed: the pairs are at ``order[first]`` and after it. Otherwise they are the shared expert's: pair ``first`` and
    those after it.
    """
    shared = (M + 2 * PAIRS - 1) // (2 * PAIRS) if RIDES else 0
    listed = t >= shared
    at = tiles + gl.maximum(t - shared, 0)
    e, first, n = gl.load(at), gl.load(at + count), gl.load(at + 2 * count)
    e, first = gl.where(listed, e, E), gl.where(listed, first, M * TOP_K + t * (2 * PAIRS))
    return listed, e, first, gl.where(listed, n, gl.minimum(M - t * (2 * PAIRS), 2 * PAIRS))


@gluon.jit
def _pairs(order, listed, first, n, r):
    """Read the pairs at places ``r`` of a tile."""
    own = gl.load(order + first + r, mask=(r < n) & listed, other=0)
    return gl.where(listed, own, first + r)


@gluon.jit
def _inputs(order, listed, first, n, r, M, TOP_K: gl.constexpr, BY_TOKEN: gl.constexpr):
    """Rows of x of the pairs at places ``r`` of a tile."""
    row = _pairs(order, listed, first, n, r)
    if BY_TOKEN:  # a token's row serves all its pairs
        row = gl.where(listed, row // TOP_K, row - M * TOP_K)
    return row


@gluon.jit
def _rows(x, order, listed, first, n, group: gl.constexpr, M, K: gl.constexpr, STEP: gl.constexpr,
          TOP_K: gl.constexpr, BY_TOKEN: gl.constexpr):  # fmt: skip
    """Pointers to the first inputs of a group's rows [PAIRS, STEP], and the mask of rows [PAIRS, 1]."""
    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    r = group * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
    row = _inputs(order, listed, first, n, r, M, TOP_K, BY_TOKEN)
    k = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    return x + (row.to(gl.int64) * K)[:, None] + k[None, :], (r < n)[:, None]


@gluon.jit
def _load(x, w_desc, order, tiles, rows, weights, full, free, M, count, items, K: gl.constexpr, STEP: gl.constexpr,
          N: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr, GATED: gl.constexpr,
          UP: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Load all steps of the program's tiles. The part of one warp group."""
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        listed, e, first, n = _tile(tiles, item // PARTS, M, count, E, TOP_K, RIDES)
        if n > 0:
            upper, upper_there = _rows(x, order, listed, first, n, 0, M, K, STEP, TOP_K, GATED or UP)
            lower, lower_there = _rows(x, order, listed, first, n, 1, M, K, STEP, TOP_K, GATED or UP)
            left = e * (2 * N) + item % PARTS * COLUMNS if GATED else e * N + item % PARTS * (2 * COLUMNS)
            right = left + N if GATED else left + COLUMNS
            for k in range(0, K, STEP):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                bar, weight = full.index(stage), weights.index(stage)
                mbarrier.expect(bar, 2 * COLUMNS * WIDTH)
                tma.async_copy_global_to_shared(w_desc, [left, k], bar, weight.slice(0, COLUMNS))
                tma.async_copy_global_to_shared(w_desc, [right, k], bar, weight.slice(COLUMNS, COLUMNS))
                async_copy.async_copy_global_to_shared(rows.index(2 * stage), upper + k, mask=upper_there)
                async_copy.async_copy_global_to_shared(rows.index(2 * stage + 1), lower + k, mask=lower_there)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                step += 1


@gluon.jit
def _store(out, y, pair, there, column, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Store y [PAIRS, COLUMNS] as columns from ``column`` on of the pairs' rows of out [pairs, N]."""
    column += gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = (pair.to(gl.int64) * N)[:, None] + column[None, :]
    gl.store(out + at, gl.convert_layout(y, LAYOUT), mask=there[:, None] & (column < N)[None, :])


@gluon.jit
def _store_quantised(out8, out_scales, y, pair, there, part, padded, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Store y [PAIRS, COLUMNS], block ``part`` of the pairs' rows, as e4m3 in out8 [pairs, N], and the rows' scales.

    out_scales [blocks, padded]: the bits of ``fp8_quantize``.
    """
    column = part * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inside = (column < N)[None, :]
    value = gl.where(inside, gl.convert_layout(y, LAYOUT).to(gl.float32), 0.0)
    scale = scales_of(value)
    at = (pair.to(gl.int64) * N)[:, None] + column[None, :]
    gl.store(out8 + at, scaled_by(value, scale).to(out8.dtype.element_ty), mask=there[:, None] & inside)
    gl.store(out_scales + part * padded + pair, scale, mask=there)


@gluon.jit
def _leave(free, stage, alone):
    """Release a stage for loading: by one of two groups, or by a group that has the tile alone."""
    mbarrier.arrive(free.index(stage))
    mbarrier.arrive(free.index(stage), pred=alone)


@gluon.jit
def _sums(rows, weights, full, free, before, phase, waits, step, half, alone, K: gl.constexpr, STEP: gl.constexpr):
    """Compute both sums [PAIRS, COLUMNS] of the K / STEP steps from ``step`` on, without waiting between products.

    before, phase, waits: the barrier to wait at first, if at all. half: half of a step's rows. alone: no other group
    has a half of the tile.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    acc = gl.zeros([PAIRS, 2 * COLUMNS], gl.float32, layout)
    mbarrier.wait(before, phase, pred=waits)
    for k in range(0, K, STEP):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        weight = weights.index(stage).permute([1, 0])
        acc = warpgroup_mma(rows.index(2 * stage + half), weight, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if k > 0:
            _leave(free, (step - 1) % STAGES, alone)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    _leave(free, (step - 1) % STAGES, alone)
    return gl.split(acc.reshape([PAIRS, 2, COLUMNS]).permute([0, 2, 1]))


@gluon.jit
def _weight_scales(w_scales, e, part, N: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr):
    """Pointers to the first block scales of both halves of a tile's outputs."""
    BLOCKS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    if GATED:
        left = 2 * e * BLOCKS + part
        right = left + BLOCKS
    else:
        left = e * BLOCKS + 2 * part
        right = gl.minimum(left + 1, (e + 1) * BLOCKS - 1)
    return w_scales + left * STEPS, w_scales + right * STEPS


@gluon.jit
def _scales(x_scales, there, of_left, of_right, step, STEPS: gl.constexpr, PADDED):
    """Load the scales of a step, clamped to the last one: of the rows, and of both halves of the weight."""
    at = gl.minimum(step, STEPS - 1)
    return gl.load(x_scales + at * PADDED, mask=there, other=0.0), gl.load(of_left + at), gl.load(of_right + at)


@gluon.jit
def _add_product(acc, rows, weight, scale, BY_BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Add the product of a step to acc [PAIRS, COLUMNS], multiplied by its scales [PAIRS] with BY_BLOCK."""
    none = warpgroup_mma_init(gl.zeros([PAIRS, COLUMNS], gl.float32, LAYOUT))
    product = warpgroup_mma_wait(0, [warpgroup_mma(rows, weight.permute([1, 0]), none, use_acc=False, is_async=True)])
    if BY_BLOCK:
        return gl.fma(product, scale[:, None] + gl.zeros_like(product), acc)
    else:
        return acc + product


@gluon.jit
def _scaled_sums(x_scales, w_scales, order, rows, weights, full, free, before, phase, waits, listed, e, first, n, step,
                 part, half, alone, M, PADDED, K: gl.constexpr, STEP: gl.constexpr, N: gl.constexpr,
                 TOP_K: gl.constexpr, GATED: gl.constexpr, BY_BLOCK: gl.constexpr):  # fmt: skip
    """Compute :func:`_sums` of e4m3: each step is multiplied by its scales, or the sum by the outputs' scales at the
    end.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    STEPS: gl.constexpr = K // STEP
    r = half * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT))
    there = r < n
    x_scales += _inputs(order, listed, first, n, r, M, TOP_K, GATED)
    xs = gl.load(x_scales, mask=there, other=0.0)
    if BY_BLOCK:
        of_left, of_right = _weight_scales(w_scales, e, part, N, STEPS, GATED)
        scale, other = xs * gl.load(of_left), xs * gl.load(of_right)
        xs1, left1, right1 = _scales(x_scales, there, of_left, of_right, 1, STEPS, PADDED)
    else:
        scale, other = xs, xs
    left = gl.zeros([PAIRS, COLUMNS], gl.float32, LAYOUT)
    right = gl.zeros([PAIRS, COLUMNS], gl.float32, LAYOUT)
    mbarrier.wait(before, phase, pred=waits)
    for k in range(STEPS):
        stage = (step + k) % STAGES
        weight = weights.index(stage)
        if BY_BLOCK:  # two steps ahead: loading takes longer than a step
            xs2, left2, right2 = _scales(x_scales, there, of_left, of_right, k + 2, STEPS, PADDED)
        mbarrier.wait(full.index(stage), (step + k) // STAGES & 1)
        of_group = rows.index(2 * stage + half)
        left = _add_product(left, of_group, weight.slice(0, COLUMNS), scale, BY_BLOCK, LAYOUT)
        right = _add_product(right, of_group, weight.slice(COLUMNS, COLUMNS), other, BY_BLOCK, LAYOUT)
        _leave(free, stage, alone)
        if BY_BLOCK:
            scale, other = xs1 * left1, xs1 * right1
            xs1, left1, right1 = xs2, left2, right2
    if not BY_BLOCK:
        column = part * COLUMNS * (1 if GATED else 2) + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        of_left = w_scales + e * (2 * N if GATED else N)
        of_right, after = (of_left + N, column) if GATED else (of_left, column + COLUMNS)
        left = left * xs[:, None] * gl.load(of_left + gl.minimum(column, N - 1))[None, :]
        right = right * xs[:, None] * gl.load(of_right + gl.minimum(after, N - 1))[None, :]
    return left, right


@gluon.jit
def relu_squared(y):
    """Square what is above 0, rounded to y's dtype: ``activation.relu_squared_product``."""
    value = y.to(gl.float32)
    value = gl.where(value < 0, 0.0, value)
    return (value * value).to(y.dtype)


@gluon.jit
def _multiply(group: gl.constexpr, x_scales, w_scales, out, out8, out_scales, order, tiles, rows, weights, full, free,
              own, others, M, count, items, PADDED, padded, K: gl.constexpr, STEP: gl.constexpr, N: gl.constexpr,
              E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr, GATED: gl.constexpr, UP: gl.constexpr,
              PARTS: gl.constexpr, SCALES: gl.constexpr, QUANTISED: gl.constexpr):  # fmt: skip
    """Multiply one half of the tiles' pairs, and every second tile that has one half only. A warp group's part.

    own, others: barriers that complete a phase when this group, or the other one, has multiplied a tile alone. A group
    that skips a tile waits for that; otherwise it might take the contents of the tile's stages for a later tile's.
    """
    EACH: gl.constexpr = 16 if QUANTISED else 8
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [EACH // 4, 128 // EACH], [4, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    step, halves = 0, 0  # halves: number of tiles with one half so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        listed, e, first, n = _tile(tiles, item // PARTS, M, count, E, TOP_K, RIDES)
        alone = n <= PAIRS
        if (n > PAIRS) | ((n > 0) & (halves % 2 == group)):
            half = gl.where(alone, 0, group)
            r = half * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
            pair = _pairs(order, listed, first, n, r)
            phase, waits = (halves - 1) // 2 & 1, (halves > 0) & ((halves + 1) % 2 != group)
            if SCALES == 0:
                left, right = _sums(rows, weights, full, free, others, phase, waits, step, half, alone, K, STEP)
            else:
                left, right = _scaled_sums(
                    x_scales, w_scales, order, rows, weights, full, free, others, phase, waits, listed, e, first, n,
                    step, item % PARTS, half, alone, M, PADDED, K, STEP, N, TOP_K, GATED, SCALES == 2)  # fmt: skip
            mbarrier.arrive(own, pred=alone)
            left, right = left.to(dtype), right.to(dtype)
            if GATED:  # activation.silu_product
                gate, up = left.to(gl.float32), right.to(gl.float32)
                silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
                y = (silu * up).to(dtype)
                if QUANTISED:
                    _store_quantised(out8, out_scales, y, pair, r < n, item % PARTS, padded, N, layout)
                else:
                    _store(out, y, pair, r < n, item % PARTS * COLUMNS, N, layout)
            else:
                if UP:
                    left, right = relu_squared(left), relu_squared(right)
                _store(out, left, pair, r < n, item % PARTS * (2 * COLUMNS), N, layout)
                _store(out, right, pair, r < n, item % PARTS * (2 * COLUMNS) + COLUMNS, N, layout)
        if n > 0:
            step += K // STEP
            halves += alone.to(gl.int32)


@gluon.jit(do_not_specialize=["M", "count", "PADDED", "padded"])
def expert_rows_kernel(x, w_desc, x_scales, w_scales, out, out8, out_scales, order, tiles, M, count, PADDED, padded,
                       K: gl.constexpr, STEP: gl.constexpr, N: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr,
                       RIDES: gl.constexpr, GATED: gl.constexpr, UP: gl.constexpr, PARTS: gl.constexpr,
                       SCALES: gl.constexpr, QUANTISED: gl.constexpr):  # fmt: skip
    """Multiply by experts: x [tokens, K] and out [pairs, N] with GATED or UP, else x [pairs, K].

    order, tiles, count: fields of a :class:`ExpertPlan`. PARTS: blocks of outputs, adjacent in the order of tiles, so
    that they share rows. UP: out is ReLU² of the products, of 16-bit weights. SCALES: dimensions of an expert's e4m3
    scales; 0: the weight has 16 bits. x_scales [K / STEP or 1, PADDED]. QUANTISED: with GATED, the results are out8
    [pairs, N] and out_scales [PARTS, padded], and only the dtype of out is used.
    """
    items = (count + ((M + 2 * PAIRS - 1) // (2 * PAIRS) if RIDES else 0)) * PARTS
    rows = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, PAIRS, STEP], w_desc.layout)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * COLUMNS, STEP], w_desc.layout)
    full, free = stage_barriers(STAGES, LOADERS + 1, 2)
    upper, lower = stage_barriers(1, 1, 1)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, x_scales, w_scales, out, out8, out_scales, order, tiles, rows, weights, full, free,
                upper.index(0), lower.index(0), M, count, items, PADDED, padded, K, STEP, N, E, TOP_K, RIDES,
                GATED, UP, PARTS, SCALES, QUANTISED)),
            (_multiply, (
                1, x_scales, w_scales, out, out8, out_scales, order, tiles, rows, weights, full, free,
                lower.index(0), upper.index(0), M, count, items, PADDED, padded, K, STEP, N, E, TOP_K, RIDES,
                GATED, UP, PARTS, SCALES, QUANTISED)),
            (_load, (
                x, w_desc, order, tiles, rows, weights, full, free, M, count, items, K, STEP, N, E, TOP_K, RIDES,
                GATED, UP, PARTS)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


def suits(weight: torch.Tensor) -> bool:
    """Return True if the kernel can multiply by this stack [E, N, K] on its device."""
    size = weight.dtype.itemsize
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[2] * size % WIDTH.value == 0
    return size <= 2 and aligned and processors(weight.device) > 0


def launch_expert_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: ExpertPlan,
    gated: bool,
    x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    up: bool = False,
) -> torch.Tensor:
    """Compute ``expert_gate_up`` (gated), ``expert_up`` (up) or ``expert_down`` of a sorted plan with tiles of
    TILE_PAIRS, without biases.

    With an e4m3 weight and its scales, x and x_scales are those of a
    :class:`~unisono.kernels.gemm.fp8_quantize.Quantised`, and dtype is that of the result.
    """
    out = x.new_empty(result_rows(weight, plan), weight.shape[1] // (1 + gated), dtype=dtype)
    _launch(x, weight, plan, gated, x_scales, w_scales, out, up=up)
    return out


def launch_quantised_rows(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, w_scales: torch.Tensor, plan: ExpertPlan,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute gated ``launch_expert_rows`` quantised by GROUP columns: (e4m3, scales). The padding is not written."""
    out8, out_scales = empty_quantised(x, result_rows(weight, plan), weight.shape[1] // 2, GROUP)
    _launch(x, weight, plan, True, x_scales, w_scales, x.new_empty(0, dtype=dtype), out8, out_scales)
    return out8, out_scales


def result_rows(weight: torch.Tensor, plan: ExpertPlan) -> int:
    """Rows of a product's result: one per pair, and one per token if the stack has a fused shared expert."""
    return plan.ids.numel() + (len(weight) - plan.experts) * len(plan.ids)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, plan: ExpertPlan, gated: bool, x_scales: torch.Tensor | None,
    w_scales: torch.Tensor | None, out: torch.Tensor, out8: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None, up: bool = False,
) -> None:  # fmt: skip
    x, (m, top_k), rides = x.contiguous(), plan.ids.shape, len(weight) - plan.experts
    n, k = weight.shape[1] // (1 + gated), weight.shape[2]
    scales, quantised = 0 if w_scales is None else w_scales.dim() - 1, out8 is not None
    sizes = _sizes(Shapes(m, 0, 0, plan.experts, top_k, rides > 0), k, n, gated, scales, quantised, up)
    tiles = plan.listed + rides * triton.cdiv(m, TILE_PAIRS)
    expert_rows_kernel[(min(processors(x.device), tiles * sizes["PARTS"]),)](
        x, boxes(weight.view(-1, k), COLUMNS.value), x_scales, w_scales, out, out8, out_scales, plan.order, plan.tiles,
        m, plan.listed, len(x), len(x if out8 is None else out8), **sizes, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


def _sizes(
    shapes: Shapes, k: int, n: int, gated: bool, scales: int = 0, quantised: bool = False, up: bool = False
) -> dict[str, int]:
    """Compile-time arguments of the kernel. scales: dimensions of the scales of an e4m3 weight; 0: it has 16 bits."""
    parts = triton.cdiv(n, COLUMNS.value * (1 if gated else 2))
    sizes = {"K": k, "STEP": WIDTH.value // (1 if scales else 2), "N": n, "E": shapes.experts, "TOP_K": shapes.top_k}
    sizes |= {"RIDES": shapes.rides, "GATED": gated, "UP": up, "PARTS": parts}
    return sizes | {"SCALES": scales, "QUANTISED": quantised}


def _case(
    dtype: str, shapes: Shapes, gated: bool, scales: int = 0, quantised: bool = False, up: bool = False
) -> AotCase:
    k, n = (shapes.hidden, shapes.inner) if gated or up else (shapes.inner, shapes.hidden)
    kind = "fp8e4nv" if scales else dtype
    signature = {"x": f"*{kind}", "w_desc": box_type(kind, COLUMNS.value), "out": f"*{dtype}"}
    signature |= ints("order tiles", "M count PADDED padded")
    sizes: dict[str, object] = dict(_sizes(shapes, k, n, gated, scales, quantised, up))
    for name, present, of in (
        ("x_scales", scales, "fp32"), ("w_scales", scales, "fp32"), ("out8", quantised, "fp8e4nv"),
        ("out_scales", quantised, "fp32"),
    ):  # fmt: skip
        if present:
            signature[name] = f"*{of}"
        else:
            sizes[name] = None
    return AotCase(expert_rows_kernel, signature, sizes, 4, maxnreg=_REGISTERS)


_OF_35B, _OF_30B = Shapes(2048, 2048, 512, 256, 8, True), Shapes(2048, 2048, 768, 128, 8)

AOT = [
    *(_case("bf16", _OF_35B, gated) for gated in (True, False)),
    *(_case("fp16", _OF_30B, gated) for gated in (True, False)),
    *(_case("bf16", _OF_35B, gated, 2) for gated in (True, False)),
    *(_case("bf16", _OF_30B, gated, 1) for gated in (True, False)),
    _case("bf16", _OF_35B, True, 2, quantised=True),
    _case("bf16", Shapes(2048, 2688, 1856, 128, 6), False, up=True),  # Nemotron-3-Nano
]
