"""Blocking of matrix-product kernels, shared by all weight formats."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Blocking of a matrix-product kernel. It affects speed only: no bit depends on it.

    m, n, k: rows, outputs and inputs of a step; k 0: the weight's format fixes it. warps, stages: of a program.
    swapped: the weight is the left operand: 64 outputs fill the rows of ``wgmma``, and rows of x are its columns.
    ahead: an iteration takes four steps of K and prefetches the scales of the next four (e4m3 weights).
    across: neighbours in the grid share rows and take the next outputs; otherwise they share outputs and take the next
        tile of rows (experts).
    registers: maximum registers per thread, on average, which leave room for the kernels before and after (Gluon).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swapped: bool = False
    ahead: bool = False
    across: bool = False
    registers: int | None = None


class ExpertTiles(NamedTuple):
    """Blocking of both products of experts. Their rows ``m`` are equal, since both follow one plan.

    up: of gate and up, with outputs n of each (16-bit weights) or of both together (other formats).
    """

    up: Tile
    down: Tile

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.up.m
