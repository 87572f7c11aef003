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
from unisono.kernels.gemm.persistent import processors
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

WIDE = gl.constexpr(64)
"""Rows of one ``wgmma``: outputs of a program, or twice as many."""

PIECE = gl.constexpr(128)
"""Inputs of a piece of the weight, 64 bytes of an output."""

BOX = gl.constexpr(64)
"""Inputs of a box of activations: in bytes, a row of the widest swizzle."""

MOST_ROWS = 64

NVFP4_GROUP = 16
"""Inputs of NVFP4 that share a scale; no group of integers is as small."""

SMALLER = gl.constexpr(256.0)
"""Quotient of NVFP4 weights in bf16 and their decoded numbers, so that scales below 1,020 stay within bf16's range."""

W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)
_X_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)

BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
"""Bytes of a piece: those of the inputs that a thread has of wgmma's left operand."""

BYTES_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 64]
    )
)
"""The same of 32 outputs: a warp has eight, every other eight rows of the left operand."""

BY_GROUP = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 8, 8],
    )
)  # fmt: skip
"""BYTES by output, group of 16 inputs and byte."""

BY_GROUP_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[8, 0, 0], [16, 0, 0]], [], [32, 8, 8],
    )
)  # fmt: skip

WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2]
    )
)
"""Words of four scales of a piece by output: a thread has all of its outputs."""

WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 2])
)


@gluon.jit
def masked(bits, mask: gl.constexpr, base: gl.constexpr):
    """Compute ``bits & mask | base`` in one instruction, as fp32; the compiler makes two of it."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=f,r,r,r",
        [bits, gl.full_like(bits, mask), gl.full_like(bits, base)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def e4m3_products(word, multiplier, DTYPE: gl.constexpr):
    """Multiply the four e4m3 numbers of a word, round to DTYPE, and return each twice, as the halves of an integer."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high, a, b, c, d;
                .reg .b32 ab, cd;
                .reg .f32 f;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 ab, low;
                cvt.rn.f16x2.e4m3x2 cd, high;
                mov.b32 {a, b}, ab;
                mov.b32 {c, d}, cd;
                cvt.f32.f16 f, a;
                mul.rn.f32 f, f, $5;
                cvt.rn.bf16x2.f32 $0, f, f;
                cvt.f32.f16 f, b;
                mul.rn.f32 f, f, $5;
                cvt.rn.bf16x2.f32 $1, f, f;
                cvt.f32.f16 f, c;
                mul.rn.f32 f, f, $5;
                cvt.rn.bf16x2.f32 $2, f, f;
                cvt.f32.f16 f, d;
                mul.rn.f32 f, f, $5;
                cvt.rn.bf16x2.f32 $3, f, f;
            }
            """,
            "=&r,=&r,=&r,=&r,r,f", [word, multiplier], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high, a, b, c, d;
                .reg .b32 ab, cd;
                .reg .f32 f;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 ab, low;
                cvt.rn.f16x2.e4m3x2 cd, high;
                mov.b32 {a, b}, ab;
                mov.b32 {c, d}, cd;
                cvt.f32.f16 f, a;
                mul.rn.f32 f, f, $5;
                cvt.rn.f16x2.f32 $0, f, f;
                cvt.f32.f16 f, b;
                mul.rn.f32 f, f, $5;
                cvt.rn.f16x2.f32 $1, f, f;
                cvt.f32.f16 f, c;
                mul.rn.f32 f, f, $5;
                cvt.rn.f16x2.f32 $2, f, f;
                cvt.f32.f16 f, d;
                mul.rn.f32 f, f, $5;
                cvt.rn.f16x2.f32 $3, f, f;
            }
            """,
            "=&r,=&r,=&r,=&r,r,f", [word, multiplier], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip


@gluon.jit
def e2m1_products(byte, scale, DTYPE: gl.constexpr):
    """Multiply both numbers of a byte by the halves of ``scale``: DTYPE, of fp16 rounded once.

    Exponent and mantissa of e2m1 go to the places of those of DTYPE, which makes of a number its 2 ** -126 (bf16) or
    2 ** -14 (fp16). Multiplications put them there, because shifts and masks run on another unit, at half of the rate.
    """
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b32 size, sign;
                mul.lo.u32 size, $2, 0x00040040;
                mul.lo.u32 sign, $2, 0x01001000;
                and.b32 size, size, 0x01C001C0;
                lop3.b32 size, sign, 0x80008000, size, 0xEA;
                mul.rn.bf16x2 size, size, $3;
                mov.b32 {$0, $1}, size;
            }
            """,
            "=h,=h,r,r", [byte, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b32 size, sign;
                mul.lo.u32 size, $2, 0x00200200;
                mul.lo.u32 sign, $2, 0x01001000;
                and.b32 size, size, 0x0E000E00;
                lop3.b32 size, sign, 0x80008000, size, 0xEA;
                mov.b32 sign, 0x74007400;
                mul.rn.f16x2 size, size, sign;
                mul.rn.f16x2 size, size, $3;
                mov.b32 {$0, $1}, size;
            }
            """,
            "=h,=h,r,r", [byte, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
        )  # fmt: skip


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
def of_scales(NVFP4: gl.constexpr, OUTPUTS: gl.constexpr):
    """Outputs of the program, 0 … OUTPUTS - 1, in the layout of :func:`load_group`."""
    OF_WORDS: gl.constexpr = WORDS if OUTPUTS == WIDE else WORDS_32
    OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
    return gl.arange(0, OUTPUTS, gl.SliceLayout(1, OF_WORDS if NVFP4 else OF_BYTES))


@gluon.jit
def _rows(zeros, first, N, NVFP4: gl.constexpr, OUTPUTS: gl.constexpr):
    """Outputs of the program, in the layout of their scales, and the multipliers of NVFP4."""
    rows = gl.minimum(first + of_scales(NVFP4, OUTPUTS), N - 1)
    if NVFP4:
        multiplier = gl.load(zeros + rows)
    else:
        multiplier = rows
    return rows, multiplier


@gluon.jit
def load_group(scales, zeros, rows, piece, GROUP: gl.constexpr, K, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr,
               OUTPUTS: gl.constexpr):  # fmt: skip
    """Load what decodes a piece for each output: scale and zero of integers, two words of NVFP4's scales."""
    if NVFP4:
        OF_WORDS: gl.constexpr = WORDS if OUTPUTS == WIDE else WORDS_32
        at = piece * (PIECE // 64) + gl.arange(0, PIECE // 64, gl.SliceLayout(0, OF_WORDS))
        inside = (at < K // 64)[None, :] & (rows >= 0)[:, None]
        scale = gl.load(scales + rows[:, None] * (K // 64) + at[None, :], mask=inside, other=0)
        zero = scale
    else:
        groups = (K + GROUP - 1) // GROUP
        at = rows * groups + gl.minimum(piece * PIECE // GROUP, groups - 1)
        scale = gl.load(scales + at)
        zero = gl.load(zeros + at).to(gl.float32) if HAS_ZEROS else gl.full_like(scale, 8.0)
    return scale, zero


@gluon.jit
def _integers(held, scale, zero, DTYPE: gl.constexpr, OUTPUTS: gl.constexpr):
    """Decode bytes to pairs ``(q - zero) * scale``, as ``integers_decoded`` of ``kernels/gemm/decoded.py``."""
    OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
    byte = held.load(OF_BYTES).to(gl.int32)
    low = masked(byte, 0x0F, 0x4B000000) - (8388608.0 + zero)[:, None]
    high = masked(byte, 0xF0, 0x49000000) - (524288.0 + zero)[:, None]
    return gl.join((low * scale[:, None]).to(DTYPE), (high * scale[:, None]).to(DTYPE))


@gluon.jit
def _e2m1(held, words, multiplier, DTYPE: gl.constexpr, OUTPUTS: gl.constexpr):
    """Decode bytes to pairs of weights, by the rule of ``kernels/gemm/nvfp4.py``; in bf16 ``1 / SMALLER`` of them."""
    OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
    GROUPS: gl.constexpr = BY_GROUP if OUTPUTS == WIDE else BY_GROUP_32
    RAISED: gl.constexpr = 2.0**126 / SMALLER if DTYPE == gl.bfloat16 else 1.0
    s0, s1, s2, s3 = e4m3_products(words, (multiplier * RAISED)[:, None], DTYPE)
    scale = gl.reshape(gl.join(gl.join(s0, s2), gl.join(s1, s3)), [OUTPUTS, PIECE // 16])
    scale = gl.convert_layout(scale, gl.SliceLayout(2, GROUPS))
    byte = gl.reshape(held.load(OF_BYTES).to(gl.int32), [OUTPUTS, PIECE // 16, 8])
    low, high = e2m1_products(gl.convert_layout(byte, GROUPS), scale[:, :, None], DTYPE)
    return gl.join(low, high)


@gluon.jit
def decode_piece(held, scale, zero, multiplier, NVFP4: gl.constexpr, DTYPE: gl.constexpr, DOT: gl.constexpr,
                 OUTPUTS: gl.constexpr):  # fmt: skip
    """Decode a piece [OUTPUTS, PIECE / 2] to registers. With 32 outputs every other eight rows are zeros."""
    if NVFP4:  # noqa: SIM108
        values = _e2m1(held, scale, multiplier, DTYPE, OUTPUTS)
    else:
        values = _integers(held, scale, zero, DTYPE, OUTPUTS)
    values = gl.reshape(values, [OUTPUTS, PIECE])
    if OUTPUTS < WIDE:
        both = gl.reshape(gl.join(values, gl.zeros_like(values)), [OUTPUTS // 8, 8, PIECE, 2])
        values = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [WIDE, PIECE])
    return gl.convert_layout(values, DOT)


@gluon.jit
def valid_sums(acc, NVFP4: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr):
    """The sums [OUTPUTS, ROWS] of outputs in acc [WIDE, ROWS]: see :func:`decode_piece`."""
    if NVFP4 and DTYPE == gl.bfloat16:
        acc = acc * SMALLER
    if OUTPUTS == WIDE:
        return acc
    else:
        own, _ = gl.split(gl.permute(gl.reshape(acc, [OUTPUTS // 8, 2, 8, ROWS]), [0, 2, 3, 1]))
        return gl.reshape(own, [OUTPUTS, ROWS])


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
def _multiply(x, w, full, free, sums, turns, scales, zeros, bias, residual, out, M, N, K, GROUP: gl.constexpr, first,
              token0, pieces, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
              STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
              OVERLAP: gl.constexpr):  # fmt: skip
    """Decode, multiply, sum and store. The part of four warps, where no others take turns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = out.dtype.element_ty
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    rows, multiplier = _rows(zeros, first, N, NVFP4, OUTPUTS)
    r = load_residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, OUTPUTS, OUTPUTS)
    s0, z0 = load_group(scales, zeros, rows, 0, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    s1, z1 = load_group(scales, zeros, rows, 1, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    mbarrier.wait(full.index(0), 0)
    a = decode_piece(w.index(0), s0, z0, multiplier, NVFP4, DTYPE, DOT, OUTPUTS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for piece in range(1, pieces):
        product = piece_product(a, x, stage, acc, DOT)
        s2, z2 = load_group(scales, zeros, rows, piece + 1, GROUP, K, NVFP4, HAS_ZEROS, OUTPUTS)
        behind = stage
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        a = decode_piece(w.index(stage), s1, z1, multiplier, NVFP4, DTYPE, DOT, OUTPUTS)
        if OUTPUTS < WIDE:  # alone on a multiprocessor; the compiler would put the decoding off until the product ends
            acc, a = warpgroup_mma_wait(0, [product, a])
        else:
            acc = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(free.index(behind))
        s1, z1 = s2, z2
    acc = valid_sums(warpgroup_mma_wait(0, [piece_product(a, x, stage, acc, DOT)]), NVFP4, DTYPE, ROWS, OUTPUTS)
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
