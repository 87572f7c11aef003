"""Keys and values in e4m3, with a power of two as scale per token and KV head, separate for keys and values.

Owns the number format of an fp8 KV cache: device functions for the kernel that writes it, and the same in torch for
CPU twins. ``kernels/cache/rotary.py`` writes rows, ``kernels/attention/e4m3.py`` reads them.

A row x of D elements, rounded to the model's dtype, is stored as D e4m3 numbers and one byte: the exponent e of its
scale s = 2^e, biased by 127 as in e8m0. e is the smallest one with max|x| / s ≤ 448, within LOWEST … HIGHEST; a row of
zeros has e = 0. Elements are x / s, which is exact in fp32, rounded to nearest even. So a row depends on its own token
alone: batches, chunks, drafts and cached prefixes change no byte.

With these exponents a *dequantised* row is exact in float16: it consists of multiples of 2^-21 up to 3584. Attention
over e4m3 pages is attention in float16 over pages that hold the dequantised rows. There are no more than 16 exponents
because a kernel may scale a weight instead of its value: a float16 number up to 1 is a multiple of 2^-24, and times
2^0 … 2^15 it is still exact. Magnitudes beyond 3584 become that number. In a row below 448 · 2^LOWEST = 0.11 the
largest element keeps its four significant bits down to 4e-6. A row with an infinity or NaN has the exponent 255, which
is e8m0's NaN, and is read as infinities and NaN.

Sources: e4m3 as in OCP's 8-bit floating point specification, exponents as in its microscaling formats (e8m0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import E4M3, LARGEST

BIAS = 127
"""Bias of stored exponents."""

NOT_FINITE = 255
"""Stored exponent of a row that is not finite."""

LOWEST, HIGHEST = -12, 3
"""Range of the exponents of scales."""

_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)


# ---- for kernels ------------------------------------------------------------------------------------


@triton.jit
def largest_bits(x):
    """Largest magnitude of each row of x [rows, columns] fp32, as the bits of an fp32 number: [rows] int32."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def exponent_of(bits):
    """Biased exponent int32 of a row whose largest magnitude has these ``bits``.

    A magnitude m · 2^E is at most 448 = 1.75 · 2^8 over 2^(E - 8) where m ≤ 1.75, else over 2^(E - 7): the part above
    1.75 carries into the exponent.
    """
    power = ((tl.minimum(bits, 0x7F800000) + 0x1FFFFF) >> 23) - 135
    power = tl.minimum(tl.maximum(power, _LOWEST), _HIGHEST)
    return tl.where(bits >= 0x7F800000, 255, tl.where(bits == 0, 0, power) + 127)


@triton.jit
def as_e4m3(x, exponent, dtype: tl.constexpr):
    """Divide rows x [rows, columns] fp32 by their scales and convert to ``dtype``, e4m3. exponent [rows]: biased."""
    scaled = x * (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)[:, None]
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


# ---- for CPU twins ----------------------------------------------------------------------------------


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [..., D] of the model's dtype to e4m3 [..., D] and biased exponents uint8 [..., 1]."""
    values = rows.float()
    bits = (values.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    power = (((bits.clamp(max=0x7F800000) + 0x1FFFFF) >> 23) - 135).clamp(LOWEST, HIGHEST)
    exponent = power.masked_fill(bits == 0, 0).add(BIAS).masked_fill(bits >= 0x7F800000, NOT_FINITE)
    scaled = values * _power_of_two((2 * BIAS - exponent).clamp(min=0))
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3), exponent.to(torch.uint8)


def dequantised(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Convert rows [..., D] to fp32. scales: exponents uint8 [..., 1] of e4m3 rows; None: the rows are not
    quantised.
    """
    return rows.float() if scales is None else rows.float() * _power_of_two(scales)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Convert biased exponents e to 2^e in fp32; infinite for NOT_FINITE."""
    return (exponent.int() << 23).view(torch.float32)
