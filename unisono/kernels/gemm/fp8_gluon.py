"""Products of few rows with an e4m3 weight on Hopper: the bits of the Triton kernel in ``kernels/gemm/fp8.py``, faster.
With an int8 weight they are those of ``kernels/gemm/int8.py``, and sums are int32.

Reading the weight bounds such a product. Three things that Triton cannot express bring it nearer to that bound: four
steps' products are in flight at once; the tensor memory accelerator loads the weight, its first part before the kernel
ahead has ended, since nothing writes weights; and a program goes on with the next outputs while it stores the last
ones. ``kernels/gemm/fp8.py`` proves at the start that the bits are equal on the present GPU.

The weight is the tile's rows and the tokens are its columns, as ``wgmma`` has 64 rows at least. A program may load
fewer of them: the other rows are undefined, and their products are not stored.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.persistent import processors
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, box_type, boxes, next_group, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

WIDE = 64
"""Rows of one ``wgmma``."""

STEP = 128
"""Inputs of a step, which share a scale. In bytes, a row of the widest swizzle."""

EACH = 4
"""Steps that are loaded together."""

MOST_ROWS = 64

_SHARED_BYTES = 220 * 1024
"""Shared memory of a multiprocessor for tiles."""


def tile_of(rows: int, n: int) -> Tile:
    """Choose the fastest known tile for this number of rows and outputs, on an H200. stages: groups of EACH steps."""
    outputs = 32 if n <= 4096 else 64
    if rows <= 16:
        return Tile(16, outputs, STEP, 4, 4, registers=64)
    if rows <= 32:
        return Tile(32, outputs, STEP, 4, 3, registers=112)
    return Tile(64, 64, STEP, 8, 3, registers=128) if n >= 6144 else Tile(32, 64, STEP, 4, 3, registers=112)


@gluon.jit
def _load_group(desc, held, bar, stage, group, first, STEP: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr):
    """Start to load a group's steps of one operand into its stage."""
    for j in gl.static_range(EACH):
        place = held.index(stage * EACH + j).slice(0, ROWS)
        tma.async_copy_global_to_shared(desc, [first, (group * EACH + j) * STEP], bar, place)


@gluon.jit
def _first_of(tile, row_tiles, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    """First output and first token of a tile. row_tiles: number of tiles of tokens."""
    return tile // row_tiles * OUTPUTS, tile % row_tiles * ROWS


@gluon.jit
def _load(x_desc, w_desc, x, w, full, free, tiles, row_tiles, groups, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
          STAGES: gl.constexpr, STEP: gl.constexpr, EACH: gl.constexpr, BYTES: gl.constexpr,
          OVERLAP: gl.constexpr):  # fmt: skip
    """Load all groups of the program's tiles. The weight's first ones do not wait. The part of one warp."""
    programs = gl.num_programs(0)
    items = (tiles - gl.program_id(0) + programs - 1) // programs * groups
    tile, group = gl.program_id(0), gl.to_tensor(0)
    of_tile, of_group = tile, group
    for item in gl.static_range(STAGES):
        if item < items:
            mbarrier.expect(full.index(item), BYTES)
            first, _ = _first_of(tile, row_tiles, OUTPUTS, ROWS)
            _load_group(w_desc, w, full.index(item), item, group, first, STEP, EACH, OUTPUTS)
        tile, group = next_group(tile, group, groups)
    if OVERLAP:
        gdc_wait()
    for item in gl.static_range(STAGES):
        if item < items:
            _, token0 = _first_of(of_tile, row_tiles, OUTPUTS, ROWS)
            _load_group(x_desc, x, full.index(item), item, of_group, token0, STEP, EACH, ROWS)
        of_tile, of_group = next_group(of_tile, of_group, groups)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    first, token0 = _first_of(tile, row_tiles, OUTPUTS, ROWS)
    for _ in range(STAGES, items):
        if group == 0:
            first, token0 = _first_of(tile, row_tiles, OUTPUTS, ROWS)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _load_group(w_desc, w, full.index(stage), stage, group, first, STEP, EACH, OUTPUTS)
        _load_group(x_desc, x, full.index(stage), stage, group, token0, STEP, EACH, ROWS)
        tile, group = next_group(tile, group, groups)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scale(x_scales, x_ok, w_scales, step, last, PADDED):
    """Multiply both scales of a step, by token. Steps after the last one use the last."""
    at = gl.minimum(step, last)
    return gl.load(x_scales + at * PADDED, mask=x_ok, other=0.0) * gl.load(w_scales + at)


@gluon.jit
def _scales(x_scales, x_ok, w_scales, group, last, PADDED):
    """Compute :func:`_scale` for a group's four steps."""
    s0 = _scale(x_scales, x_ok, w_scales, group * 4, last, PADDED)
    s1 = _scale(x_scales, x_ok, w_scales, group * 4 + 1, last, PADDED)
    s2 = _scale(x_scales, x_ok, w_scales, group * 4 + 2, last, PADDED)
    s3 = _scale(x_scales, x_ok, w_scales, group * 4 + 3, last, PADDED)
    return s0, s1, s2, s3


@gluon.jit
def step_product(w, x, at, ROWS: gl.constexpr, WIDE: gl.constexpr, MMA: gl.constexpr):
    """Start the product [WIDE, ROWS] of one step."""
    SUM: gl.constexpr = gl.int32 if w.dtype == gl.int8 else gl.float32
    none = warpgroup_mma_init(gl.zeros([WIDE, ROWS], SUM, MMA))
    return warpgroup_mma(w.index(at), x.index(at).permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, product, scale, BY_BLOCK: gl.constexpr):
    if BY_BLOCK:
        return gl.fma(product, scale[None, :] + gl.zeros_like(product), acc)
    return acc + product


@gluon.jit
def _outputs(first, token0, M, N, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WIDE: gl.constexpr, SIDE: gl.constexpr):
    """Columns of a tile [WIDE, ROWS] with OUTPUTS valid outputs, their mask, offsets in [M, N], and the mask of the
    tile.
    """
    at_col = gl.arange(0, WIDE, gl.SliceLayout(1, SIDE))
    col, row = first + at_col, token0 + gl.arange(0, ROWS, gl.SliceLayout(0, SIDE))
    col_ok = (at_col < OUTPUTS) & (col < N)
    return col, col_ok, row.to(gl.int64)[None, :] * N + col[:, None], (row < M)[None, :] & col_ok[:, None]


@gluon.jit
def load_residual(residual, first, token0, M, N, HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
              WIDE: gl.constexpr):  # fmt: skip
    """Load the residual that :func:`store_product` adds, if any."""
    SIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    if HAS_RESIDUAL:
        _, _, at, inside = _outputs(first, token0, M, N, ROWS, OUTPUTS, WIDE, SIDE)
        r = gl.load(residual + at, mask=inside, other=0.0)
    else:
        r = gl.to_tensor(0)
    return r


@gluon.jit
def store_product(acc, out, bias, r, first, token0, M, N, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
           ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Store products [WIDE, ROWS] with OUTPUTS valid outputs, as ``store_sums`` of ``kernels/gemm/linear.py`` does."""
    SIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), SIDE)
    col, col_ok, at, inside = _outputs(first, token0, M, N, ROWS, OUTPUTS, WIDE, SIDE)
    if HAS_BIAS:
        b = gl.load(bias + col, mask=col_ok, other=0.0)
        y = (y.to(gl.float32) + b.to(gl.float32)[:, None]).to(y.dtype)
    if HAS_RESIDUAL:
        y = (y.to(gl.float32) + r.to(gl.float32)).to(y.dtype)
    gl.store(out + at, y, mask=inside)


@gluon.jit
def _sum(acc, w, x, full, free, x_scales, x_ok, w_scales, item, groups, last, PADDED, STAGES: gl.constexpr,
         ROWS: gl.constexpr, WIDE: gl.constexpr, BY_BLOCK: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Add the products of a tile's groups from ``item`` on to acc [WIDE, ROWS] in one sequence."""
    s0, s1, s2, s3 = _scales(x_scales, x_ok, w_scales, 0, last, PADDED)
    stage, phase = item % STAGES, item // STAGES & 1
    for group in range(groups):
        mbarrier.wait(full.index(stage), phase)
        p0 = step_product(w, x, stage * 4, ROWS, WIDE, MMA)
        p1 = step_product(w, x, stage * 4 + 1, ROWS, WIDE, MMA)
        p2 = step_product(w, x, stage * 4 + 2, ROWS, WIDE, MMA)
        p3 = step_product(w, x, stage * 4 + 3, ROWS, WIDE, MMA)
        if BY_BLOCK:
            n0, n1, n2, n3 = _scales(x_scales, x_ok, w_scales, group + 1, last, PADDED)
        else:
            n0, n1, n2, n3 = s0, s1, s2, s3
        acc = _add(acc, warpgroup_mma_wait(3, [p0]), s0, BY_BLOCK)
        acc = _add(acc, warpgroup_mma_wait(2, [p1]), s1, BY_BLOCK)
        acc = _add(acc, warpgroup_mma_wait(1, [p2]), s2, BY_BLOCK)
        acc = _add(acc, warpgroup_mma_wait(0, [p3]), s3, BY_BLOCK)
        mbarrier.arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        s0, s1, s2, s3 = n0, n1, n2, n3
    return acc


@gluon.jit
def _multiply(x, w, full, free, x_scales, w_scales, bias, residual, out, M, N, PADDED, PART, tiles, row_tiles, groups,
              steps, BY_BLOCK: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WIDE: gl.constexpr,
              STAGES: gl.constexpr, EACH: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
              OVERLAP: gl.constexpr):  # fmt: skip
    """Multiply, sum and store. The part of the other warps."""
    GROUPS: gl.constexpr = gl.num_warps() // 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 32])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    item = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, token0 = _first_of(tile, row_tiles, OUTPUTS, ROWS)
        token = token0 + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
        x_ok = token < PADDED
        block = first // PART * ((PART + 127) // 128) + first % PART // 128
        of_w = w_scales + block * steps if BY_BLOCK else w_scales
        r = load_residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, OUTPUTS, WIDE)
        acc = gl.zeros([WIDE, ROWS], gl.int32 if w.dtype == gl.int8 else gl.float32, MMA)
        acc = _sum(acc, w, x, full, free, x_scales + token, x_ok, of_w, item, groups, steps - 1 if BY_BLOCK else 0,
                   PADDED, STAGES, ROWS, WIDE, BY_BLOCK, MMA)  # fmt: skip
        if not BY_BLOCK:
            col = gl.minimum(first + gl.arange(0, WIDE, gl.SliceLayout(1, MMA)), N - 1)
            xs = gl.load(x_scales + token, mask=x_ok, other=0.0)
            acc = acc.to(gl.float32) * xs[None, :] * gl.load(w_scales + col)[:, None]
        item += groups
        store_product(acc, out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, OUTPUTS, WIDE)


@overlapping(reads_early=True)
@gluon.jit
def fp8_rows_kernel(x_desc, w_desc, x_scales, w_scales, bias, residual, out, M, N, K, PADDED, PART,
                    BY_BLOCK: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WIDE: gl.constexpr,
                STEP: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, HAS_BIAS: gl.constexpr,
                HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Share tiles of OUTPUTS outputs and ROWS tokens among programs; see ``kernels/gemm/fp8.py``.

    ``_multiply`` runs on the launch's warps, ``_load`` on one more.
    """
    DTYPE: gl.constexpr = w_desc.dtype
    SHARED: gl.constexpr = w_desc.layout
    BYTES: gl.constexpr = EACH * (OUTPUTS + ROWS) * STEP
    steps = (K + STEP - 1) // STEP
    groups, row_tiles = (steps + EACH - 1) // EACH, (M + ROWS - 1) // ROWS
    tiles = (N + OUTPUTS - 1) // OUTPUTS * row_tiles
    w = gl.allocate_shared_memory(DTYPE, [STAGES * EACH, WIDE, STEP], SHARED)
    x = gl.allocate_shared_memory(DTYPE, [STAGES * EACH, ROWS, STEP], SHARED)
    full, free = stage_barriers(STAGES, 1, 1)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                x, w, full, free, x_scales, w_scales, bias, residual, out, M, N, PADDED, PART, tiles, row_tiles, groups,
                steps, BY_BLOCK, ROWS, OUTPUTS, WIDE, STAGES, EACH, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
            (_load, (
                x_desc, w_desc, x, w, full, free, tiles, row_tiles, groups, ROWS, OUTPUTS, STAGES, STEP, EACH, BYTES,
                OVERLAP)),
        ],
        [1],
        [24],
    )  # fmt: skip


def suits(rows: int, weight: torch.Tensor) -> bool:
    """Return True if the kernel can multiply this number of rows by the weight [N, K] of 8 bits on its device."""
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 16 == 0
    return 0 < rows <= MOST_ROWS and aligned and processors(weight.device) > 0


def launch_fp8_rows(
    x8: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    rows: int,
    dtype: torch.dtype,
    tile: Tile | None = None,
    part: int = 0,
) -> torch.Tensor:
    """Launch the kernel: see ``fp8.launch_fp8_product``. :func:`suits` must hold. With x8 and a weight of int8 the
    scales are those of rows [M'] and of outputs."""
    residual = None if residual is None else residual.contiguous()
    (n, k), tile = weight.shape, tile or tile_of(rows, weight.shape[0])
    out = x8.new_empty(rows, n, dtype=dtype)
    tiles = triton.cdiv(n, tile.n) * triton.cdiv(rows, tile.m)
    at_once = max(1, _SHARED_BYTES // (tile.stages * EACH * (WIDE + tile.m) * STEP)) * processors(x8.device)
    fp8_rows_kernel[(min(tiles, at_once),)](
        boxes(x8, tile.m), boxes(weight, tile.n), x_scales, w_scales, bias, residual, out, rows, n, k,
        x8.shape[0], part or n, BY_BLOCK=w_scales.dim() == 2, **_sizes(tile),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, num_warps=tile.warps,
        maxnreg=tile.registers, **overlapped(x8.device),
    )  # fmt: skip
    return out


def _sizes(tile: Tile) -> dict[str, int]:
    sizes = {"ROWS": tile.m, "OUTPUTS": tile.n, "WIDE": WIDE, "STEP": STEP}
    return sizes | {"STAGES": tile.stages, "EACH": EACH}


def _case(dtype: str, tile: Tile, by_block: bool, bias: bool, kind: str = "fp8e4nv") -> AotCase:
    signature = {
        "x_desc": box_type(kind, tile.m), "w_desc": box_type(kind, tile.n),
        **dict.fromkeys(("x_scales", "w_scales"), "*fp32"),
        **dict.fromkeys(("bias", "residual", "out"), f"*{dtype}"),
        **dict.fromkeys(("M", "N", "K", "PADDED", "PART"), "i32"),
    }  # fmt: skip
    options = {"BY_BLOCK": by_block, "HAS_BIAS": bias, "HAS_RESIDUAL": True, "OVERLAP": True}
    return AotCase(fp8_rows_kernel, signature, _sizes(tile) | options, num_warps=tile.warps, maxnreg=tile.registers)


AOT = [
    *(_case("bf16", tile_of(m, n), kind, False) for m in (16, 32, 64) for n in (4096, 24576) for kind in (True, False)),
    *(_case("fp16", tile_of(16, 4096), kind, True) for kind in (True, False)),
    *(_case("bf16", tile_of(m, n), False, n == 4096, "i8") for m in (16, 32, 64) for n in (4096, 24576)),
]
