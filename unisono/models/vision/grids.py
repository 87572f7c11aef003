"""A tower's inputs besides pixels, computed from the grids of a pass. Pure numpy; called by the tower.

Patches arrive in processor order: frame by frame, and within a frame the ``merge · merge`` patches of a token
contiguously, tokens in rows. A tower with windows uses another order (:attr:`GridLayout.order`).

Shapes: n patches of an item, P of a pass, u = merge² patches of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.models.vision.config import VisionConfig

Grid = tuple[int, int, int]
"""(frames, rows, columns) of patches."""

GRIDS = 256
"""Number of grids whose layouts are cached."""


@dataclass(frozen=True)
class GridLayout:
    """One item's patches, in the tower's order.

    axes [n, 2] i32: row and column of each patch.
    frames, windows [n, 2] i32: range (first, end) of patches visible to each patch in blocks without and with windows,
        within the item.
    order [n]: index of each patch in the item; None: unchanged.
    restore [n / u] i32: position of each token in the tower's order. sources [n, 4] i32, weights [n, 4] f32: the
        learned positions interpolated for a patch.
    """

    axes: np.ndarray
    frames: np.ndarray
    windows: np.ndarray
    order: np.ndarray | None
    restore: np.ndarray
    sources: np.ndarray
    weights: np.ndarray


@lru_cache(GRIDS)
def layout(grid: Grid, config: VisionConfig) -> GridLayout:
    """Layout of an item. Raises ValueError for an unsupported grid."""
    check(grid, config)
    (frames, rows, columns), merge, tower = grid, config.merge, config.tower
    in_rows = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    raster = in_rows.transpose(0, 2, 1, 3).reshape(-1)
    axes = np.stack((raster // columns, raster % columns), axis=1).astype(np.int32)
    size = rows * columns
    starts = np.repeat(np.arange(frames) * size, size)
    whole = np.stack((starts, starts + size), axis=1).astype(np.int32)
    sources, weights = _interpolation(axes, rows, columns, tower.position_side)
    order, restore, windows = None, np.arange(frames * size // config.unit), whole
    axes, sources, weights = (np.tile(each, (frames, 1)) for each in (axes, sources, weights))
    if tower.window:
        tokens, windows = _windows(grid, config)
        order = (tokens[:, None] * config.unit + np.arange(config.unit)).reshape(-1)
        axes, sources, weights = axes[order], sources[order], weights[order]
        restore = np.argsort(tokens)
    return GridLayout(axes, whole, windows, order, restore.astype(np.int32), sources, weights)


def check(grid: Grid, config: VisionConfig) -> None:
    """Raise ValueError for an unsupported grid."""
    frames, rows, columns = grid
    sides = rows % config.merge == 0 == columns % config.merge and min(rows, columns) >= 1
    if config.side and (rows, columns) != (config.side, config.side):
        raise ValueError(f"grid {grid} of patches: the tower takes {config.side} rows and columns only.")
    if frames < 1 or not sides or max(rows, columns) > config.tower.most_side:
        raise ValueError(
            f"grid {grid} of patches: it must have at least one frame, and rows and columns that are multiples of "
            f"{config.merge}, at most {config.tower.most_side}."
        )


def patches(grids: Sequence[Grid]) -> int:
    """Number of patches of these items."""
    return sum(frames * rows * columns for frames, rows, columns in grids)


def _windows(grid: Grid, config: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(the item's tokens, window by window [n / u]; the bounds of each patch's window in that order [n, 2] i32).

    Windows are cut from the upper left corner of each frame; those at the right and lower edges are smaller.
    """
    frames, rows, columns = grid[0], grid[1] // config.merge, grid[2] // config.merge
    side = config.tower.window // config.merge
    across = -(-columns // side)
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * across + column // side
    order = np.argsort(window, kind="stable")
    window = (window[order] + np.arange(frames)[:, None] * (window.max() + 1)).reshape(-1)
    order = (order + np.arange(frames)[:, None] * (rows * columns)).reshape(-1)
    ends = np.cumsum(np.bincount(window)) * config.unit
    bounds = np.stack((np.concatenate(([0], ends[:-1])), ends), axis=1)[window]
    return order, np.repeat(bounds, config.unit, axis=0).astype(np.int32)


def _interpolation(axes: np.ndarray, rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources [n, 4] i32, weights [n, 4] f32): bilinear, with coinciding corners of both grids."""
    if not side:
        return np.zeros((len(axes), 4), np.int32), np.zeros((len(axes), 4), np.float32)
    taps, shares = [], []
    for index, size in ((axes[:, 0], rows), (axes[:, 1], columns)):
        at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(at)
        taps.append(np.minimum(low.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1))
        upper = at - low
        shares.append(np.stack((1 - upper, upper), axis=1))
    sources = taps[0][:, :, None] * side + taps[1][:, None, :]
    weights = shares[0][:, :, None] * shares[1][:, None, :]
    return sources.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4).astype(np.float32)
