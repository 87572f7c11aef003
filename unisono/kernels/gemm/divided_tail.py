"""Fused layer tail of one rank of a divided layer, for few rows, in one launch on Hopper.

A layer on several GPUs has four gathers, each in a launch that waits for the one before it, and its weights are read in
a fraction of the time of nine launches. The kernel (``kernels/gemm/divided_tail_gluon.py``) computes what
``kernels/gemm/layer_tail.py`` computes on one GPU, with this rank's part of each product's outputs. Its stores go to
all ranks at once, into *regions* of memory that all of them map. The op is in ``distributed/layer_tail.py``.

Bits are those of the separate kernels and gathers: products sum K in one sequence, whole on one rank.

Shapes: M rows, H features, I intermediate features, Q inputs of the output projection, F outputs of the next input
projection on this rank, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from unisono.kernels.gemm.divided_tail_gluon import (
    AT_GATED,
    AT_INPUTS,
    CAPACITY,
    LOOKS,
    REGION_BYTES,
    divided_tail_kernel,
)
from unisono.kernels.gemm.layer_tail import Blocks, LayerTailTiles, LayerTailWeights, Made, launch_constants, suits
from unisono.kernels.gemm.layer_tail_gluon import MOST_ROWS, REGISTERS, WARPS, WIDE
from unisono.kernels.gemm.persistent import counters, processors, tile_of
from unisono.kernels.hopper import boxes
from unisono.kernels.library import AotCase, ints
from unisono.kernels.overlap import overlapped

LEAST = 8
"""Outputs of the narrowest tile: parts are narrow."""


class Regions(NamedTuple):
    """Memory that all ranks map. region [REGION_BYTES] uint8: this rank's, zero at first. addresses [N + 1] int64: of
    every rank's region, and of the give-up word."""

    region: torch.Tensor
    addresses: torch.Tensor
    rank: int
    ranks: int

    def rows(self, at: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """An array [rows, columns] at a byte of this rank's region."""
        size = rows * columns * dtype.itemsize
        return self.region[at : at + size].view(dtype).view(rows, columns)


@dataclass(frozen=True)
class DividedTailWeights:
    """A rank's weights of a layer after its mixer: o [H / N, Q], gate_up [2 I / N, H], down [H / N, I], following
    [F, H]; norms [H].
    """

    parts: LayerTailWeights
    ranks: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(H, Q, I, F): whole ones, and this rank's F."""
        h, q, i, f = self.parts.sizes
        return self.ranks * h, q, i, f

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.ranks, *self.parts.shape)


def divides(t: DividedTailWeights) -> bool:
    """True if the kernel takes these weights; on a CPU always. See :func:`unisono.kernels.gemm.layer_tail.suits`."""
    h, q, i, _ = t.sizes
    if t.parts.next_norm is None or any(n % t.ranks for n in (h, q, i)):
        return False
    if t.parts.o.device.type == "cpu":
        return True
    size = t.parts.o.element_size()
    aligned = all(n // t.ranks * size % 16 == 0 for n in (h, q, i))
    return aligned and MOST_ROWS * size * max(h, q, i) <= CAPACITY and suits(t.parts, h)


def tiles_of(t: DividedTailWeights, programs: int) -> LayerTailTiles:
    """Outputs per tile of this rank's products."""
    h, _, i, f = t.sizes
    widths = (h // t.ranks, WIDE), (i // t.ranks, WIDE // 2), (f or h // t.ranks, WIDE)
    return LayerTailTiles(*(tile_of(n, programs, most, LEAST) for n, most in widths))


def launch_divided_tail(
    x: torch.Tensor, residual: torch.Tensor, t: DividedTailWeights, regions: Regions, blocks: Blocks | None = None
) -> Made:
    """Launch the kernel: x [M, Q / N] of this rank, residual [M, H] -> (sum [M, H], its norm [M, H], product [M, F]).

    :func:`divides` must hold, and all ranks must call it with the same M. blocks: speed only.
    """
    x, residual, tail = x.contiguous(), residual.contiguous(), t.parts
    rows, (h, q, i, f) = x.shape[0], t.sizes
    assert tail.next_norm is not None
    blocks, programs = blocks or Blocks.of(rows), processors(x.device)
    n1, out, n2 = (torch.empty_like(residual) for _ in range(3))
    product = residual.new_empty(rows, f) if f else residual.new_empty(0)
    tiles = tiles_of(t, programs)
    inputs = regions.rows(AT_INPUTS.value, rows, q, x.dtype)
    gated = regions.rows(AT_GATED.value, rows, i, x.dtype)
    divided_tail_kernel[(programs,)](
        *(boxes(each, blocks.rows) for each in (inputs, n1, gated, n2)), *tiles.boxes(tail), x, residual, tail.o_norm,
        tail.next_norm, residual if tail.bias is None else tail.bias, n1, out, n2, product if f else residual,
        counters(x.device), regions.addresses, tail.eps, tail.next_eps, rows, q, h, i, f,
        HAS_BIAS=tail.bias is not None, FOLLOWED=f > 0, **constants(blocks, tiles, h, q, regions.ranks),
        RANK=regions.rank, RANKS=regions.ranks, num_warps=WARPS, maxnreg=REGISTERS, **overlapped(x.device),
    )  # fmt: skip
    return out, n2, product


def constants(blocks: Blocks, tiles: LayerTailTiles, h: int, q: int, ranks: int) -> dict[str, Any]:
    """Compile-time sizes of the kernel."""
    own = {"LOOKS": LOOKS, "BLOCK_Q": max(1024, triton.next_power_of_2(q // ranks))}
    return launch_constants(blocks, tiles, h) | own


def _case(dtype: str, rank: int, ranks: int, rows: int, h: int, q: int, i: int, f: int) -> AotCase:
    blocks = Blocks.of(rows)
    widths = (h // ranks, WIDE), (i // ranks, WIDE // 2), (f or h // ranks, WIDE)
    tiles = LayerTailTiles(*(tile_of(n, 132, most, LEAST) for n, most in widths))
    rows_of = ("inputs", "residual", "o_norm", "next_norm", "next_bias", "n1", "out", "n2", "product")
    signature = {
        **tiles.box_types(dtype, blocks.rows), **dict.fromkeys(rows_of, f"*{dtype}"), "counters": "*i64",
        "addresses": "*i64", "eps": "fp32", "next_eps": "fp32", **ints("", "M Q H I F"),
    }  # fmt: skip
    options = {"HAS_BIAS": dtype == "fp16", "FOLLOWED": f > 0, "RANK": rank, "RANKS": ranks, "OVERLAP": True}
    sizes = constants(blocks, tiles, h, q, ranks)
    return AotCase(divided_tail_kernel, signature, sizes | options, num_warps=WARPS, maxnreg=REGISTERS)


AOT: list[AotCase] = [
    _case("bf16", 0, 4, 8, 4096, 4096, 12288, 1536),
    _case("bf16", 1, 2, 32, 4096, 4096, 12288, 3072),
    _case("fp16", 3, 4, 16, 8192, 8192, 28672, 0),
]

__all__ = ["AOT", "REGION_BYTES", "DividedTailWeights", "Regions", "divides", "launch_divided_tail"]
