"""Activations to e4m3 with a scale for each row and group of columns. Called by the fp8 products, not an op of its own.

A value is divided by its group's scale (one IEEE division in fp32), clamped to e4m3's largest value and rounded to
nearest even. The scale is the group's largest magnitude / 448, or one that the checkpoint fixes. Both depend on the row
alone, so they are the same in any batch; the CPU gives the GPU's bits.

Shapes: M rows, K columns, G = ceil(K / group) groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase
from unisono.kernels.overlap import follow, overlapped

E4M3 = torch.float8_e4m3fn

LARGEST = 448.0
"""The largest finite e4m3 value."""

SMALLEST = 1e-10
"""What a group's largest magnitude is taken to be at least, so that a row of zeros has a scale."""

GROUP = 128
"""Columns that share a scale where weights are scaled by blocks."""

ROWS_OF_FOUR = 4
"""Rows are padded to a multiple of this: torch's blockwise product takes no other numbers of rows."""

_COLUMNS = 1024
"""Columns of one program where groups are smaller than that."""


@triton.jit
def _quantize_kernel(x, fixed, x8, scales, M, K, PADDED,
                     GROUPS: tl.constexpr, WIDTH: tl.constexpr, FIXED: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    """One program takes GROUPS groups of WIDTH columns of a row. Rows from M on, the padding, become zeros.

    FIXED: how many scales there are in ``fixed``, of which the largest serves; 0: scales are computed.
    """
    follow(OVERLAP)
    row = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    cols = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = cols < K
    at = row.to(tl.int64) * K + cols
    value = tl.load(x + at, mask=inside & (row < M), other=0.0).to(tl.float32)
    if FIXED > 0:
        scale = tl.full((GROUPS,), 0.0, tl.float32)
        for i in tl.static_range(FIXED):
            scale = tl.maximum(scale, tl.load(fixed + i))
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), axis=1), 1e-10), 448.0)
    scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    tl.store(x8 + at, scaled.to(x8.dtype.element_ty), mask=inside)
    tl.store(scales + groups.to(tl.int64) * PADDED + row, scale, mask=groups * WIDTH < K)


def _blocking(k: int, group: int | None) -> tuple[int, int, int]:
    """(groups of a program, columns of a group's tile, warps)."""
    if group is None:
        width = triton.next_power_of_2(k)
        return 1, width, min(max(width // 512, 1), 16)
    return max(1, _COLUMNS // group), group, 4


def padded_rows(rows: int) -> int:
    """Rows of what :func:`launch_quantize` returns."""
    return rows + -rows % ROWS_OF_FOUR


def launch_quantize(
    x: torch.Tensor, group: int | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> (e4m3 [M', K], scales [G, M'] fp32), M' = M padded to a multiple of four with zeros.

    group: columns that share a scale, a power of two; None: all. fixed: scales [n] that calibration found for the n
    projections which read x; the largest is every group's.
    """
    x = x.contiguous()
    (rows, k), padded = x.shape, padded_rows(x.shape[0])
    per_program, width, warps = _blocking(k, group)
    groups = triton.cdiv(k, width)
    x8, scales = x.new_empty(padded, k, dtype=E4M3), x.new_empty(groups, padded, dtype=torch.float32)
    _quantize_kernel[(padded, triton.cdiv(groups, per_program))](
        x, fixed, x8, scales, rows, k, padded,
        GROUPS=per_program, WIDTH=width, FIXED=0 if fixed is None else fixed.numel(),
        num_warps=warps, **overlapped(x.device),
    )  # fmt: skip
    return x8, scales


def quantize_cpu(
    x: torch.Tensor, group: int | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`launch_quantize` without the padding: (e4m3 [M, K], scales [G, M])."""
    (rows, k), width = x.shape, group or x.shape[1]
    groups = -(-k // width)
    value = torch.nn.functional.pad(x.float(), (0, groups * width - k)).view(rows, groups, width)
    computed = value.abs().amax(2).clamp_min(SMALLEST) / LARGEST
    scale = computed if fixed is None else fixed.max().expand(rows, groups)
    scaled = (value / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return scaled.view(rows, groups * width)[:, :k], scale.t().contiguous()


def widened_activations(x8: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What e4m3 values [M, K] with scales [G, M] stand for, in fp32."""
    (rows, k), groups = x8.shape, scales.shape[0]
    width = -(-k // groups) if groups == 1 else GROUP
    return x8.float() * scales.t().repeat_interleave(width, 1)[:rows, :k]


def _aot(dtype: str, k: int, group: int | None, fixed: int) -> AotCase:
    groups, width, warps = _blocking(k, group)
    tensors = {"x": f"*{dtype}", "fixed": "*fp32", "x8": "*fp8e4nv", "scales": "*fp32"}
    return AotCase(
        _quantize_kernel,
        {**tensors, **dict.fromkeys(("M", "K", "PADDED"), "i32")},
        {"GROUPS": groups, "WIDTH": width, "FIXED": fixed, "OVERLAP": True},
        num_warps=warps,
    )


AOT: list[AotCase] = [
    *(_aot(dtype, 4096, GROUP, 0) for dtype in ("bf16", "fp16", "fp32")),
    *(_aot("bf16", k, None, fixed) for k in (4096, 12288) for fixed in (0, 3)),
]
