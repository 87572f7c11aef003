"""Attention over e4m3 pages: reading their tiles, and the walk of a query tile with few rows.

Device functions for ``kernels/attention/triton_kernels.py``; ``kernels/cache/kv_e4m3.py`` owns the number format.
Products are those of float16, in which a dequantised row is exact (fp32 for a float32 model). Two elements of a row
are one 16-bit element of memory, a *pair*, for two reasons: the tensor core's operands are fed from such elements in
one order everywhere, and values, which are transposed on the way, can be read from shared memory no other way. So a
tile is split into its even and odd elements, and sums over a head's elements take the even ones first.

Tiles with many rows dequantise keys and values before the product (:func:`side_by_side`). Tiles with few rows, as in
rounds, scale scores and weights instead, of which they have fewer. Both give the same bits: every scale is a power of
two, and nothing that is scaled leaves the exact range of its type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.attention.split import find_keys, hide, keep, merge, nothing, tiles, weigh
from unisono.kernels.cache.kv_e4m3 import LOWEST
from unisono.kernels.library import COMPILED

RAISED = tl.constexpr(2.0**-LOWEST)
"""Factor of weights beside their value's scale: the lowest scale then makes no weight smaller."""


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Split rows of pairs [ROWS, D / 2] int16 into even and odd elements of ``dtype``, without their scales.

    Compiled code permutes bytes and converts two elements at once.
    """
    if COMPILED and dtype == tl.float16:
        even, odd = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 both;
                .reg .b16 even, odd;
                prmt.b32 both, $2, 0, 0x3120;
                mov.b32 {even, odd}, both;
                cvt.rn.f16x2.e4m3x2 $0, even;
                cvt.rn.f16x2.e4m3x2 $1, odd;
            }
            """,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        even = low.to(tl.float8e4nv, bitcast=True).to(dtype)
        odd = high.to(tl.float8e4nv, bitcast=True).to(dtype)
    return even, odd


@triton.jit
def side_by_side(pairs, factor, dtype: tl.constexpr):
    """Dequantise rows of pairs [KEYS, D / 2] -> [KEYS, D] of ``dtype``, even elements, then odd ones. factor [KEYS]."""
    even, odd = _halves(pairs, dtype)
    factor = factor.to(dtype)[:, None]
    both = tl.join(even * factor, odd * factor)
    return tl.reshape(tl.permute(both, (0, 2, 1)), [pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def factors(
    scales, pages_ptr, start, low, end, known, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scales of the e4m3 keys and values from ``start`` on: [KEYS] fp32 each.

    scales: pointers to the exponents of keys and of values, four bytes a word, and the words of a page. A step's words
    are prefetched like its keys and values; single bytes would not be. Whole words are read: MASKED, a value that
    is not ``known`` has the scale 0, for a stale one could be infinite; a score that is not seen is replaced anyway.
    """
    k_ptr, v_ptr, stride = scales
    key = start + tl.arange(0, KEYS // 4) * 4
    present = (key < end) & (key + 4 > low)
    key = key.to(tl.uint32)
    page = tl.load(pages_ptr + key // PAGE, mask=present, other=0).to(tl.uint32)
    at = page.to(tl.uint64) * stride + key % PAGE // 4
    k_words, v_words = tl.load(k_ptr + at, mask=present, other=0), tl.load(v_ptr + at, mask=present, other=0)
    k_bits, v_bits = _scale_bits(k_words, KEYS), _scale_bits(v_words, KEYS)
    if MASKED:
        v_bits = tl.where(known, v_bits, 0)
    return k_bits.to(tl.float32, bitcast=True), v_bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits(words, KEYS: tl.constexpr):
    """Convert biased exponents, four per word [KEYS / 4], to the bits of fp32 powers of two."""
    exponents = (words[:, None] >> (tl.arange(0, 4) * 8)[None, :]) & 0xFF
    return tl.reshape(exponents << 23, [KEYS])


@triton.jit
def begin_e4m3(q, FEW: tl.constexpr):
    """Queries [ROWS, DIM] in the form of :func:`walk_halves` (FEW) or ``_walk``, and an empty state."""
    ROWS: tl.constexpr = q.shape[0]
    HALF: tl.constexpr = q.shape[1] // 2
    if q.dtype != tl.float32:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    pairs = tl.reshape(q, [ROWS, HALF, 2])
    if FEW:
        m, z, half = nothing(ROWS, HALF)
        begun, acc = tl.split(pairs), (half, half)
    else:
        m, z, acc = nothing(ROWS, 2 * HALF)
        begun = tl.reshape(tl.permute(pairs, (0, 2, 1)), [ROWS, 2 * HALF])
    return begun, m, z, acc


@triton.jit
def _interleaved(even, odd):
    """Concatenate two halves [ROWS, D / 2] into [ROWS, D]."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def finish_e4m3(acc, FEW: tl.constexpr):
    """Return a walk's accumulated values [ROWS, DIM] in the order of a head's elements."""
    return _interleaved(acc[0], acc[1]) if FEW else in_order(acc)


@triton.jit
def in_order(acc):
    """Restore the order of columns [ROWS, DIM] that have the even ones first."""
    ROWS: tl.constexpr = acc.shape[0]
    DIM: tl.constexpr = acc.shape[1]
    return tl.reshape(tl.permute(tl.reshape(acc, [ROWS, 2, DIM // 2]), (0, 2, 1)), [ROWS, DIM])


@triton.jit
def _merge_halves(m, z, acc, m1, z1, even, odd):
    """Merge a later split's state, whose values are RAISED, into an earlier one's; values are two halves."""
    lower = 1.0 / RAISED
    _, _, merged = merge(m, z, acc[0], m1, z1, even * lower)
    top, z, other = merge(m, z, acc[1], m1, z1, odd * lower)
    return top, z, (merged, other)


@triton.jit
def end_split(m, z, acc, m1, z1, even, odd, split, SIZE: tl.constexpr, workspace):
    """Keep a complete split's state in the workspace if there is one, or merge it; return the walk's state.

    even, odd: values of the split, times RAISED. SIZE: values of a row.
    """
    if workspace is None:
        m, z, acc = _merge_halves(m, z, acc, m1, z1, even, odd)
    elif workspace[-1] > 0:
        keep(workspace, split, m1, z1, _interleaved(even, odd) * (1.0 / RAISED), SIZE)
    else:
        m, z, acc = _merge_halves(m, z, acc, m1, z1, even, odd)
    return m, z, acc


@triton.jit
def walk_halves(
    q, position, pages_ptr, k_ptr, v_ptr, scales, page_stride, begin, end, low, window, scale, m, z, acc,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr, TO_CAP: tl.constexpr, workspace,
):  # fmt: skip
    """Walk KV splits like ``triton_kernels._walk``, for few rows: q and acc are halves, scores and weights are scaled.

    A score is multiplied by its key's scale, in fp32. A weight, which is a float16 number up to 1, is multiplied by its
    value's scale and by RAISED: from 1 to 2^15, so the product is exact in float16.
    """
    q_even, q_odd = q
    ROWS: tl.constexpr = q_even.shape[0]
    HALF: tl.constexpr = q_even.shape[1]
    dtype: tl.constexpr = q_even.dtype
    dims = tl.arange(0, HALF)
    ones = tl.full([KEYS, 8], 1.0, dtype)
    part_m, _, even = nothing(ROWS, HALF)
    odd, part_z = even, tl.zeros([ROWS, 8], tl.float32)  # eight equal columns
    for start in tl.range(begin, end, KEYS):
        if start % SPLIT == 0 and start > begin:
            split = start // SPLIT - 1
            m, z, acc = end_split(m, z, acc, part_m, tl.max(part_z, 1), even, odd, split, HEAD_DIM, workspace)
            part_m, _, even = nothing(ROWS, HALF)
            odd, part_z = even, tl.zeros([ROWS, 8], tl.float32)
        keys, known, offset = find_keys(
            pages_ptr, start, end, low, page_stride, HEAD_DIM // 2, HALF, PAGE, KEYS, WINDOW or FIRST > 0, MASKED
        )
        k, v = tiles(k_ptr, v_ptr, offset, known, dims, HEAD_DIM // 2, MASKED)
        k_factor, v_factor = factors(scales, pages_ptr, start, low, end, known, PAGE, KEYS, MASKED)
        k_even, k_odd = _halves(k, dtype)
        v_even, v_odd = _halves(v, dtype)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee") * k_factor[None, :]
        scores = hide(scores, keys, position, window, WINDOW, FIRST, MASKED, TO_CAP)
        part_m, p, shrink = weigh(scores, scale, part_m, dtype)
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        p = p * (v_factor * RAISED).to(dtype)[None, :]
        even = tl.dot(p, v_even, even * shrink, input_precision="ieee")
        odd = tl.dot(p, v_odd, odd * shrink, input_precision="ieee")
    return _merge_halves(m, z, acc, part_m, tl.max(part_z, 1), even, odd)
