"""Rotary positions of prompts with pictures and videos: transformers' of each family, from the very same prompts."""

from __future__ import annotations

import functools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Qwen2_5_VLModel, Qwen2VLModel, Qwen3_5Model, Qwen3VLModel

from unisono.models.blocks.rotary_positions import rotary_positions
from unisono.models.vision.config import TowerSpec, VisionConfig
from unisono.types import MediaItem
from unisono.types.vectors import Vectors

TEXT, PICTURE, VIDEO = 0, 1, 2
Part = tuple[Any, ...]
"""Text and its length; a picture and its grid; a video, its grid and the seconds between its frames."""

FRACTIONS = Version(transformers.__version__) >= Version("5.23")
"""Older transformers round a video's seconds down first (huggingface/transformers#48669)."""

FAMILIES = {
    "qwen3_vl": (Qwen3VLModel, 0, False), "qwen3_5": (Qwen3_5Model, 0, False),
    "qwen2_5_vl": (Qwen2_5_VLModel, 4, False), "qwen2_vl": (Qwen2VLModel, 0, True),
}  # fmt: skip
"""Family -> transformers' class, ``tokens_per_second`` and ``even_frames``."""


def vision_of(tokens_per_second: int, even_frames: bool = False) -> VisionConfig:
    tower = TowerSpec(1, 8, 1, 8)
    return VisionConfig(
        2, 4, 2, 96, 64, 0, 1, 2, 3, 4, (4, 2, 2), True, tower, tokens_per_second, even_frames=even_frames
    )


def item(kind: str, grid: tuple[int, int, int], positions: list[int], seconds: float = 0.0) -> MediaItem:
    return MediaItem(kind, b"", grid, Vectors("float32", (0, 96), b""), positions, seconds)


def prompt_of(parts: list[Part], frames_apart: bool) -> tuple[list[int], list[MediaItem]]:
    """(the type of each token, the items). frames_apart: two tokens of text between the frames of a video."""
    types: list[int] = []
    media: list[MediaItem] = []
    for kind, size, *seconds in parts:
        if kind == TEXT:
            types += [TEXT] * size
            continue
        frames, tokens, positions = size[0], size[1] * size[2] // 4, []
        seconds = [each if FRACTIONS else math.ceil(each) for each in seconds]
        for frame in range(frames):
            types += [TEXT] * (2 if frame and frames_apart else 0)
            positions += range(len(types), len(types) + tokens)
            types += [kind] * tokens
        media.append(item("image" if kind == PICTURE else "video", size, positions, *seconds))
    return types, media


def theirs(family: str, types: list[int], media: list[MediaItem]) -> tuple[np.ndarray, int]:
    model, tokens_per_second, _ = FAMILIES[family]
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    owner = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=functools.partial(model.get_vision_position_ids, None),
    )
    grids = {kind: [i.grid for i in media if i.kind == kind] for kind in ("image", "video")}
    tensors = {kind: torch.tensor(found) if found else None for kind, found in grids.items()}
    seconds = torch.tensor([i.seconds for i in media if i.kind == "video"])
    positions, delta = model.get_rope_index(
        owner,
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=tensors["image"],
        video_grid_thw=tensors["video"],
        second_per_grid_ts=seconds,
    )
    return positions[:, 0].numpy(), int(delta)


PROMPTS: dict[str, list[Part]] = {
    "text": [(TEXT, 9)],
    "one picture between text": [(TEXT, 5), (PICTURE, (1, 6, 10)), (TEXT, 4)],
    "one picture first": [(PICTURE, (1, 14, 2)), (TEXT, 4)],
    "one picture last": [(TEXT, 3), (PICTURE, (1, 2, 2))],
    "three pictures": [
        (TEXT, 1), (PICTURE, (1, 6, 10)), (TEXT, 2), (PICTURE, (1, 30, 4)), (TEXT, 1), (PICTURE, (1, 2, 6)), (TEXT, 7),
    ],
    "a video of four frames": [(TEXT, 6), (VIDEO, (2, 6, 4), 1.0), (TEXT, 5)],
    "a long video of small frames": [(TEXT, 6), (VIDEO, (9, 2, 4), 0.7), (TEXT, 5)],
    "a video and a picture": [(TEXT, 6), (VIDEO, (3, 6, 4), 0.37), (TEXT, 2), (PICTURE, (1, 8, 8)), (TEXT, 5)],
}  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_transformers(family, prompt):
    check(family, PROMPTS[prompt])


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_random_prompts_are_transformers(family):
    rng = random.Random(0)
    for _ in range(50):
        parts: list[Part] = [(TEXT, rng.randrange(1, 5))]
        for _ in range(rng.randrange(5)):
            grid = (1, 2 * rng.randrange(1, 9), 2 * rng.randrange(1, 9))
            video = (VIDEO, (rng.randrange(1, 6), *grid[1:]), rng.choice([0.1, 0.5, 1 / 3, 2.0]))
            parts += [rng.choice([(PICTURE, grid), video]), (TEXT, rng.randrange(1, 4))]
        check(family, parts)


def check(family: str, parts: list[Part]) -> None:
    vision = vision_of(*FAMILIES[family][1:])
    types, media = prompt_of(parts, frames_apart=vision.frames_apart)
    positions, delta = rotary_positions(len(types), media[::-1], vision)
    expected, their_delta = theirs(family, types, media)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, expected, err_msg=str(parts))
    assert delta == their_delta


def test_an_empty_prompt():
    positions, delta = rotary_positions(0, [], vision_of(0))
    assert (positions.shape, delta) == ((3, 0), 0)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([item("image", (1, 4, 4), [1, 2, 3])], r"grid \(1, 4, 4\) has 3 positions"),
        ([item("image", (1, 4, 4), [1, 2, 4, 5])], "not one run for each frame"),
        ([item("image", (1, 4, 4), [3, 4, 5, 6]), item("image", (1, 2, 2), [4])], "overlap"),
        ([item("image", (1, 4, 4), [7, 8, 9, 10])], "positions 7 to 10 of 10"),
    ],
)
def test_positions_that_are_no_prompts(media, message):
    with pytest.raises(ValueError, match=message):
        rotary_positions(10, media, vision_of(0))
