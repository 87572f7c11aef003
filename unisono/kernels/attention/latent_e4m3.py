"""Latent attention over e4m3 pages: the walk of ``latent_kernels`` where latents are e4m3 and rotated parts are not.

Device functions for ``kernels/attention/latent_kernels.py``. A latent is a row of ``kernels/cache/kv_e4m3.py``, with a
power of two as its scale; the part of a key that rotates keeps the model's dtype. As in ``kernels/attention/e4m3.py``,
two elements are one 16-bit *pair*, products over latents are those of float16 (fp32 for a float32 model), and scores
and weights are scaled in place of latents. Every pass has this walk, so the bits are those of any other pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unisono.kernels.attention.e4m3 import RAISED, _halves, _merge_halves, end_split, factors
from unisono.kernels.attention.split import find_keys, hide, nothing, weigh


@triton.jit
def begin_latents(q, COLUMNS: tl.constexpr):
    """Queries [ROWS, DIM] as two halves, and an empty state of COLUMNS values as two halves."""
    ROWS: tl.constexpr = q.shape[0]
    HALF: tl.constexpr = q.shape[1] // 2
    if q.dtype != tl.float32:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    m, z, half = nothing(ROWS, COLUMNS // 2)
    return tl.split(tl.reshape(q, [ROWS, HALF, 2])), m, z, (half, half)


@triton.jit
def _pairs(
    cache_ptr, pages_ptr, start, end, page_stride, SIZE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Positions of a step's keys, the mask of those that are there, and SIZE of DIM columns of their rows."""
    keys, known, offset = find_keys(pages_ptr, start, end, FIRST, page_stride, SIZE, DIM, PAGE, KEYS, FIRST > 0, MASKED)
    valid = (tl.arange(0, DIM) < SIZE)[None, :]
    if MASKED:
        valid = valid & known[:, None]
    return keys, known, tl.load(cache_ptr + offset, mask=valid, other=0)


@triton.jit
def walk_latents(
    q, q_rope, position, pages_ptr, cache_ptr, rope_ptr, scales_ptr, column, page_stride, rope_stride, begin, end,
    scale, m, z, acc,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    FIRST: tl.constexpr, MASKED: tl.constexpr, workspace,
):  # fmt: skip
    """Attend keys ``begin … end`` as ``latent_kernels._latent_walk``. q and acc are halves: even elements, odd ones.

    A key's two products are added in fp32: the latent's times its scale, then the rotated part's. A weight, which is a
    float16 number up to 1, is multiplied by its value's scale and by RAISED, which is exact.
    """
    q_even, q_odd = q
    ROWS: tl.constexpr = q_even.shape[0]
    DIM: tl.constexpr = q_even.shape[1]  # pairs of a row
    COLUMNS: tl.constexpr = acc[0].shape[1]  # pairs of the values of this program
    dtype: tl.constexpr = q_even.dtype
    ones = tl.full([KEYS, 8], 1.0, dtype)
    exponents = scales_ptr, scales_ptr, PAGE // 4
    part_m, _, even = nothing(ROWS, COLUMNS)
    odd, part_z = even, tl.zeros([ROWS, 8], tl.float32)  # eight equal columns
    for start in tl.range(begin, end, KEYS):
        if start % SPLIT == 0 and start > begin:  # a split is complete; the last one is merged below
            split = start // SPLIT - 1
            m, z, acc = end_split(m, z, acc, part_m, tl.max(part_z, 1), even, odd, split, LATENT, workspace)
            part_m, _, even = nothing(ROWS, COLUMNS)
            odd, part_z = even, tl.zeros([ROWS, 8], tl.float32)
        keys, known, pairs = _pairs(
            cache_ptr, pages_ptr, start, end, page_stride, LATENT // 2, DIM, PAGE, KEYS, FIRST, MASKED
        )
        _keys, _known, rope = _pairs(
            rope_ptr, pages_ptr, start, end, rope_stride, ROPE, q_rope.shape[1], PAGE, KEYS, FIRST, MASKED
        )
        k_factor, v_factor = factors(exponents, pages_ptr, start, FIRST, end, known, PAGE, KEYS, MASKED)
        k_even, k_odd = _halves(pairs, dtype)
        v_even, v_odd = k_even, k_odd
        if COLUMNS < DIM:
            _too, _also, some = find_keys(
                pages_ptr, start, end, FIRST, page_stride, LATENT // 2, COLUMNS, PAGE, KEYS, FIRST > 0, MASKED
            )
            if MASKED:
                of_values = tl.load(cache_ptr + column // 2 + some, mask=known[:, None] & (some >= 0), other=0)
            else:
                of_values = tl.load(cache_ptr + column // 2 + some)
            v_even, v_odd = _halves(of_values, dtype)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee") * k_factor[None, :]
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = hide(scores, keys, position, 0, False, FIRST, MASKED, 0.0)
        part_m, p, shrink = weigh(scores, scale, part_m, dtype)
        part_z = tl.dot(p, ones, part_z * shrink, input_precision="ieee")
        p = p * (v_factor * RAISED).to(dtype)[None, :]
        even = tl.dot(p, v_even, even * shrink, input_precision="ieee")
        odd = tl.dot(p, v_odd, odd * shrink, input_precision="ieee")
    return _merge_halves(m, z, acc, part_m, tl.max(part_z, 1), even, odd)
