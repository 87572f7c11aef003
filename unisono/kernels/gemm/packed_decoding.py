"""Decoding of 4-bit weights to registers on Hopper, in the layout of wgmma's left operand.

Four warps have a piece of the weight: 64 outputs of :data:`PIECE` inputs, or 32 outputs, where half of the operand's
rows are zeros. Integers are decoded in fp32. NVFP4 weights are products of two 16-bit numbers, by the rule of
``kernels/gemm/nvfp4.py``, so one instruction makes two of them.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

WIDE = gl.constexpr(64)
"""Rows of one ``wgmma``: outputs of a program, or twice as many."""

PIECE = gl.constexpr(128)
"""Inputs of a piece of the weight, 64 bytes of an output."""

NVFP4_GROUP = 16
"""Inputs of NVFP4 that share a scale; no group of integers is as small."""

SMALLER = gl.constexpr(256.0)
"""Quotient of NVFP4 weights in bf16 and their decoded numbers, so that scales below 1,020 stay within bf16's range."""

RAISED = gl.constexpr(2.0**126 / SMALLER.value)
"""Factor of NVFP4 scales in bf16: see :func:`e2m1_products`, and SMALLER."""

_SCALES = """
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
    cvt.rn.DTYPE.f32 $0, f, f;
    cvt.f32.f16 f, b;
    mul.rn.f32 f, f, $5;
    cvt.rn.DTYPE.f32 $1, f, f;
    cvt.f32.f16 f, c;
    mul.rn.f32 f, f, $5;
    cvt.rn.DTYPE.f32 $2, f, f;
    cvt.f32.f16 f, d;
    mul.rn.f32 f, f, $5;
    cvt.rn.DTYPE.f32 $3, f, f;
}
"""
_SCALES_BF16 = gl.constexpr(_SCALES.replace("DTYPE", "bf16x2"))
_SCALES_FP16 = gl.constexpr(_SCALES.replace("DTYPE", "f16x2"))

_WEIGHTS_BF16 = gl.constexpr("""
{
    .reg .b32 size, sign;
    mul.lo.u32 size, $2, 0x00040040;
    mul.lo.u32 sign, $2, 0x01001000;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 size, size, $3;
    mov.b32 {$0, $1}, size;
}
""")
_WEIGHTS_FP16 = gl.constexpr("""
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
""")

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
"""Layout of a piece's bytes with 32 outputs: each warp has eight, in every other eight rows of the left operand."""

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
    code: gl.constexpr = _SCALES_BF16 if gl.bfloat16 == DTYPE else _SCALES_FP16
    return gl.inline_asm_elementwise(
        code, "=&r,=&r,=&r,=&r,r,f", [word, multiplier], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def e2m1_products(byte, scale, DTYPE: gl.constexpr):
    """Multiply both numbers of a byte by the halves of ``scale``: DTYPE, rounded once.

    Exponent and mantissa of e2m1 go to the places of those of DTYPE, which makes of a number its 2 ** -126 (bf16) or
    2 ** -14 (fp16). Multiplications put them there, because shifts and masks run on another unit, at half of the rate.
    The factor of bf16 is in ``scale``; that of fp16 is not, because scales from 4 on would leave fp16's range.
    """
    if gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(
            _WEIGHTS_BF16, "=h,=h,r,r", [byte, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            _WEIGHTS_FP16, "=h,=h,r,r", [byte, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return low, high


@gluon.jit
def of_scales(NVFP4: gl.constexpr, OUTPUTS: gl.constexpr):
    """Outputs of the program, 0 … OUTPUTS - 1, in the layout of :func:`load_group`."""
    OF_WORDS: gl.constexpr = WORDS if OUTPUTS == WIDE else WORDS_32
    OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
    return gl.arange(0, OUTPUTS, gl.SliceLayout(1, OF_WORDS if NVFP4 else OF_BYTES))


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
def integer_pairs(byte, scale, zero, DTYPE: gl.constexpr):
    """Decode bytes [OUTPUTS, any] to ``(q - zero) * scale``, as ``integers_decoded`` of ``kernels/gemm/decoded.py``."""
    low = masked(byte, 0x0F, 0x4B000000) - (8388608.0 + zero)[:, None]
    high = masked(byte, 0xF0, 0x49000000) - (524288.0 + zero)[:, None]
    return (low * scale[:, None]).to(DTYPE), (high * scale[:, None]).to(DTYPE)


@gluon.jit
def _e2m1(held, words, multiplier, DTYPE: gl.constexpr, OUTPUTS: gl.constexpr):
    """Decode bytes to pairs of weights, by the rule of ``kernels/gemm/nvfp4.py``; in bf16 ``1 / SMALLER`` of them."""
    OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
    GROUPS: gl.constexpr = BY_GROUP if OUTPUTS == WIDE else BY_GROUP_32
    raised = multiplier * (RAISED if gl.bfloat16 == DTYPE else 1.0)
    s0, s1, s2, s3 = e4m3_products(words, raised[:, None], DTYPE)
    scale = gl.reshape(gl.join(gl.join(s0, s2), gl.join(s1, s3)), [OUTPUTS, PIECE // 16])
    scale = gl.convert_layout(scale, gl.SliceLayout(2, GROUPS))
    byte = gl.reshape(held.load(OF_BYTES).to(gl.int32), [OUTPUTS, PIECE // 16, 8])
    low, high = e2m1_products(gl.convert_layout(byte, GROUPS), scale[:, :, None], DTYPE)
    return gl.join(low, high)


@gluon.jit
def decode_piece(held, scale, zero, multiplier, NVFP4: gl.constexpr, DTYPE: gl.constexpr, DOT: gl.constexpr,
                 OUTPUTS: gl.constexpr):  # fmt: skip
    """Decode a piece [OUTPUTS, PIECE / 2] to registers. With 32 outputs every other eight rows are zeros."""
    if NVFP4:
        values = _e2m1(held, scale, multiplier, DTYPE, OUTPUTS)
    else:
        OF_BYTES: gl.constexpr = BYTES if OUTPUTS == WIDE else BYTES_32
        low, high = integer_pairs(held.load(OF_BYTES).to(gl.int32), scale, zero, DTYPE)
        values = gl.join(low, high)
    values = gl.reshape(values, [OUTPUTS, PIECE])
    if OUTPUTS < WIDE:
        both = gl.reshape(gl.join(values, gl.zeros_like(values)), [OUTPUTS // 8, 8, PIECE, 2])
        values = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [WIDE, PIECE])
    return gl.convert_layout(values, DOT)


@gluon.jit
def valid_sums(acc, NVFP4: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr):
    """The sums [OUTPUTS, ROWS] of outputs in acc [WIDE, ROWS]: see :func:`decode_piece` and SMALLER."""
    if NVFP4 and gl.bfloat16 == DTYPE:
        acc = acc * SMALLER
    if OUTPUTS == WIDE:
        return acc
    else:
        own, _ = gl.split(gl.permute(gl.reshape(acc, [OUTPUTS // 8, 2, 8, ROWS]), [0, 2, 3, 1]))
        return gl.reshape(own, [OUTPUTS, ROWS])
