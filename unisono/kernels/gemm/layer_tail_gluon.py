"""Kernel of ``kernels/gemm/layer_tail.py`` for 16-bit weights (Gluon, Hopper).

Shapes: M rows, H features, I intermediate features, Q inputs of the output projection, F outputs of the input
projection that follows.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.persistent import arrive, gated, load_layer, norm, stages, store_tile, wait
from unisono.kernels.hopper import next_stage
from unisono.kernels.overlap import overlapping

WIDE = 64
"""Rows of one ``wgmma``: the maximum outputs of a tile."""

STEP = 64
"""Inputs of a step: in bytes, a row of the widest swizzle."""

EACH = 4
"""Steps loaded together."""

MOST_ROWS = 32

WARPS = 4
"""Warps that multiply; one more warp loads."""

REGISTERS = 128
"""Registers per thread, on average: half of what there are, so that the kernels before and after have room beside
it.
"""


@gluon.jit
def _sum(w, x, full, free, item, groups, STAGES: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr,
         WIDE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Add the products [WIDE, ROWS] of a tile's groups from ``item`` on in one sequence."""
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    stage, phase = item % STAGES, item // STAGES & 1
    for _ in range(groups):
        mbarrier.wait(full.index(stage), phase)
        product = warpgroup_mma_init(acc)
        for j in gl.static_range(EACH):
            at = stage * EACH + j
            product = warpgroup_mma(w.index(at), x.index(at).permute([1, 0]), product, is_async=True)
        acc = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return acc


@gluon.jit
def _multiply(w, x, full, free, item, out, bias, residual, M, N, K, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
              HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
              STEP: gl.constexpr, WIDE: gl.constexpr, OUTPUTS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Compute one product of the layer; returns the next item. GATED: a tile's first half is gates, the second up;
    SiLU.
    """
    groups = (K + STEP * EACH - 1) // (STEP * EACH)
    for tile in range(gl.program_id(0), (N + OUTPUTS - 1) // OUTPUTS, gl.num_programs(0)):
        y = _sum(w, x, full, free, item, groups, STAGES, EACH, ROWS, WIDE, MMA)
        item += groups
        if GATED:
            y = gated(y, out.dtype.element_ty, WIDE, ROWS)
        store_tile(y, out, bias, residual, tile * OUTPUTS, M, N, HAS_BIAS, HAS_RESIDUAL, OUTPUTS, ROWS)
    return item


@gluon.jit
def _compute(w, x, full, free, ready, residual, o_norm, next_norm, next_bias, total, n1, act, out, n2, product,
             counters, eps, next_eps, M, Q, H, I, F, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr,  # noqa: E741
             STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr, LINE: gl.constexpr,
             BLOCK_H: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr,
             TILE_F: gl.constexpr, NORMED: gl.constexpr, FOLLOWED: gl.constexpr,
             OVERLAP: gl.constexpr):  # fmt: skip
    """Compute products, sums, norms and SiLU. The part of all warps but the loading one."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    item = _multiply(w, x, full, free, gl.to_tensor(0), total, total, residual, M, H, Q, False, False, True,
                     ROWS, STAGES, EACH, STEP, WIDE, TILE_H, MMA)  # fmt: skip
    wait(counters + LINE, norm(total, o_norm, n1, counters, eps, M, H, LINE, BLOCK_H))
    mbarrier.arrive(ready.index(0))
    item = _multiply(w, x, full, free, item, act, act, act, M, I, H, True, False, False,
                     ROWS, STAGES, EACH, STEP, WIDE, TILE_I, MMA)  # fmt: skip
    wait(counters, arrive(counters))
    mbarrier.arrive(ready.index(1))
    item = _multiply(w, x, full, free, item, out, out, total, M, H, I, False, False, True,
                     ROWS, STAGES, EACH, STEP, WIDE, TILE_H, MMA)  # fmt: skip
    if NORMED:
        target = norm(out, next_norm, n2, counters, next_eps, M, H, LINE, BLOCK_H)
    if FOLLOWED:
        wait(counters + LINE, target)
        mbarrier.arrive(ready.index(2))
        _multiply(w, x, full, free, item, product, next_bias, out, M, F, H, False, HAS_BIAS, False,
                  ROWS, STAGES, EACH, STEP, WIDE, TILE_F, MMA)  # fmt: skip


@overlapping(reads_early=True)
@gluon.jit
def layer_tail_kernel(
    x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc,
    residual, o_norm, next_norm, next_bias, total, n1, act, out, n2, product, counters, eps, next_eps,
    M, Q, H, I, F,  # noqa: E741
    HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr,
    WIDE: gl.constexpr, LINE: gl.constexpr, BLOCK_H: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr,
    TILE_F: gl.constexpr, NORMED: gl.constexpr, FOLLOWED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Run the layer tail with one program per multiprocessor: ``_compute`` on the launch's warps, ``load_layer`` on one
    more.

    counters: total arrivals of programs at either grid barrier. All programs must run at once.
    """
    DTYPE: gl.constexpr = o_desc.dtype
    SHARED: gl.constexpr = o_desc.layout
    w, x, full, free, ready = stages(DTYPE, SHARED, ROWS, STAGES, EACH, STEP, WIDE)
    gl.warp_specialize(
        [
            (_compute, (
                w, x, full, free, ready, residual, o_norm, next_norm, next_bias, total, n1, act, out, n2, product,
                counters, eps, next_eps, M, Q, H, I, F, HAS_BIAS, ROWS, STAGES, EACH, STEP, WIDE, LINE, BLOCK_H,
                TILE_H, TILE_I, TILE_F, NORMED, FOLLOWED, OVERLAP)),
            (load_layer, (
                x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc, w, x, full, free,
                ready, Q, H, I, F, ROWS, STAGES, EACH, STEP, TILE_H, TILE_I, TILE_F, FOLLOWED, OVERLAP)),
        ],
        [1],
        [40],
    )  # fmt: skip
