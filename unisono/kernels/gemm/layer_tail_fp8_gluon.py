"""The kernel of ``kernels/gemm/layer_tail_fp8.py`` for e4m3 weights with a scale for each 128 x 128 block (Gluon,
Hopper).

As ``kernels/gemm/layer_tail_gluon.py``, with products as in ``kernels/gemm/fp8_gluon.py``. What a product reads is
quantised by programs between two meeting points: the mixer's outputs at the start, both norms, and SiLU's product.

Shapes: M rows, H features, I intermediate features, Q inputs of the output projection, F outputs of the input
projection that follows.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.fp8_gluon import step_product
from unisono.kernels.gemm.persistent import (
    HALF,
    arrive,
    gated,
    load_layer,
    norm,
    quantise,
    quantise_stored,
    stages,
    store_tile,
    wait,
)

COLUMNS = 1024
"""Of a row, that a program quantises at once."""


@gluon.jit
def _scale(x_scales, x_ok, w_scales, step, last, PADDED):
    """The product of both scales of a step, by output and token; of the last step for those after it."""
    at = gl.minimum(step, last)
    of_rows = gl.load(x_scales + at * PADDED, mask=x_ok, other=0.0, cache_modifier=".cg")
    return of_rows[None, :] * gl.load(w_scales + at)[:, None]


@gluon.jit
def _scales(x_scales, x_ok, w_scales, group, last, PADDED):
    """:func:`_scale` of a group's four steps."""
    s0 = _scale(x_scales, x_ok, w_scales, group * 4, last, PADDED)
    s1 = _scale(x_scales, x_ok, w_scales, group * 4 + 1, last, PADDED)
    s2 = _scale(x_scales, x_ok, w_scales, group * 4 + 2, last, PADDED)
    s3 = _scale(x_scales, x_ok, w_scales, group * 4 + 3, last, PADDED)
    return s0, s1, s2, s3


@gluon.jit
def _sum(w, x, full, free, x_scales, w_scales, first, second, item, N, K, PADDED, ROWS: gl.constexpr,
         STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr, PAIR: gl.constexpr,
         MMA: gl.constexpr):  # fmt: skip
    """The products [WIDE, ROWS] of a tile's groups from ``item`` on, scaled and added in one sequence.

    first: the tile's first output. PAIR: its second half is outputs from ``second + first`` on.
    """
    gl.static_assert(EACH == 4, "scales are loaded for four steps")
    steps = (K + STEP - 1) // STEP
    groups = (steps + EACH - 1) // EACH
    row = gl.arange(0, WIDE, gl.SliceLayout(1, MMA))
    output = first + row
    if PAIR:
        output = gl.where(row < HALF, output, output - HALF + second)
    at = w_scales + gl.minimum(output, N - 1) // 128 * steps
    token = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    of_rows, x_ok = x_scales + token, token < PADDED
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    s0, s1, s2, s3 = _scales(of_rows, x_ok, at, 0, steps - 1, PADDED)
    for group in range(groups):
        stage = (item + group) % STAGES
        mbarrier.wait(full.index(stage), (item + group) // STAGES & 1)
        p0 = step_product(w, x, stage * EACH, ROWS, WIDE, MMA)
        p1 = step_product(w, x, stage * EACH + 1, ROWS, WIDE, MMA)
        p2 = step_product(w, x, stage * EACH + 2, ROWS, WIDE, MMA)
        p3 = step_product(w, x, stage * EACH + 3, ROWS, WIDE, MMA)
        n0, n1, n2, n3 = _scales(of_rows, x_ok, at, group + 1, steps - 1, PADDED)
        acc = gl.fma(warpgroup_mma_wait(3, [p0]), s0, acc)
        acc = gl.fma(warpgroup_mma_wait(2, [p1]), s1, acc)
        acc = gl.fma(warpgroup_mma_wait(1, [p2]), s2, acc)
        acc = gl.fma(warpgroup_mma_wait(0, [p3]), s3, acc)
        mbarrier.arrive(free.index(stage))
        s0, s1, s2, s3 = n0, n1, n2, n3
    return acc


@gluon.jit
def _multiply(w, x, full, free, x_scales, w_scales, item, out, bias, residual, M, N, K, PADDED, GATED: gl.constexpr,
              HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
              EACH: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr, OUTPUTS: gl.constexpr,
              MMA: gl.constexpr):  # fmt: skip
    """One product of the layer; returns the next item. GATED: with gates, the first half of a tile, and up; SiLU."""
    for tile in range(gl.program_id(0), (N + OUTPUTS - 1) // OUTPUTS, gl.num_programs(0)):
        y = _sum(w, x, full, free, x_scales, w_scales, tile * OUTPUTS, N, item, 2 * N if GATED else N, K, PADDED,
                 ROWS, STAGES, EACH, STEP, WIDE, GATED, MMA)  # fmt: skip
        item += (K + STEP * EACH - 1) // (STEP * EACH)
        if GATED:
            y = gated(y, out.dtype.element_ty, WIDE, ROWS)
        store_tile(y, out, bias, residual, tile * OUTPUTS, M, N, HAS_BIAS, HAS_RESIDUAL, OUTPUTS, ROWS)
    return item


@gluon.jit
def _compute(w, x, full, free, ready, mixed, residual, o_scales, gate_up_scales, down_scales, next_scales, o_norm,
             next_norm, next_bias, total, act, out, n2, product, x8, x8_scales, n1, n1_scales, act8, act8_scales, n28,
             n28_scales, counters, eps, next_eps, M, Q, H, I, F, PADDED, HAS_BIAS: gl.constexpr,  # noqa: E741
             ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr,
             LINE: gl.constexpr, BLOCK_H: gl.constexpr, COLUMNS: gl.constexpr, TILE_H: gl.constexpr,
             TILE_I: gl.constexpr, TILE_F: gl.constexpr, NORMED: gl.constexpr, KEEP: gl.constexpr,
             FOLLOWED: gl.constexpr, QUANTISED: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """The other warps' part: products, sums, norms, SiLU, and their results in e4m3."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    GROUP: gl.constexpr = STEP if FOLLOWED else 0
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if not QUANTISED:
        quantise(mixed, x8, x8_scales, M, Q, PADDED, COLUMNS, STEP)
        wait(counters, arrive(counters))
    mbarrier.arrive(ready.index(0))
    item = _multiply(w, x, full, free, x8_scales, o_scales, gl.to_tensor(0), total, total, residual, M, H, Q, PADDED,
                     False, False, True, ROWS, STAGES, EACH, STEP, WIDE, TILE_H, MMA)  # fmt: skip
    target = norm(total, o_norm, total, n1, n1_scales, counters, eps, M, H, PADDED, LINE, BLOCK_H, False, STEP)
    wait(counters + LINE, target)
    mbarrier.arrive(ready.index(1))
    item = _multiply(w, x, full, free, n1_scales, gate_up_scales, item, act, act, act, M, I, H, PADDED,
                     True, False, False, ROWS, STAGES, EACH, STEP, WIDE, TILE_I, MMA)  # fmt: skip
    wait(counters + LINE, quantise_stored(act, act8, act8_scales, counters, M, I, PADDED, LINE, COLUMNS, STEP))
    mbarrier.arrive(ready.index(2))
    item = _multiply(w, x, full, free, act8_scales, down_scales, item, out, out, total, M, H, I, PADDED,
                     False, False, True, ROWS, STAGES, EACH, STEP, WIDE, TILE_H, MMA)  # fmt: skip
    if NORMED:
        target = norm(out, next_norm, n2, n28, n28_scales, counters, next_eps, M, H, PADDED, LINE, BLOCK_H, KEEP, GROUP)
    if FOLLOWED:
        wait(counters + LINE, target)
        mbarrier.arrive(ready.index(3))
        _multiply(w, x, full, free, n28_scales, next_scales, item, product, next_bias, out, M, F, H, PADDED,
                  False, HAS_BIAS, False, ROWS, STAGES, EACH, STEP, WIDE, TILE_F, MMA)  # fmt: skip


@gluon.jit
def layer_tail_fp8_kernel(
    x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc,
    mixed, residual, o_scales, gate_up_scales, down_scales, next_scales, o_norm, next_norm, next_bias,
    total, act, out, n2, product, x8, x8_scales, n1, n1_scales, act8, act8_scales, n28, n28_scales, counters,
    eps, next_eps, M, Q, H, I, F, PADDED,  # noqa: E741
    HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr,
    WIDE: gl.constexpr, LINE: gl.constexpr, BLOCK_H: gl.constexpr, COLUMNS: gl.constexpr, TILE_H: gl.constexpr,
    TILE_I: gl.constexpr, TILE_F: gl.constexpr, NORMED: gl.constexpr, KEEP: gl.constexpr, FOLLOWED: gl.constexpr,
    QUANTISED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One program for each multiprocessor; see ``layer_tail_gluon.layer_tail_kernel``. QUANTISED: x8 is given."""
    DTYPE: gl.constexpr = o_desc.dtype
    SHARED: gl.constexpr = o_desc.layout
    w, x, full, free, ready = stages(DTYPE, SHARED, ROWS, STAGES, EACH, STEP, WIDE)
    gl.warp_specialize(
        [
            (_compute, (
                w, x, full, free, ready, mixed, residual, o_scales, gate_up_scales, down_scales, next_scales, o_norm,
                next_norm, next_bias, total, act, out, n2, product, x8, x8_scales, n1, n1_scales, act8, act8_scales,
                n28, n28_scales, counters, eps, next_eps, M, Q, H, I, F, PADDED, HAS_BIAS, ROWS, STAGES, EACH, STEP,
                WIDE, LINE, BLOCK_H, COLUMNS, TILE_H, TILE_I, TILE_F, NORMED, KEEP, FOLLOWED,
                QUANTISED, OVERLAP)),
            (load_layer, (
                x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc, w, x, full, free,
                ready, Q, H, I, F, 1, ROWS, STAGES, EACH, STEP, TILE_H, TILE_I, TILE_F, FOLLOWED,
                OVERLAP)),
        ],
        [1],
        [40],
    )  # fmt: skip
