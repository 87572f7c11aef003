"""Keys and values as e4m3: one power of two as scale for each token and KV head, of keys and of values apart.

Owns the number format of an fp8 KV cache: device functions for the kernels that write and read it, and the same in
torch for their CPU twins. ``kernels/rotary.py`` writes rows, ``kernels/attention.py`` reads them.

A row x of D elements, rounded to the model's dtype, is stored as D e4m3 numbers and one byte: the exponent e of its
scale s = 2^e, biased by 127 as in e8m0. e is the smallest one with max|x| / s ≤ 448, within ``exponents(dtype)``; a row
of zeros has e = 0. Elements are x / s, which is exact in fp32, rounded to nearest even. So a row depends on its own
token alone: batches, chunks, drafts and cached prefixes change no byte.

An e4m3 number times 2^e has four significant bits and, within these exponents, lies in the normal range of bfloat16 and
float32, or on the grid of float16. So the *dequantised* row is exact in the model's dtype, and attention over an fp8
cache is attention over a cache of the model's dtype that holds the dequantised rows. A kernel may also scale scores in
place of keys: a power of two scales a key's products and each partial sum of them without a rounding, as long as fp32
neither overflows nor leaves its normal range. Values differ in scale along the sum, so they are scaled before the
product. Our kernels scale both tiles, which costs nothing: an e4m3 number is moved into the bits of a wider one and
multiplied by a power of two anyway, for the exponents' biases differ.

Magnitudes beyond 448 · 2^7 = 57344 become that number. A row with an infinity or NaN has the exponent 255, which is
e8m0's NaN, and is read as infinities and NaN.

Sources: e4m3 as in OCP's 8-bit floating point specification, exponents as in its microscaling formats (e8m0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.fp8_quantize import E4M3, LARGEST

BIAS = 127
"""Added to an exponent where it is stored."""

NOT_FINITE = 255
"""The stored exponent of a row that is not finite."""


def exponents(dtype: torch.dtype) -> tuple[int, int]:
    """The lowest and the highest exponent of a scale, for models of this dtype.

    An e4m3 number is a multiple of 2^-9 and below 2^9. float16 holds multiples of 2^-24 below 2^16; the others hold
    four significant bits from 2^-126 on. The highest one keeps the factor of :func:`e4m3_tile` finite.
    """
    return (-15, 7) if dtype == torch.float16 else (-117, 7)


# ---- for kernels ------------------------------------------------------------------------------------


@triton.jit
def largest_bits(x):
    """The largest magnitude of each row of x [rows, columns] fp32, as the bits of an fp32 number [rows] int32."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def exponent_of(bits, dtype: tl.constexpr):
    """The biased exponent int32 of a row whose largest magnitude has these ``bits``; dtype: the model's.

    A magnitude m · 2^E is at most 448 = 1.75 · 2^8 over 2^(E - 8) where m ≤ 1.75, else over 2^(E - 7): what is above
    1.75 carries into the exponent.
    """
    LOW: tl.constexpr = -15 if dtype == tl.float16 else -117
    power = tl.minimum(tl.maximum(((tl.minimum(bits, 0x7F800000) + 0x1FFFFF) >> 23) - 135, LOW), 7)
    return tl.where(bits >= 0x7F800000, 255, tl.where(bits == 0, 0, power) + 127)


@triton.jit
def as_e4m3(x, exponent, dtype: tl.constexpr):
    """Rows x [rows, columns] fp32 over their scales as ``dtype``, which is e4m3; exponent [rows], biased."""
    scaled = x * (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)[:, None]
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def e4m3_tile(words, factor, dtype: tl.constexpr):
    """Dequantise rows of e4m3 numbers, four in each of words [rows, D / 4] int32 -> [rows, D] of ``dtype``.

    factor [rows]: :func:`e4m3_factor` of their exponents. Sign, exponent and mantissa of e4m3 in the places of those of
    a wider number are the value times a power of two, subnormals too.

    The maximum over one element changes nothing, but the compiler looks for a tile's loads no further: it would find
    narrow elements and feed the tensor core in an order that suits their loads, and sums would have other bits than
    those of 16-bit pages. ``tests/kernels/test_aot.py`` looks at the compiled kernels.
    """
    ROWS: tl.constexpr = words.shape[0]
    SIZE: tl.constexpr = words.shape[1] * 4
    words = words.to(tl.uint32, bitcast=True)
    if dtype == tl.float32:
        a, b = _moved(words << 24, words << 20, 0x07F00000), _moved(words << 16, words << 12, 0x07F00000)
        c, d = _moved(words << 8, words << 4, 0x07F00000), _moved(words, words >> 4, 0x07F00000)
    else:  # two at a time
        REST: tl.constexpr = 7 if dtype == tl.float16 else 4
        MASK: tl.constexpr = 0x3F803F80 if dtype == tl.float16 else 0x07F007F0
        even, odd = _moved(words << 8, words << REST, MASK), _moved(words, words >> (8 - REST), MASK)
        a, b, c, d = even.to(tl.uint16), odd.to(tl.uint16), (even >> 16).to(tl.uint16), (odd >> 16).to(tl.uint16)
    wide = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, SIZE, 1])
    wide = tl.reduce(wide, 2, tl.standard._elementwise_max)
    return wide.to(dtype, bitcast=True) * factor[:, None]


@triton.jit
def _moved(sign, rest, MASK: tl.constexpr):
    """Signs, and exponents and mantissas, in their places. MASK: of the latter; signs are the bits above halves."""
    SIGNS: tl.constexpr = 0x80000000 if MASK == 0x07F00000 else 0x80008000
    return (sign & SIGNS) | (rest & MASK)


@triton.jit
def e4m3_factor(exponent, dtype: tl.constexpr):
    """What :func:`e4m3_tile` multiplies by: 2^e times the powers of two between the biases. exponent: biased, int32."""
    BETWEEN: tl.constexpr = 8 if dtype == tl.float16 else 120
    return (tl.minimum(exponent + BETWEEN, 255) << 23).to(tl.float32, bitcast=True).to(dtype)


# ---- for CPU twins ----------------------------------------------------------------------------------


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of the model's dtype -> e4m3 [..., D] and biased exponents uint8 [..., 1]."""
    low, high = exponents(rows.dtype)
    values = rows.float()
    bits = (values.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    power = (((bits.clamp(max=0x7F800000) + 0x1FFFFF) >> 23) - 135).clamp(low, high)
    exponent = power.masked_fill(bits == 0, 0).add(BIAS).masked_fill(bits >= 0x7F800000, NOT_FINITE)
    scaled = values * _power_of_two((2 * BIAS - exponent).clamp(min=0))
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3), exponent.to(torch.uint8)


def dequantised(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows [..., D] as fp32. scales: their exponents uint8 [..., 1]; None: the rows are no e4m3 ones."""
    return rows.float() if scales is None else rows.float() * _power_of_two(scales)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^e as fp32, from biased exponents; infinite for NOT_FINITE."""
    return (exponent.int() << 23).view(torch.float32)
