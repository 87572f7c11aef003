"""Products of few rows with 4-bit weights on Hopper: the bits of the Triton kernels in ``int4.py`` and ``nvfp4.py``.

The tensor memory accelerator loads packed weights and activations into a ring in shared memory. Four warps decode a
piece of the weight to registers, in the layout of wgmma's left operand, while the product of the piece before it runs.
Scales and zeros are loaded two pieces ahead. The sum over K is one sequence, as in every kernel of a product. Where
there are few programs, several groups of warps take turns at the pieces: each decodes its next piece while the others
multiply, and takes over the sums through shared memory. Where that fills more multiprocessors a program has 32 outputs,
and half of the operand's rows are zeros.

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

from unisono.kernels.gemm.fp8_gluon import load_residual, store_product
from unisono.kernels.gemm.packed_decoding import (
    NVFP4_GROUP,
    PIECE,
    WIDE,
    decode_piece,
    load_group,
    of_scales,
    valid_sums,
)
from unisono.kernels.gemm.persistent import processors
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

BOX = gl.constexpr(64)
"""Inputs of a box of activations: in bytes, a row of the widest swizzle."""

MOST_ROWS = 64

W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)
_X_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _load_activations(x_desc, x, bar, stage, piece, token0):
    for j in gl.static_range(PIECE // BOX):
        place = x.index(stage * (PIECE // BOX) + j)
        tma.async_copy_global_to_shared(x_desc, [token0, piece * PIECE + j * BOX], bar, place)


@gluon.jit
def _load(x_desc, w_desc, x, w, full, free, first, token0, pieces, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
          STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all pieces. The weight's first ones do not wait. The part of one warp."""
    SIZE: gl.constexpr = PIECE * (OUTPUTS // 2 + 2 * ROWS)
    for i in gl.static_range(STAGES):
        if i < pieces:
            mbarrier.expect(full.index(i), SIZE)
            tma.async_copy_global_to_shared(w_desc, [first, i * (PIECE // 2)], full.index(i), w.index(i))
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES):
        if i < pieces:
            _load_activations(x_desc, x, full.index(i), i, i, token0)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(STAGES, pieces):
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), SIZE)
        tma.async_copy_global_to_shared(w_desc, [first, i * (PIECE // 2)], full.index(stage), w.index(stage))
        _load_activations(x_desc, x, full.index(stage), stage, i, token0)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _rows(zeros, first, N, NVFP4: gl.constexpr, OUTPUTS: gl.constexpr):
    """Outputs of the program, in the layout of their scales, and the multipliers of NVFP4."""
    rows = gl.minimum(first + of_scales(NVFP4, OUTPUTS), N - 1)
    multiplier = gl.load(zeros + rows) if NVFP4 else rows
    return rows, multiplier


@gluon.jit
def piece_product(a, x, stage, acc, DOT: gl.constexpr):
    """Start to add a piece's product to acc [WIDE, ROWS]."""
    low, high = gl.split(gl.permute(gl.reshape(a, [WIDE, 2, BOX]), [0, 2, 1]))
    product = warpgroup_mma_init(acc)
    b = x.index(stage * 2).permute([1, 0])
    product = warpgroup_mma(gl.convert_layout(low, DOT), b, product, is_async=True)
    b = x.index(stage * 2 + 1).permute([1, 0])
    return warpgroup_mma(gl.convert_layout(high, DOT), b, product, is_async=True)


@gluon.jit
def next_piece(a, acc, scale, zero, stage, phase, piece, x, w, group, full, free, scales, zeros, outputs, multiplier,
               GROUP: gl.constexpr, K, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, OUTPUTS: gl.constexpr,
               GROUPS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """Multiply the decoded piece ``a`` of ``stage``, and decode ``piece``, the next one, meanwhile.

    scale, zero: of ``piece``. group: of the GROUPS groups of outputs, whose weights a stage has. Returns the decoded
    piece, the sums, scale and zero of the piece after it, its stage and phase.
    """
    product = piece_product(a, x, stage, acc, DOT)
    scale2, zero2 = load_group(scales, zeros, outputs, piece + 1, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    behind = stage
    stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(full.index(stage), phase)
    after = decode_piece(w.index(stage * GROUPS + group), scale, zero, multiplier, NVFP4, DTYPE, DOT, OUTPUTS)
    if OUTPUTS < WIDE:  # alone on a multiprocessor; the compiler would put the decoding off until the product ends
        acc, after = warpgroup_mma_wait(0, [product, after])
    else:
        acc = warpgroup_mma_wait(0, [product])
    mbarrier.arrive(free.index(behind))
    return after, acc, scale2, zero2, stage, phase


@gluon.jit
def sum_of_pieces(x, w, group, full, free, scales, zeros, outputs, multiplier, pieces, GROUP: gl.constexpr, K,
                  NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
                  GROUPS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Decode and multiply all pieces: the sums [OUTPUTS, ROWS]. Two pieces in an iteration have registers each."""
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    s, z = load_group(scales, zeros, outputs, 0, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    s1, z1 = load_group(scales, zeros, outputs, 1, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    mbarrier.wait(full.index(0), 0)
    a = decode_piece(w.index(group), s, z, multiplier, NVFP4, DTYPE, DOT, OUTPUTS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for piece in range(1, pieces - 1, 2):
        a, acc, s1, z1, stage, phase = next_piece(
            a, acc, s1, z1, stage, phase, piece, x, w, group, full, free, scales, zeros, outputs, multiplier, GROUP, K,
            NVFP4, HAS_ZEROS, OUTPUTS, GROUPS, STAGES, DTYPE, DOT)  # fmt: skip
        a, acc, s1, z1, stage, phase = next_piece(
            a, acc, s1, z1, stage, phase, piece + 1, x, w, group, full, free, scales, zeros, outputs, multiplier, GROUP,
            K, NVFP4, HAS_ZEROS, OUTPUTS, GROUPS, STAGES, DTYPE, DOT)  # fmt: skip
    if pieces % 2 == 0:
        a, acc, s1, z1, stage, phase = next_piece(
            a, acc, s1, z1, stage, phase, pieces - 1, x, w, group, full, free, scales, zeros, outputs, multiplier,
            GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS, GROUPS, STAGES, DTYPE, DOT)  # fmt: skip
    acc = warpgroup_mma_wait(0, [piece_product(a, x, stage, acc, DOT)])
    return valid_sums(acc, NVFP4, DTYPE, ROWS, OUTPUTS)


@gluon.jit
def _multiply(x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, GROUP: gl.constexpr, first,
              token0, pieces, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
              STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
              OVERLAP: gl.constexpr):  # fmt: skip
    """Decode, multiply, sum and store. The part of four warps, where no others take turns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DTYPE: gl.constexpr = out.dtype.element_ty
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows, multiplier = _rows(zeros, first, N, NVFP4, OUTPUTS)
    r = load_residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, OUTPUTS, OUTPUTS)
    acc = sum_of_pieces(x, w, 0, full, free, scales, zeros, rows, multiplier, pieces, GROUP, K, NVFP4, HAS_ZEROS, ROWS,
                        OUTPUTS, 1, STAGES, DTYPE, MMA)  # fmt: skip
    store_product(acc, out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, OUTPUTS, OUTPUTS)


@gluon.jit
def _take_turns(TURN: gl.constexpr, TURNS: gl.constexpr, x, w, full, free, sums, turns, scales, zeros, bias, residual,
                out, M, N, K, GROUP: gl.constexpr, first, token0, pieces, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr,
                ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
                HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Decode and multiply every TURNS-th piece from TURN on; the first group stores. The part of four warps.

    turns [TURNS + 1]: barriers of each group's turn to add to the sums [WIDE, ROWS], and of the end.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = out.dtype.element_ty
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows, multiplier = _rows(zeros, first, N, NVFP4, OUTPUTS)
    if TURN == 0:
        r = load_residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, OUTPUTS, OUTPUTS)
    s0, z0 = load_group(scales, zeros, rows, TURN, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    s1, z1 = load_group(scales, zeros, rows, TURN + TURNS, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    for piece in range(TURN, pieces, TURNS):
        stage = piece % STAGES
        mbarrier.wait(full.index(stage), piece // STAGES & 1)
        a = decode_piece(w.index(stage), s0, z0, multiplier, NVFP4, DTYPE, DOT, OUTPUTS)
        s0, z0 = s1, z1
        s1, z1 = load_group(scales, zeros, rows, piece + 2 * TURNS, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
        a = warpgroup_mma_wait(0, [a])  # the compiler would put the decoding off until the turn
        mbarrier.wait(turns.index(TURN), piece // TURNS & 1)
        sums.store(warpgroup_mma_wait(0, [piece_product(a, x, stage, sums.load(MMA), DOT)]))
        block_barrier()
        mbarrier.arrive(turns.index(gl.where(piece + 1 == pieces, TURNS, (TURN + 1) % TURNS)))
        mbarrier.arrive(free.index(stage))
    if TURN == 0:
        mbarrier.wait(turns.index(TURNS), 0)
        acc = valid_sums(sums.load(MMA), NVFP4, DTYPE, ROWS, OUTPUTS)
        store_product(acc, out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, OUTPUTS, OUTPUTS)


@overlapping(reads_early=True)
@gluon.jit
def packed_rows_kernel(x_desc, w_desc, scales, zeros, bias, residual, out, M, N, K, GROUP: gl.constexpr,
                       NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
                       STAGES: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr,
                       HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Compute one tile of OUTPUTS outputs and ROWS tokens: TURNS groups of four warps, and ``_load`` on one more."""
    pieces = (K + PIECE - 1) // PIECE
    token0, first = gl.program_id(0) * ROWS, gl.program_id(1) * OUTPUTS
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, OUTPUTS, PIECE // 2], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (PIECE // BOX), ROWS, BOX], x_desc.layout)
    full, free = stage_barriers(STAGES, 1, 1)
    if TURNS > 1:
        sums = gl.allocate_shared_memory(gl.float32, [WIDE, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        turns = gl.allocate_shared_memory(gl.int64, [TURNS + 1, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(TURNS + 1):
            mbarrier.init(turns.index(i), count=1)
        sums.store(gl.zeros([WIDE, ROWS], gl.float32, gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])))
    else:
        sums, turns = full, free
    fence_async_shared()
    block_barrier()
    # Compile-time arguments would become tensors in tuples with a name.
    if TURNS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, GROUP, first,
                    token0, pieces, NVFP4, HAS_ZEROS, ROWS, OUTPUTS, STAGES, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
                (_load, (x_desc, w_desc, x, w, full, free, first, token0, pieces, ROWS, OUTPUTS, STAGES, OVERLAP)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        mbarrier.arrive(turns.index(0))
        gl.warp_specialize(
            [
                (_take_turns, (
                    0, TURNS, x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, GROUP, first,
                    token0, pieces, NVFP4, HAS_ZEROS, ROWS, OUTPUTS, STAGES, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
                (_take_turns, (
                    1, TURNS, x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, GROUP, first,
                    token0, pieces, NVFP4, HAS_ZEROS, ROWS, OUTPUTS, STAGES, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
                (_load, (x_desc, w_desc, x, w, full, free, first, token0, pieces, ROWS, OUTPUTS, STAGES, OVERLAP)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip


def suits(rows: int, weight: torch.Tensor, group: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel can multiply this number of rows by the packed weight [N, K / 2] on its device.

    dtype: of activations.
    """
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 32 == 0
    whole = group == NVFP4_GROUP or group % PIECE.value == 0 or group >= 2 * weight.shape[1]
    fits = 0 < rows <= MOST_ROWS and dtype is not torch.float32
    return fits and aligned and whole and processors(weight.device) > 0


def tile_of(rows: int, n: int) -> Tile:
    """Choose the fastest known tile for this number of rows and outputs, on an H200. warps: all that multiply."""
    alone, half = n <= 132 * WIDE.value, n <= 132 * WIDE.value // 2  # one program for a multiprocessor
    if rows <= 16 and alone:
        return Tile(16, 32 if half else 64, PIECE.value, 8, 8, registers=104)
    if half:
        return Tile(32 if rows <= 32 else 64, 32, PIECE.value, 4, 5, registers=104)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, WIDE.value, PIECE.value, 4, 6 if rows <= 16 else 4, registers=80)
    return Tile(64, WIDE.value, PIECE.value, 4, 5 if alone else 3, registers=104 if alone else 80)


def launch_packed_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Launch the kernel: see ``int4.launch_int4_linear``. :func:`suits` must hold.

    group: NVFP4_GROUP: scales are uint8 [N, K / 16] and zeros are the multipliers of ``nvfp4.launch_nvfp4_linear``.
    """
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    tile, nvfp4 = tile or tile_of(rows, n), group == NVFP4_GROUP
    out = x.new_empty(rows, n)
    packed_rows_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))](
        TensorDescriptor.from_tensor(x, [tile.m, BOX.value], _X_LAYOUT),
        TensorDescriptor.from_tensor(weight, [tile.n, PIECE.value // 2], W_LAYOUT),
        scales.view(torch.int32) if nvfp4 else scales, zeros, bias, residual, out, rows, n, k, GROUP=group, NVFP4=nvfp4,
        HAS_ZEROS=zeros is not None and not nvfp4, **_sizes(tile), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=4, maxnreg=tile.registers, **overlapped(x.device),
    )  # fmt: skip
    return out


def _sizes(tile: Tile) -> dict[str, int | None]:
    return {
        "ROWS": tile.m,
        "OUTPUTS": tile.n,
        "STAGES": tile.stages,
        "TURNS": tile.warps // 4,
        "REGISTERS": tile.registers,
    }


def _case(dtype: str, tile: Tile, nvfp4: bool, zeros: bool, bias: bool) -> AotCase:
    signature = {
        "x_desc": f"tensordesc<{dtype}[{tile.m}, {BOX.value}],{_X_LAYOUT!r}>",
        "w_desc": f"tensordesc<u8[{tile.n}, {PIECE.value // 2}],{W_LAYOUT!r}>",
        "scales": "*i32" if nvfp4 else "*fp32", "zeros": "*fp32" if nvfp4 else "*i8",
        **dict.fromkeys(("bias", "residual", "out"), f"*{dtype}"),
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }  # fmt: skip
    options = {
        "GROUP": NVFP4_GROUP if nvfp4 else 128,
        "NVFP4": nvfp4,
        "HAS_ZEROS": zeros,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": True,
        "OVERLAP": True,
    }
    return AotCase(packed_rows_kernel, signature, _sizes(tile) | options, num_warps=4, maxnreg=tile.registers)


AOT = [
    *(
        _case("bf16", tile_of(rows, n), nvfp4, zeros, False)
        for rows in (16, 32, 64)
        for n in (4096, 24576)
        for nvfp4, zeros in ((False, False), (False, True), (True, False))
    ),
    _case("fp16", tile_of(16, 4096), False, True, True),
    _case("fp16", tile_of(16, 4096), True, False, True),
]
