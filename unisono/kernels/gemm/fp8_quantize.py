"""Quantisation of activations to e4m3 with a scale per row and group of columns. Owns the ``quantize_fp8`` op.

Called by the fp8 products. Kernels whose results such products read quantise them with :func:`store_quantised`: that
saves a launch, and a row's bits are the same. They return a :class:`Quantised`.

A value is divided by its group's scale (an IEEE division in fp32, see :func:`over`), clamped to e4m3's largest value
and rounded to nearest even. The scale is the group's largest magnitude / 448, or one that the checkpoint fixes. Both
depend on the row alone, so they are the same in any batch; the CPU gives the GPU's bits.

For consumers with int8 weights and activations (``kernels/gemm/int8.py``) the same kernels quantise whole rows to int8:
their group is INT8_ROWS.

Shapes: M rows, K columns, G = ceil(K / group) groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.library import COMPILED, AotCase, op
from unisono.kernels.overlap import follow, overlapped, overlapping

E4M3 = torch.float8_e4m3fn

LARGEST = 448.0
"""The largest finite e4m3 value."""

SMALLEST = 1e-10
"""Lower bound of a group's largest magnitude, so that a row of zeros has a scale."""

GROUP = 128
"""Columns that share a scale if weights are scaled by blocks."""

INT8_ROWS = -1
"""``group`` of rows that are quantised to int8, with one scale for all columns."""

ROWS_OF_FOUR = 4
"""Rows are padded to a multiple of this: torch's blockwise product takes no other numbers of rows."""

_COLUMNS = 1024
"""Columns of one program if groups are smaller than that."""


class Quantised(NamedTuple):
    """Quantised activations [M, K], the operand of products with e4m3 weights, or with int8 ones.

    x8 e4m3 [M', K] and scales fp32 [G, M'], M' = M padded to a multiple of four with zeros. group: columns that share a
    scale; 0: all; INT8_ROWS: all, and x8 is int8. rows: M. dtype: of the activations. x [M, K]: the activations
    themselves, if a consumer reads them; else None.
    """

    x8: torch.Tensor
    scales: torch.Tensor
    group: int
    rows: int
    dtype: torch.dtype
    x: torch.Tensor | None = None


def handed_on(pair: Sequence[torch.Tensor], like: torch.Tensor, group: int, x: torch.Tensor | None = None) -> Quantised:
    """Wrap (x8, scales) of as many rows as ``like`` has, in its dtype, as an operand. x: the rows themselves."""
    x8, scales = pair
    return Quantised(x8, scales, group, len(like), like.dtype, x)


@triton.jit
def reciprocal(scale):
    """Compute 1 / scale for :func:`over`, rounded to nearest or, in few cases, to a neighbour of that."""
    rough = 1.0 / scale
    return tl.fma(tl.fma(-scale, rough, 1.0), rough, rough)


@triton.jit
def over(value, scale, inverse):
    """Compute ``value / scale`` with IEEE rounding, for equal shapes or numbers, in Triton and Gluon.

    inverse: :func:`reciprocal` of the scale.

    The scale is a finite one of :func:`scale_for`, so a quotient is LARGEST at most, but for its rounding. There the
    division needs no cases: two corrections of ``value * inverse`` give its bits (Markstein, IBM J. Res. Dev. 34,
    1990). The compiler's division branches for each element, so one waits for the other.
    """
    if COMPILED:
        quotient = value * inverse
        negative, back = value * -1.0, inverse * -1.0  # Triton's minus is 0 - x, which has not the sign of -0
        quotient = tl.fma(tl.fma(scale, quotient, negative), back, quotient)
        return tl.fma(tl.fma(scale, quotient, negative), back, quotient)
    else:
        return tl.div_rn(value, scale)


@triton.jit
def scale_for(largest):
    """Scale of groups with these largest magnitudes."""
    return over(tl.maximum(largest, 1e-10), 448.0, 1.0 / 448.0)


@triton.jit
def scales_of(value):
    """Scales of groups [groups, columns], from their largest magnitudes."""
    return scale_for(tl.max(tl.abs(value), axis=1))


@triton.jit
def scaled_by(value, scale):
    """Divide groups [groups, columns] by their scales and clamp to e4m3's range."""
    inverse = tl.broadcast_to(reciprocal(scale)[:, None], value.shape)
    return _clamped(over(value, tl.broadcast_to(scale[:, None], value.shape), inverse))


@triton.jit
def _clamped(scaled):
    """Clamp to e4m3's range, where the conversion does not: a GPU's does (``cvt.satfinite``)."""
    if COMPILED:
        return scaled
    else:
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0)


@triton.jit
def nearest(value):
    """Round to nearest even; magnitudes are below 2 ** 22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _scaled(value, kind: tl.constexpr):
    """(numbers of groups [groups, columns] in fp32, their scales): for e4m3, or those of ``kernels/gemm/int8.py``."""
    if kind == tl.int8:
        scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-10)
        scale = tl.div_rn(scale, tl.full(scale.shape, 127.0, tl.float32))
        inverse = tl.broadcast_to(reciprocal(scale)[:, None], value.shape)
        scaled = nearest(over(value, tl.broadcast_to(scale[:, None], value.shape), inverse))
    else:
        scale = scales_of(value)
        scaled = scaled_by(value, scale)
    return scaled, scale


@triton.jit
def store_quantised(value, x8, scales, row, first, K, PADDED, GROUP: tl.constexpr):
    """Quantise columns ``first`` … of a row and store them, padding rows too: the bits of :func:`_quantize_kernel`.

    value: rounded to the activations' dtype, 0 beyond K and in padding; as many columns as whole groups have, in any
    shape. first: a multiple of GROUP. With x8 of int8 GROUP is at least K.
    """
    GROUPS: tl.constexpr = value.numel // GROUP
    grouped = tl.reshape(value.to(tl.float32), (GROUPS, GROUP))
    groups = first // GROUP + tl.arange(0, GROUPS)
    cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row.to(tl.int64) * K + cols
    scaled, scale = _scaled(grouped, x8.dtype.element_ty)
    tl.store(x8 + at, scaled.to(x8.dtype.element_ty), mask=cols < K)
    tl.store(scales + groups.to(tl.int64) * PADDED + row, scale, mask=groups * GROUP < K)


@overlapping(leads=True)
@triton.jit
def _quantize_kernel(x, fixed, x8, scales, M, K, PADDED,
                     GROUPS: tl.constexpr, WIDTH: tl.constexpr, FIXED: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    """Quantise GROUPS groups of WIDTH columns of a row per program. Rows from M on, the padding, become zeros.

    FIXED: number of scales in ``fixed``, of which the largest is used; 0: scales are computed.
    """
    follow(OVERLAP, True)
    row = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    cols = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = cols < K
    at = row.to(tl.int64) * K + cols
    value = tl.load(x + at, mask=inside & (row < M), other=0.0).to(tl.float32)
    if FIXED > 0:
        scale = tl.full((GROUPS,), 0.0, tl.float32)
        if FIXED > 8:  # of a stack of experts
            for i in range(0, FIXED, 128):
                each = i + tl.arange(0, 128)
                scale = tl.maximum(scale, tl.max(tl.load(fixed + each, mask=each < FIXED, other=0.0), 0))
        else:
            for i in tl.static_range(FIXED):
                scale = tl.maximum(scale, tl.load(fixed + i))
        scaled = _clamped(tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)))  # may be of any size
    else:
        scaled, scale = _scaled(value, x8.dtype.element_ty)
    tl.store(x8 + at, scaled.to(x8.dtype.element_ty), mask=inside)
    tl.store(scales + groups.to(tl.int64) * PADDED + row, scale, mask=groups * WIDTH < K)


def _blocking(k: int, group: int | None) -> tuple[int, int, int]:
    """(groups per program, columns of a group's tile, warps)."""
    if group is None or group == INT8_ROWS:
        width = triton.next_power_of_2(k)
        return 1, width, min(max(width // 512, 1), 16)
    return max(1, _COLUMNS // group), group, 4


def padded_rows(rows: int) -> int:
    """Rows of the outputs of :func:`launch_quantize`."""
    return rows + -rows % ROWS_OF_FOUR


def empty_quantised(x: torch.Tensor, rows: int, k: int, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs of :func:`launch_quantize` for activations [rows, k], on x's device; empty for group None.

    group: columns that share a scale; 0: all; INT8_ROWS: all, and the first output is int8.
    """
    padded = padded_rows(rows)
    if group is None:
        return x.new_empty(0, dtype=E4M3), x.new_empty(0, dtype=torch.float32)
    groups, dtype = triton.cdiv(k, group) if group > 0 else 1, torch.int8 if group == INT8_ROWS else E4M3
    return x.new_empty(padded, k, dtype=dtype), x.new_empty(groups, padded, dtype=torch.float32)


def element_of(group: int) -> str:
    """Triton's type of the first output, for AOT cases."""
    return "*i8" if group == INT8_ROWS else "*fp8e4nv"


def launch_quantize(
    x: torch.Tensor, group: int | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [M, K]: (e4m3 [M', K], scales [G, M'] fp32), M' = M padded to a multiple of four with zeros.

    group: columns that share a scale, a power of two; None: all; INT8_ROWS: all, to int8. fixed: calibrated e4m3
    scales, n numbers of the n projections that read x; the largest is used for every group.
    """
    x = x.contiguous()
    (rows, k), padded = x.shape, padded_rows(x.shape[0])
    per_program, width, warps = _blocking(k, group)
    groups = triton.cdiv(k, width)
    x8, scales = empty_quantised(x, rows, k, group or 0)
    _quantize_kernel[(padded, triton.cdiv(groups, per_program))](
        x, fixed, x8, scales, rows, k, padded,
        GROUPS=per_program, WIDTH=width, FIXED=0 if fixed is None else fixed.numel(),
        num_warps=warps, **overlapped(x.device),
    )  # fmt: skip
    return x8, scales


def quantize_cpu(
    x: torch.Tensor, group: int | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise without padding: (e4m3 [M, K], scales [G, M]). CPU twin of :func:`launch_quantize`."""
    (rows, k), width = x.shape, group or x.shape[1]
    groups = -(-k // width)
    value = torch.nn.functional.pad(x.float(), (0, groups * width - k)).view(rows, groups, width)
    computed = value.abs().amax(2).clamp_min(SMALLEST) / LARGEST
    scale = computed if fixed is None else fixed.max().expand(rows, groups)
    scaled = (value / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return scaled.view(rows, groups * width)[:, :k], scale.t().contiguous()


def padded_quantize_cpu(
    x: torch.Tensor, group: int | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with padding, as :func:`launch_quantize`, for the ops' CPU twins."""
    return quantize_cpu(torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % ROWS_OF_FOUR)), group, fixed)


def quantised_cpu(x: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x as kernels with :func:`store_quantised` do. group 0: whole rows; INT8_ROWS: to int8; None: two empty
    tensors."""
    if group == INT8_ROWS:
        values = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % ROWS_OF_FOUR)).float()
        scales = values.abs().amax(1).clamp_min(SMALLEST) / 127
        return (values / scales[:, None]).round().to(torch.int8), scales[None]
    return empty_quantised(x, 0, 0, None) if group is None else padded_quantize_cpu(x, group or None)


@op(
    cuda=lambda x, group, fixed: launch_quantize(x, group or None, fixed),
    meta=lambda x, group: empty_quantised(x, x.shape[0], x.shape[1], group),
)
def quantize_fp8_op(x: torch.Tensor, group: int, fixed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_cpu(x, group) if group == INT8_ROWS else padded_quantize_cpu(x, group or None, fixed)


def quantize(x: torch.Tensor, group: int, fixed: torch.Tensor | None = None) -> Quantised:
    """Quantise activations x [M, K]. group: columns that share a scale, 0: all; INT8_ROWS: all, to int8.

    fixed: see :func:`launch_quantize`.
    """
    return handed_on(quantize_fp8_op(x, group, fixed), x, group, x)


def widened_activations(x8: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise e4m3 values [M, K] with scales [G, M] to fp32."""
    (rows, k), groups = x8.shape, scales.shape[0]
    width = -(-k // groups) if groups == 1 else GROUP
    return x8.float() * scales.t().repeat_interleave(width, 1)[:rows, :k]


def _aot(dtype: str, k: int, group: int | None, fixed: int) -> AotCase:
    groups, width, warps = _blocking(k, group)
    tensors = {"x": f"*{dtype}", "fixed": "*fp32", "x8": element_of(group or 0), "scales": "*fp32"}
    return AotCase(
        _quantize_kernel,
        {**tensors, **dict.fromkeys(("M", "K", "PADDED"), "i32")},
        {"GROUPS": groups, "WIDTH": width, "FIXED": fixed, "OVERLAP": True},
        num_warps=warps,
    )


AOT: list[AotCase] = [
    *(_aot(dtype, 4096, GROUP, 0) for dtype in ("bf16", "fp16", "fp32")),
    *(_aot("bf16", k, None, fixed) for k in (4096, 12288) for fixed in (0, 3)),
    _aot("bf16", 4096, INT8_ROWS, 0),
]
