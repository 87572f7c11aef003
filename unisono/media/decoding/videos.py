"""Videos as frames: sampling, resizing and patches, as in transformers' processors.

transformers' video processors need torchvision, which has no build for many machines; this is their arithmetic on
Pillow's resizing (transformers/models/{qwen3_vl,qwen2_vl}/video_processing_*.py, 5.17 to 5.23). Runs in the worker's
process only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unisono.media.decoding.images import InvalidImage

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
MAX_RATIO = 200
FILE_KEYS = {"processor_config.json": "video_processor", "video_preprocessor_config.json": None}
"""Files that describe a video processor -> the key of its settings."""


@dataclass(frozen=True)
class VideoRules:
    """The settings of a checkpoint's video processor.

    shortest, longest: bounds of pixels, of all frames together (``timestamps``) or of one. samples: files are sampled
    at ``fps`` frames per second. timestamps: text with its time precedes each frame.
    """

    patch_size: int
    temporal_patch_size: int
    merge: int
    shortest: int
    longest: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int
    samples: bool
    fps: float | None
    min_frames: int
    max_frames: int
    timestamps: bool

    @property
    def factor(self) -> int:
        """Side of a merged patch in pixels."""
        return self.patch_size * self.merge


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3VLVideoProcessor": {
        "patch_size": 16, "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "image_mean": HALF,
        "image_std": HALF, "do_sample_frames": True, "fps": 2, "timestamps": True,
    },
    "Qwen2VLVideoProcessor": {
        "patch_size": 14, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "do_sample_frames": False, "fps": None, "timestamps": False,
    },
}  # fmt: skip
"""Defaults of transformers' classes."""
PROCESSORS = {
    "Qwen3VLProcessor": "Qwen3VLVideoProcessor", "Qwen2_5_VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen2VLProcessor": "Qwen2VLVideoProcessor",
}  # fmt: skip
"""Processor class -> video processor class."""


def video_rules(directory: Path, image: Mapping[str, Any]) -> VideoRules | None:
    """The rules of the checkpoint in ``directory``; None for an unknown video processor.

    image: preprocessor_config.json, used for videos too if there is no file for them.
    """
    own = own_config(directory)
    settings = {**image, **own}
    name = str(own.get("video_processor_type") or PROCESSORS.get(str(settings.get("processor_class")), ""))
    name = name.removesuffix("Fast")
    if name not in DEFAULTS:
        return None
    found: dict[str, Any] = {"temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768}
    found |= {"rescale_factor": 1 / 255, "resample": int(Image.Resampling.BICUBIC), **DEFAULTS[name]}
    found |= {key: value for key, value in settings.items() if value is not None and key in found}
    size = dict(found["size"])
    size |= {edge: settings[key] for edge, key in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
             if settings.get(key) is not None}  # fmt: skip
    return VideoRules(
        patch_size=found["patch_size"],
        temporal_patch_size=found["temporal_patch_size"],
        merge=found["merge_size"],
        shortest=size["shortest_edge"],
        longest=size["longest_edge"],
        mean=tuple(found["image_mean"]),
        std=tuple(found["image_std"]),
        rescale=found["rescale_factor"],
        resample=found["resample"],
        samples=found["do_sample_frames"],
        fps=found["fps"],
        min_frames=found["min_frames"],
        max_frames=found["max_frames"],
        timestamps=found["timestamps"],
    )


def own_config(directory: Path) -> dict[str, Any]:
    """Settings of the video processor in ``directory``; empty where there are none."""
    found: dict[str, Any] = {}
    for file, key in FILE_KEYS.items():
        if (directory / file).is_file():
            content = json.loads((directory / file).read_text(encoding="utf-8"))
            outer = content.get("processor_class")
            inner = content.get(key) or {} if key else content
            found |= {"processor_class": outer, **inner} if outer else inner
    return found


def sampled(rules: VideoRules, total: int, rate: float, fps: float | None, count: int | None, most: int) -> list[int]:
    """Indices of the frames that are used, of ``total`` frames at ``rate`` per second.

    fps, count: the request's settings, if any. most: the server's limit.
    """
    if count is None:
        fps = fps or (rules.fps if rules.samples else None)
        least = min(rules.min_frames, total)
        count = total if fps is None else min(max(int(total / rate * fps), least), rules.max_frames)
    count = max(1, min(count, total, most))
    if rules.timestamps:
        return [int(i) for i in np.linspace(0, total - 1, count).round()]
    step = rules.temporal_patch_size
    count = max(step, count // step * step) if total >= step else total
    return [int(i) for i in np.arange(0, total, total / count)[:count]]


def resized(rules: VideoRules, frames: int, height: int, width: int, bounds: tuple[int | None, int | None]) -> Any:
    """(rows, columns) in pixels after resizing. bounds: the request's (shortest, longest). Raises Bad."""
    shortest, longest = (
        own if requested is None else requested
        for requested, own in zip(bounds, (rules.shortest, rules.longest), strict=True)
    )
    factor = rules.factor
    if not rules.timestamps:
        return _fitted(height, width, 1, 1, factor, shortest, longest)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    step = rules.temporal_patch_size
    return _fitted(height, width, frames, round(frames / step) * step, factor, shortest, longest)


def _fitted(
    height: int, width: int, frames: int, counted: int, factor: int, shortest: int, longest: int
) -> tuple[int, int]:
    """Multiples of ``factor`` with ``shortest`` to ``longest`` pixels in ``frames`` (``counted``, rounded)."""
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise InvalidImage(
            f"has frames of {width} x {height} pixels, more than {MAX_RATIO} times as long as wide; crop them."
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns > longest:
        beta = math.sqrt(frames * height * width / longest)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif counted * rows * columns < shortest:
        beta = math.sqrt(shortest / (frames * height * width))
        rows, columns = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return rows, columns


def patches(
    rules: VideoRules,
    count: int,
    frame: Callable[[int], Image.Image],
    rows: int,
    columns: int,
    normalised: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches [frames * rows * columns, C] in float32, and their grid.

    frame: returns an image, which is resized here. normalised: converts bytes [channels, rows, columns] to the tower's
    numbers.
    """
    step, size, merge = rules.temporal_patch_size, rules.patch_size, rules.merge
    values = np.empty((-(-count // step) * step, 3, rows, columns), np.float32)
    for i in range(count):
        resized = frame(i).resize((columns, rows), Image.Resampling(rules.resample))
        values[i] = normalised(np.asarray(resized).transpose(2, 0, 1))
    values[count:] = values[count - 1]
    grid = len(values) // step, rows // size, columns // size
    shape = (grid[0], step, 3, grid[1] // merge, merge, size, grid[2] // merge, merge, size)
    ordered = values.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(grid[0] * grid[1] * grid[2], -1), grid


def times(rules: VideoRules, indices: Sequence[int], rate: float) -> tuple[float, list[str]]:
    """Seconds between frames of the grid, and the text before each; empty without timestamps."""
    step = rules.temporal_patch_size
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    stamps = [(padded[i] + padded[i + step - 1]) / rate / 2 for i in range(0, len(padded), step)]
    return step / rate, [f"{one:.1f}" for one in stamps] if rules.timestamps else []
