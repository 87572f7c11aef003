"""Shared parts of all walks over paged KV: the state of a split, the merge of states, a step's addresses and weights.

Device functions for ``kernels/attention/triton_kernels.py`` and ``kernels/attention/e4m3.py``. A state is (row max, row
sum, weighted values): m [ROWS], z [ROWS], acc [ROWS, DIM], fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge(m, z, acc, m1, z1, acc1):
    """Merge a later split's (row max, row sum, weighted values) into an earlier one's. All kernels use this formula."""
    top = tl.maximum(m, m1)
    finite = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - finite), tl.exp2(m1 - finite)
    return top, tl.fma(z, old, z1 * new), tl.fma(acc, old[:, None], acc1 * new[:, None])


@triton.jit
def nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """State of rows that have seen no key: max -inf, sum 0, values 0."""
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    return lowest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def values(index, in_use, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Offsets and mask of the [rows, D] values of rows ``index``."""
    dims = tl.arange(0, DIM)
    return index[:, None] * HEAD_DIM + dims[None, :], in_use[:, None] & (dims < HEAD_DIM)[None, :]


@triton.jit
def keep(workspace, split, m, z, acc, HEAD_DIM: tl.constexpr):
    """Write a split's state to the workspace, at ``index + split · stride`` for each row of a tile."""
    state_ptr, acc_ptr, index, in_use, stride = workspace
    at = index + split * stride
    offset, mask = values(at, in_use, HEAD_DIM, acc.shape[1])
    tl.store(state_ptr + at * 2, m, mask=in_use)
    tl.store(state_ptr + at * 2 + 1, z, mask=in_use)
    tl.store(acc_ptr + offset, acc, mask=mask)


@triton.jit
def tanh(x):
    """Compute tanh(x) in fp32: a polynomial below 0.25, where 1 - exp(-2 |x|) would cancel. No sum can be
    contracted.
    """
    size, square = tl.abs(x), x * x
    term = tl.fma(square, tl.full(x.shape, 62 / 2835, tl.float32), -17 / 315)
    term = tl.fma(square, tl.fma(square, term, 2 / 15), -1 / 3)
    near = tl.fma(size, square * term, size)
    decay = tl.exp2(size * (-2 * LOG2_E))
    result = tl.where(size < 0.25, near, (1.0 - decay) / (1.0 + decay))
    return tl.where(x < 0, -result, result)


@triton.jit
def tiles(k_ptr, v_ptr, offset, known, dims, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load tiles of keys and values [KEYS, columns]: zeros where a key is not ``known`` and from column SIZE on."""
    if MASKED:
        valid = known[:, None] & (dims < SIZE)[None, :]
        k = tl.load(k_ptr + offset, mask=valid, other=0)
        v = tl.load(v_ptr + offset, mask=valid, other=0)
    elif dims.shape[0] == SIZE:
        k = tl.load(k_ptr + offset)
        v = tl.load(v_ptr + offset)
    else:
        k = tl.load(k_ptr + offset, mask=(dims < SIZE)[None, :], other=0)
        v = tl.load(v_ptr + offset, mask=(dims < SIZE)[None, :], other=0)
    return k, v


@triton.jit
def find_keys(
    pages_ptr, start, end, low, page_stride, SIZE: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Positions of a step's keys [KEYS], the mask of those below ``end`` (BOUNDED: and from ``low`` on), row offsets.

    Offsets [KEYS, DIMS] are of rows of SIZE elements. Unsigned positions need fewer instructions.
    """
    keys = start + tl.arange(0, KEYS)
    known = keys < end
    if BOUNDED:
        known &= keys >= low
    at = keys.to(tl.uint32)
    page = tl.load(pages_ptr + at // PAGE, mask=known, other=0) if MASKED else tl.load(pages_ptr + at // PAGE)
    row = page.to(tl.uint32).to(tl.uint64) * page_stride.to(tl.uint32) + at % PAGE * SIZE
    return keys, known, row[:, None] + tl.arange(0, DIMS).to(tl.uint32)[None, :]


@triton.jit
def hide(
    scores, keys, position, window, WINDOW: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr,
    TO_CAP: tl.constexpr,
):  # fmt: skip
    """Soft-cap scores [ROWS, KEYS] and mask the keys that rows do not see."""
    if TO_CAP > 0:
        scores = tanh(scores * TO_CAP)
    if MASKED:
        visible = keys[None, :] <= position[:, None]
        if WINDOW:
            visible &= keys[None, :] > position[:, None] - window
        if FIRST > 0:
            visible &= keys[None, :] >= FIRST
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def weigh(scores, scale, part_m, dtype: tl.constexpr):
    """New row maxima, the weights of this step's scores in ``dtype``, and the factor of a split's old sums [ROWS,
    1].
    """
    top = tl.maximum(part_m, tl.max(scores, 1) * scale)
    finite = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(scores, scale, -finite[:, None])).to(dtype)
    return top, p, tl.exp2(part_m - finite)[:, None]
