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
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

WIDE = 64
"""Outputs of a program: the rows of one ``wgmma``."""

PIECE = 128
"""Inputs of a piece of the weight, 64 bytes of an output."""

HALF = 64
"""Inputs of a box of activations: in bytes, a row of the widest swizzle."""

MOST_ROWS = 64

NVFP4_GROUP = 16
"""Inputs of NVFP4 that share a scale; no group of integers is as small."""

_W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)
_X_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _load(x_desc, w_desc, x, w, full, free, first, token0, pieces, ROWS: gl.constexpr, STAGES: gl.constexpr,
          PIECE: gl.constexpr, HALF: gl.constexpr, BYTES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all pieces. The weight's first ones do not wait. The part of one warp."""
    for i in gl.static_range(STAGES):
        if i < pieces:
            mbarrier.expect(full.index(i), BYTES)
            tma.async_copy_global_to_shared(w_desc, [first, i * (PIECE // 2)], full.index(i), w.index(i))
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES):
        if i < pieces:
            for j in gl.static_range(PIECE // HALF):
                place = x.index(i * (PIECE // HALF) + j)
                tma.async_copy_global_to_shared(x_desc, [token0, i * PIECE + j * HALF], full.index(i), place)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(STAGES, pieces):
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        tma.async_copy_global_to_shared(w_desc, [first, i * (PIECE // 2)], full.index(stage), w.index(stage))
        for j in gl.static_range(PIECE // HALF):
            place = x.index(stage * (PIECE // HALF) + j)
            tma.async_copy_global_to_shared(x_desc, [token0, i * PIECE + j * HALF], full.index(stage), place)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _group(scales, zeros, rows, piece, group, K, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, PIECE: gl.constexpr,
           GROUPS: gl.constexpr):  # fmt: skip
    """Load what decodes a piece for each output: scale and zero of integers, the scales of NVFP4's groups of 16."""
    if NVFP4:
        at = piece * (PIECE // 64) + gl.arange(0, PIECE // 64, gl.SliceLayout(0, GROUPS))
        inside = (at < K // 64)[None, :] & (rows >= 0)[:, None]
        words = scales.to(gl.pointer_type(gl.int32), bitcast=True)
        scale = gl.load(words + rows[:, None] * (K // 64) + at[None, :], mask=inside, other=0)
        zero = scale
    else:
        groups = (K + group - 1) // group
        at = rows * groups + gl.minimum(piece * PIECE // group, groups - 1)
        scale = gl.load(scales + at)
        zero = gl.load(zeros + at).to(gl.float32) if HAS_ZEROS else gl.full_like(scale, 8.0)
    return scale, zero


@gluon.jit
def _masked(bits, mask: gl.constexpr, base: gl.constexpr):
    """Compute ``bits & mask | base`` in one instruction, as fp32; the compiler makes two of it."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=f,r,r,r",
        [bits, gl.full_like(bits, mask), gl.full_like(bits, base)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _integers(held, scale, zero, DTYPE: gl.constexpr, BYTES: gl.constexpr):
    """Decode bytes to pairs ``(q - zero) * scale``, as ``integers_decoded`` of ``kernels/gemm/decoded.py``."""
    byte = held.load(BYTES).to(gl.int32)
    low = _masked(byte, 0x0F, 0x4B000000) - (8388608.0 + zero)[:, None]
    high = _masked(byte, 0xF0, 0x49000000) - (524288.0 + zero)[:, None]
    return gl.join((low * scale[:, None]).to(DTYPE), (high * scale[:, None]).to(DTYPE))


@gluon.jit
def _e2m1(held, scale, multiplier, DTYPE: gl.constexpr, BYTES: gl.constexpr, THREE: gl.constexpr, FOUR: gl.constexpr,
          WIDE: gl.constexpr, PIECE: gl.constexpr):  # fmt: skip
    """Decode bytes to weights [WIDE, PIECE / 16, 16], by the rule of ``kernels/gemm/nvfp4.py``.

    Sign, exponent and mantissa go to their places in fp32, as there: sign bits that are shifted in are cut away.
    """
    byte = held.load(BYTES).to(gl.int8, bitcast=True).to(gl.int32)
    high = ((byte << 18) & -0x7E400000).to(gl.float32, bitcast=True)
    low = (((byte << 28) >> 6) & -0x7E400000).to(gl.float32, bitcast=True)
    values = gl.convert_layout(gl.reshape(gl.join(low, high), [WIDE, PIECE // 16, 16]), THREE)
    place = 24 - 8 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, FOUR)))
    bits = ((scale[:, :, None] << place[None, None, :]) >> 4) & -0x78100000
    bits = gl.convert_layout(gl.reshape(bits, [WIDE, PIECE // 16]), gl.SliceLayout(2, THREE))
    s = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36 * multiplier[:, None]
    return (values * 8.507059173023462e37 * s[:, :, None]).to(DTYPE)


@gluon.jit
def _decode(held, scale, zero, multiplier, NVFP4: gl.constexpr, DTYPE: gl.constexpr, BYTES: gl.constexpr,
            THREE: gl.constexpr, FOUR: gl.constexpr, DOT: gl.constexpr, WIDE: gl.constexpr,
            PIECE: gl.constexpr):  # fmt: skip
    """Decode a piece [WIDE, PIECE / 2] to registers."""
    if NVFP4:
        values = _e2m1(held, scale, multiplier, DTYPE, BYTES, THREE, FOUR, WIDE, PIECE)
    else:
        values = _integers(held, scale, zero, DTYPE, BYTES)
    return gl.convert_layout(gl.reshape(values, [WIDE, PIECE]), DOT)


@gluon.jit
def _multiply(x, w, full, free, scales, zeros, bias, residual, out, M, N, K, group, first, token0, pieces,
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
    r = _residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, WIDE, WIDE)
    s0, z0 = _group(scales, zeros, rows, 0, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
    s1, z1 = _group(scales, zeros, rows, 1, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    mbarrier.wait(full.index(0), 0)
    a = _decode(w.index(0), s0, z0, multiplier, NVFP4, DTYPE, BYTES, THREE, FOUR, DOT, WIDE, PIECE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for piece in range(1, pieces):
        p = warpgroup_mma_init(acc)
        for j in gl.static_range(EACH):
            p = warpgroup_mma(_part(a, j, EACH, WIDE, HALF, DOT), x.index(stage * EACH + j).permute([1, 0]), p,
                              is_async=True)  # fmt: skip
        s2, z2 = _group(scales, zeros, rows, piece + 1, group, K, NVFP4, HAS_ZEROS, PIECE, GROUPS)
        behind = stage
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        a = _decode(w.index(stage), s1, z1, multiplier, NVFP4, DTYPE, BYTES, THREE, FOUR, DOT, WIDE, PIECE)
        acc = warpgroup_mma_wait(0, [p])
        mbarrier.arrive(free.index(behind))
        s1, z1 = s2, z2
    p = warpgroup_mma_init(acc)
    for j in gl.static_range(EACH):
        p = warpgroup_mma(_part(a, j, EACH, WIDE, HALF, DOT), x.index(stage * EACH + j).permute([1, 0]), p,
                          is_async=True)  # fmt: skip
    acc = warpgroup_mma_wait(0, [p])
    _store(acc, out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, WIDE, WIDE)


@gluon.jit
def _part(a, j: gl.constexpr, EACH: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr, DOT: gl.constexpr):
    """Take part j of a decoded piece."""
    low, high = gl.split(gl.permute(gl.reshape(a, [WIDE, EACH, HALF]), [0, 2, 1]))
    return gl.convert_layout(low if j == 0 else high, DOT)


@overlapping(reads_early=True)
@gluon.jit
def packed_rows_kernel(x_desc, w_desc, scales, zeros, bias, residual, out, M, N, K, group, NVFP4: gl.constexpr,
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
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                x, w, full, free, scales, zeros, bias, residual, out, M, N, K, group, first, token0, pieces, NVFP4,
                HAS_ZEROS, ROWS, STAGES, WIDE, PIECE, HALF, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
            (_load, (
                x_desc, w_desc, x, w, full, free, first, token0, pieces, ROWS, STAGES, PIECE, HALF, BYTES, OVERLAP)),
        ],
        [1],
        [24],
    )  # fmt: skip


def suits(rows: int, weight: torch.Tensor, group: int) -> bool:
    """Return True if the kernel can multiply this number of rows by the packed weight [N, K / 2] on its device."""
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 32 == 0
    whole = group == NVFP4_GROUP or group % PIECE == 0 or group >= 2 * weight.shape[1]
    return 0 < rows <= MOST_ROWS and aligned and whole and processors(weight.device) > 0


def tile_of(rows: int) -> Tile:
    """Choose the fastest known tile for this number of rows on an H200."""
    size = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return Tile(size, WIDE, PIECE, 4, {16: 6, 32: 4, 64: 3}[size], registers=80)


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
    tile = tile or tile_of(rows)
    out, nvfp4 = x.new_empty(rows, n), group == NVFP4_GROUP
    packed_rows_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, WIDE))](
        TensorDescriptor.from_tensor(x, [tile.m, HALF], _X_LAYOUT),
        TensorDescriptor.from_tensor(weight, [WIDE, PIECE // 2], _W_LAYOUT),
        scales, zeros, bias, residual, out, rows, n, k, group, NVFP4=nvfp4, HAS_ZEROS=zeros is not None and not nvfp4,
        **_sizes(tile), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, num_warps=tile.warps,
        maxnreg=tile.registers, **overlapped(x.device),
    )  # fmt: skip
    return out


def _sizes(tile: Tile) -> dict[str, int]:
    return {"ROWS": tile.m, "STAGES": tile.stages, "WIDE": WIDE, "PIECE": PIECE, "HALF": HALF}


def _case(dtype: str, tile: Tile, nvfp4: bool, zeros: bool, bias: bool) -> AotCase:
    signature = {
        "x_desc": f"tensordesc<{dtype}[{tile.m}, {HALF}],{_X_LAYOUT!r}>",
        "w_desc": f"tensordesc<u8[{WIDE}, {PIECE // 2}],{_W_LAYOUT!r}>",
        "scales": "*u8" if nvfp4 else "*fp32", "zeros": "*fp32" if nvfp4 else "*i8",
        **dict.fromkeys(("bias", "residual", "out"), f"*{dtype}"),
        **dict.fromkeys(("M", "N", "K", "group"), "i32"),
    }  # fmt: skip
    options = {"NVFP4": nvfp4, "HAS_ZEROS": zeros, "HAS_BIAS": bias, "HAS_RESIDUAL": True, "OVERLAP": True}
    return AotCase(packed_rows_kernel, signature, _sizes(tile) | options, num_warps=4, maxnreg=tile.registers)


AOT = [
    *(
        _case("bf16", tile_of(rows), nvfp4, zeros, False)
        for rows in (16, 32, 64)
        for nvfp4, zeros in ((False, False), (False, True), (True, False))
    ),
    _case("fp16", tile_of(16), False, True, True),
    _case("fp16", tile_of(16), True, False, True),
]
