"""Products of few rows with 4-bit weights on Hopper: the bits of the Triton kernels in ``int4.py`` and ``nvfp4.py``.

The tensor memory accelerator loads packed weights and activations into a ring in shared memory. Four warps decode a
piece of the weight to registers, in the layout of wgmma's left operand, while the product of the piece before it runs.
Scales and zeros are loaded two pieces ahead. The sum over K is one sequence, as in every kernel of a product.

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.fp8_gluon import _residual, _store
from unisono.kernels.gemm.persistent import processors
from unisono.kernels.gemm.packed_gluon import (
    HALF,
    NVFP4_GROUP,
    PIECE,
    WIDE,
    _W_LAYOUT,
    _X_LAYOUT,
    _decode,
    _group,
    _load,
    _part,
    _sizes,
)
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping


@gluon.jit
def _multiply(TURN: gl.constexpr, TURNS: gl.constexpr, x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, group, first, token0, pieces,
              NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
              WIDE: gl.constexpr, PIECE: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr,
              HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Decode, multiply, sum and store. The part of four warps."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    DTYPE: gl.constexpr = out.dtype.element_ty
    EACH: gl.constexpr = PIECE // HALF
    THREE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 8, 16],
    )  # fmt: skip
    FOUR: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]], [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4],
    )  # fmt: skip
    GROUPS: gl.constexpr = gl.SliceLayout(2, FOUR)
    rows = gl.minimum(first + gl.arange(0, WIDE, gl.SliceLayout(1, GROUPS if NVFP4 else BYTES)), N - 1)
    if NVFP4:
        each = gl.arange(0, WIDE, gl.SliceLayout(1, gl.SliceLayout(2, THREE)))
        multiplier = gl.load(zeros + gl.minimum(first + each, N - 1))
    else:
        multiplier = rows
    if TURN == 0:
        r = _residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, WIDE, WIDE)
    s0, z0 = _group(scales, zeros, rows, TURN, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
    s1, z1 = _group(scales, zeros, rows, TURN + TURNS, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
    for piece in range(TURN, pieces, TURNS):
        stage = piece % STAGES
        mbarrier.wait(full.index(stage), piece // STAGES & 1)
        a = _decode(w.index(stage), s0, z0, multiplier, NVFP4, DTYPE, BYTES, THREE, FOUR, DOT, WIDE, PIECE)
        s0, z0 = s1, z1
        s1, z1 = _group(scales, zeros, rows, piece + 2 * TURNS, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
        mbarrier.wait(turns.index(TURN), piece // TURNS & 1)
        p = warpgroup_mma_init(sums.load(MMA))
        for j in gl.static_range(EACH):
            p = warpgroup_mma(_part(a, j, EACH, WIDE, HALF, DOT), x.index(stage * EACH + j).permute([1, 0]), p,
                              is_async=True)  # fmt: skip
        sums.store(warpgroup_mma_wait(0, [p]))
        block_barrier()
        mbarrier.arrive(turns.index(gl.where(piece + 1 == pieces, TURNS, (TURN + 1) % TURNS)))
        mbarrier.arrive(free.index(stage))
    if TURN == 0:
        mbarrier.wait(turns.index(TURNS), 0)
        _store(sums.load(MMA), out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, WIDE, WIDE)


@overlapping(reads_early=True)
@gluon.jit
def packed_turns_kernel(x_desc, w_desc, scales, zeros, bias, residual, out, M, N, K, group, TURNS: gl.constexpr, REGISTERS: gl.constexpr, NVFP4: gl.constexpr,
                       HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
                       PIECE: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr,
                       HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Compute one tile of WIDE outputs and ROWS tokens: ``_multiply`` on the launch's warps, ``_load`` on one more."""
    BYTES: gl.constexpr = PIECE * (WIDE // 2 + 2 * ROWS)
    pieces = (K + PIECE - 1) // PIECE
    token0, first = gl.program_id(0) * ROWS, gl.program_id(1) * WIDE
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, WIDE, PIECE // 2], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (PIECE // HALF), ROWS, HALF], x_desc.layout)
    full, free = stage_barriers(STAGES, 1, 1)
    SIDE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WIDE, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    turns = gl.allocate_shared_memory(gl.int64, [TURNS + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TURNS + 1):
        mbarrier.init(turns.index(i), count=1)
    sums.store(gl.zeros([WIDE, ROWS], gl.float32, SIDE))
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(turns.index(0))
    if TURNS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _load,
                    (
                        x_desc,
                        w_desc,
                        x,
                        w,
                        full,
                        free,
                        first,
                        token0,
                        pieces,
                        ROWS,
                        STAGES,
                        PIECE,
                        HALF,
                        BYTES,
                        OVERLAP,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        2,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        3,
                        TURNS,
                        x,
                        w,
                        full,
                        free,
                        sums,
                        turns,
                        scales,
                        zeros,
                        bias,
                        residual,
                        out,
                        M,
                        N,
                        K,
                        group,
                        first,
                        token0,
                        pieces,
                        NVFP4,
                        HAS_ZEROS,
                        ROWS,
                        STAGES,
                        WIDE,
                        PIECE,
                        HALF,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        OVERLAP,
                    ),
                ),
                (
                    _load,
                    (
                        x_desc,
                        w_desc,
                        x,
                        w,
                        full,
                        free,
                        first,
                        token0,
                        pieces,
                        ROWS,
                        STAGES,
                        PIECE,
                        HALF,
                        BYTES,
                        OVERLAP,
                    ),
                ),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


def launch_packed_turns(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile,
) -> torch.Tensor:
    """Launch the kernel: see ``int4.launch_int4_linear``. :func:`suits` must hold.

    group: NVFP4_GROUP: scales are uint8 [N, K / 16] and zeros are the multipliers of ``nvfp4.launch_nvfp4_linear``.
    """
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    out, nvfp4 = x.new_empty(rows, n), group == NVFP4_GROUP
    packed_turns_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, WIDE))](
        TensorDescriptor.from_tensor(x, [tile.m, HALF], _X_LAYOUT),
        TensorDescriptor.from_tensor(weight, [WIDE, PIECE // 2], _W_LAYOUT),
        scales, zeros, bias, residual, out, rows, n, k, group, TURNS=tile.warps // 4, REGISTERS=tile.k, NVFP4=nvfp4, HAS_ZEROS=zeros is not None and not nvfp4,
        **_sizes(tile), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, num_warps=4,
        maxnreg=tile.registers, **overlapped(x.device),
    )  # fmt: skip
    return out


def _case(dtype, tile, nvfp4, zeros, bias):
    from unisono.kernels.gemm.packed_gluon import _case as case

    c = case(dtype, tile, nvfp4, zeros, bias)
    import dataclasses

    return dataclasses.replace(
        c, kernel=packed_turns_kernel, constexprs=c.constexprs | {"TURNS": tile.warps // 4, "REGISTERS": tile.k}
    )
