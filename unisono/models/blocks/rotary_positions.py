"""Rotary positions of a prompt with images: three axes (time, height, width) per token. Pure numpy.

The engine calls :func:`rotary_positions` once per request with media. A text token has the same position on all axes.
Sources: ``get_rope_index`` of transformers' ``qwen3_vl`` and ``qwen2_5_vl``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.models.vision.config import VisionConfig
from unisono.types import MediaItem

Block = tuple[int, tuple[int, int, int], float]
"""(first prompt position, grid of tokens, positions between two frames)."""


def rotary_positions(length: int, media: Sequence[MediaItem], vision: VisionConfig) -> tuple[np.ndarray, int]:
    """(positions [3, length] i32, delta) of a prompt of ``length`` tokens; media: its items, in any order.

    A token generated at index p has position p + delta on all axes. Raises ValueError for items whose positions are not
    runs of their grids' size within the prompt.
    """
    if not vision.mrope_section:
        return np.tile(np.arange(length, dtype=np.int32), (3, 1)), 0
    positions = np.zeros((3, length), np.int32)
    at = current = 0
    for first, grid, interval in sorted(block for item in media for block in _blocks(item, vision)):
        frames, rows, columns = grid
        after = first + frames * rows * columns
        if first < at or after > length:
            raise ValueError(
                f"media at prompt positions {first} to {after - 1} of {length}: they overlap, or lie outside."
            )
        positions[:, at:first] = np.arange(current, current + first - at)
        current += first - at
        axes = np.indices(grid).reshape(3, -1)
        axes[0] = (axes[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
        positions[:, first:after] = axes + current
        current += max(rows, columns)
        at = after
    positions[:, at:] = np.arange(current, current + length - at)
    return positions, int(positions.max(initial=-1)) + 1 - length


def _blocks(item: MediaItem, vision: VisionConfig) -> list[Block]:
    """Runs of an item's prompt positions, with the grid of tokens of each."""
    frames, rows, columns = item.grid[0], item.grid[1] // vision.merge, item.grid[2] // vision.merge
    apart = item.kind == "video" and vision.frames_apart
    runs = np.asarray(item.positions, np.int64)
    if len(runs) != frames * rows * columns:
        raise ValueError(f"a {item.kind} with grid {item.grid} has {len(runs)} positions in the prompt.")
    runs = runs.reshape(frames if apart else 1, -1)
    if (np.diff(runs, axis=1) != 1).any():
        raise ValueError(f"a {item.kind} with grid {item.grid} has positions that are not one run for each frame.")
    grid = (1 if apart else frames, rows, columns)
    interval = 1.0
    if item.kind == "video" and vision.tokens_per_second:
        interval = float(np.float32(vision.tokens_per_second) * np.float32(item.seconds))
    return [(int(run[0]), grid, interval) for run in runs]
