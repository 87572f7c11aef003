"""A tower's embeddings beside transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.engine.pictures import Picture, vision_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_tower
from unisono.models.vision.config import VisionConfig
from unisono.models.vision.grids import Grid
from unisono.models.vision.tower import AnyTower

PICTURES = [Picture(4, 6, 1), Picture(8, 4, 2), Picture(2, 2, 3), Picture(2, 16, 4)]

Theirs = Callable[[list[torch.Tensor], list[Grid], VisionConfig], Sequence[torch.Tensor]]
"""Pixels and grids of pictures -> transformers' embeddings of each."""


def compare_embeddings(path: Path, theirs: Theirs, pictures: Sequence[Picture] = PICTURES) -> AnyTower:
    """Compare those of several pictures: within 1e-4, with equal bits in one pass and alone. Returns the tower."""
    vision, tower = vision_of(path), load_tower(Checkpoint.open(path), dtype=torch.float32, device="cpu")
    assert tower is not None
    grids, pixels = [picture.grid for picture in pictures], [picture.pixels(vision) for picture in pictures]

    def run(pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        return tower(pixels, {name: torch.from_numpy(v) for name, v in tower.host_inputs(grids).items()})

    ours, start = run(torch.cat(pixels), grids), 0
    for grid, each, expected in zip(grids, pixels, theirs(pixels, grids, vision), strict=True):
        tokens = len(each) // vision.unit
        assert expected.std() > 0.1, "a flat tower would prove nothing"
        torch.testing.assert_close(ours[start : start + tokens], expected, atol=1e-4, rtol=0)
        assert torch.equal(run(each, [grid]), ours[start : start + tokens])
        start += tokens
    return tower
