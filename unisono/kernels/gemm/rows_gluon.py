"""Products of few rows with a rank's part of a weight on Hopper (Gluon): the bits of the Triton kernel, sooner.

A part has few outputs: 1,024 of an 8B's 4,096 on four GPUs. Bits ask for one sequence over K, so a product takes as
long as its chain of tensor core operations, whatever the weight's bytes. ``wgmma`` has the shorter chain. The tensor
memory accelerator loads as much of the weight as fits before the kernel's turn, while the gather ahead waits for other
ranks; nothing writes weights. A program has 8 outputs where that is one tile for each multiprocessor. ``wgmma``
multiplies 64 rows of shared memory: those after a step's outputs are the next steps', and their products are not
stored.

``linear.exact_rows`` compares the bits on the present GPU.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.persistent import box_of, load_product, processors, store_tile, tile_of
from unisono.kernels.hopper import WIDTH, block_barrier, box_type, boxes, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

WIDE = 64
"""Rows of one ``wgmma``."""

STEP = 64
"""Inputs of a step: in bytes, a row of the widest swizzle."""

EACH = 4
"""Steps loaded together."""

MOST_ROWS = 64
MOST_OUTPUTS = 16384
"""Reading a larger part, such as an LM head's, takes longer than any chain."""

PROOF_ROWS = (1, 9, 24, 64)
"""Numbers of rows that the start compares: one for each tile."""

_NARROW = 8
"""Least outputs of a program: rows of a swizzle's pattern."""

_SHARED_BYTES = 200 * 1024
"""Shared memory of a program; the next kernel's programs have the rest."""

_WARPS, _REGISTERS = 4, 128


class RowsTile(NamedTuple):
    """Blocking of the kernel; no bit depends on it. rows, outputs: of a program. stages: groups of EACH steps."""

    rows: int
    outputs: int
    stages: int

    @property
    def held(self) -> int:
        """Rows of a step's outputs in shared memory."""
        return triton.next_power_of_2(self.outputs)

    @classmethod
    def of(cls, rows: int, n: int, k: int, programs: int) -> RowsTile:
        """Choose the blocking for this number of rows, up to MOST_ROWS."""
        outputs = _NARROW if n <= _NARROW * programs else tile_of(n, programs, WIDE)
        return cls.fitting(rows, outputs, k)

    @classmethod
    def fitting(cls, rows: int, outputs: int, k: int) -> RowsTile:
        """The blocking with as many stages as fit, or as the product has groups."""
        tile = cls(max(8, triton.next_power_of_2(rows)), outputs, 0)
        room = _SHARED_BYTES - (WIDE - tile.held) * WIDTH.value
        most = room // (EACH * (tile.held + tile.rows) * WIDTH.value)
        return tile._replace(stages=max(2, min(most, triton.cdiv(k, STEP * EACH))))


@gluon.jit
def _outputs_of(w, at, WIDE: gl.constexpr, STEP: gl.constexpr):
    """Step ``at`` of the weight as the left operand: rows after the step's own are those of the next steps."""
    held = w.index(at)
    if held.shape[0] < WIDE:
        return held._reinterpret(w.dtype, [WIDE, STEP], w.layout)
    else:
        return held


@gluon.jit
def _sum(w, x, full, free, item, groups, STAGES: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr,
         WIDE: gl.constexpr, STEP: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Add the products [WIDE, ROWS] of a tile's groups from ``item`` on in one sequence, a group ahead of the wait."""
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    stage, phase = item % STAGES, item // STAGES & 1
    behind = stage
    for group in range(groups):
        mbarrier.wait(full.index(stage), phase)
        product = acc
        for j in gl.static_range(EACH):
            at = stage * EACH + j
            rows = x.index(at).permute([1, 0])
            product = warpgroup_mma(_outputs_of(w, at, WIDE, STEP), rows, product, is_async=True)
        acc = warpgroup_mma_wait(EACH, [product])
        mbarrier.arrive(free.index(behind), pred=group > 0)
        behind = stage
        stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index(behind))
    return acc


@gluon.jit
def _multiply(w, x, full, free, bias, residual, out, M, N, K, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
              ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WIDE: gl.constexpr, STEP: gl.constexpr,
              STAGES: gl.constexpr, EACH: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Multiply, sum and store. The part of four warps."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    groups, item = (K + STEP * EACH - 1) // (STEP * EACH), gl.to_tensor(0)
    for tile in range(gl.program_id(0), (N + OUTPUTS - 1) // OUTPUTS, gl.num_programs(0)):
        y = _sum(w, x, full, free, item, groups, STAGES, EACH, ROWS, WIDE, STEP, MMA)
        item += groups
        store_tile(y, out, bias, residual, tile * OUTPUTS, M, N, HAS_BIAS, HAS_RESIDUAL, OUTPUTS, ROWS)


@gluon.jit
def _load(w_desc, x_desc, w, x, full, free, N, K, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
          STEP: gl.constexpr, OUTPUTS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load both operands, as much of the weight as fits before the kernel's turn. The part of one warp."""
    load_product(w_desc, x_desc, w, x, full, free, full, 0, gl.to_tensor(0), N, K, 0,
                 ROWS, STAGES, EACH, STEP, OUTPUTS, False, OVERLAP)  # fmt: skip


@overlapping(reads_early=True)
@gluon.jit(do_not_specialize=["M"])
def rows_kernel(x_desc, w_desc, bias, residual, out, M, N, K, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
                ROWS: gl.constexpr, OUTPUTS: gl.constexpr, HELD: gl.constexpr, WIDE: gl.constexpr, STEP: gl.constexpr,
                STAGES: gl.constexpr, EACH: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Share tiles of OUTPUTS outputs among programs: ``_multiply`` on the launch's warps, ``_load`` on one more."""
    DTYPE: gl.constexpr = w_desc.dtype
    SHARED: gl.constexpr = w_desc.layout
    BEYOND: gl.constexpr = WIDE // HELD - 1
    w = gl.allocate_shared_memory(DTYPE, [STAGES * EACH + BEYOND, HELD, STEP], SHARED)
    x = gl.allocate_shared_memory(DTYPE, [STAGES * EACH, ROWS, STEP], SHARED)
    full, free = stage_barriers(STAGES, 1, 1)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                w, x, full, free, bias, residual, out, M, N, K, HAS_BIAS, HAS_RESIDUAL, ROWS, OUTPUTS, WIDE, STEP,
                STAGES, EACH, OVERLAP)),
            (_load, (w_desc, x_desc, w, x, full, free, N, K, ROWS, STAGES, EACH, STEP, OUTPUTS, OVERLAP)),
        ],
        [1],
        [40],
    )  # fmt: skip


def suits(rows: int, weight: torch.Tensor) -> bool:
    """Return True if the kernel can multiply this number of rows by the weight [N, K] of 16 bits on its device."""
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0
    small = 0 < rows <= MOST_ROWS and len(weight) <= MOST_OUTPUTS and weight.itemsize == 2
    return small and aligned and processors(weight.device) > 0


def launch_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: RowsTile | None = None,
) -> torch.Tensor:
    """Launch the product ``linear.launch_linear`` of contiguous operands. :func:`suits` must hold. tile: speed only."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    programs = processors(x.device)
    tile = tile or RowsTile.of(rows, n, k, programs)
    out = x.new_empty(rows, n)
    rows_kernel[(min(programs, triton.cdiv(n, tile.outputs)),)](
        boxes(x, tile.rows), boxes(weight, box_of(tile.outputs)), out if bias is None else bias,
        out if residual is None else residual, out, rows, n, k, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, **_sizes(tile), num_warps=_WARPS, maxnreg=_REGISTERS, **overlapped(x.device),
    )  # fmt: skip
    return out


def _sizes(tile: RowsTile) -> dict[str, Any]:
    """Compile-time sizes of the kernel."""
    sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "HELD": tile.held, "WIDE": WIDE, "STEP": STEP}
    return sizes | {"STAGES": tile.stages, "EACH": EACH}


def key_of(weight: torch.Tensor) -> Hashable:
    """Shape and dtype of a weight, on which bits may depend."""
    return (*weight.shape, weight.dtype)


def _case(dtype: str, rows: int, n: int, k: int, bias: bool = False, residual: bool = False) -> AotCase:
    tile = RowsTile.of(rows, n, k, 132)
    signature = {
        "x_desc": box_type(dtype, tile.rows), "w_desc": box_type(dtype, box_of(tile.outputs)),
        **dict.fromkeys(("bias", "residual", "out"), f"*{dtype}"), **dict.fromkeys("MNK", "i32"),
    }  # fmt: skip
    options = {"HAS_BIAS": bias, "HAS_RESIDUAL": residual, "OVERLAP": True}
    return AotCase(rows_kernel, signature, _sizes(tile) | options, num_warps=_WARPS, maxnreg=_REGISTERS)


AOT = [
    *(_case("bf16", rows, n, k) for rows, n, k in ((1, 1024, 12288), (1, 1536, 4096), (1, 6144, 4096))),
    _case("bf16", 64, 1024, 4096),
    _case("fp16", 16, 2048, 4096, bias=True, residual=True),
    _case("bf16", 32, 12288, 4096, residual=True),
]  # fmt: skip
