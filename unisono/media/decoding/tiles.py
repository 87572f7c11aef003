"""Images cut into square tiles, and the whole image as one more tile: Llama 4. Runs in the worker's process only.

transformers' processor needs torchvision, so this is its arithmetic: the canvas, torch's resizing of bytes (weights of
16 bits, rows before columns), and numbers rounded to bfloat16 after each step. Its results on a CPU with AVX2 are the
same bits. Source: transformers, ``models/llama4/image_processing_llama4.py``; torch, ``UpSampleKernel.cpp``.

Shapes: images [rows, columns, 3] uint8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.media.decoding.images import InvalidImage

DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False, "resample": 2,
    "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "rescale_factor": 1 / 255,
    "do_resize": True, "do_rescale": True, "do_normalize": True,
}  # fmt: skip
"""Settings of transformers' class."""
FIXED = {"resample": 2, "do_resize": True, "do_rescale": True, "do_normalize": True}
"""The values of settings that are supported."""
MAX_TILES = 1024
"""Most tiles that a checkpoint may ask for."""

Size = tuple[int, int]
"""(rows, columns)."""


@dataclass(frozen=True)
class TiledImages:
    """The processor of a checkpoint whose images become tiles.

    side: pixels of a tile. most: tiles of an image beside the whole one. enlarges: an image is enlarged to its canvas.
    numbers [3, 256] float32: a channel's number for each byte. patch_size: pixels. merge: side of a token in patches.
    """

    side: int
    most: int
    enlarges: bool
    numbers: np.ndarray
    patch_size: int
    merge: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], vision: Mapping[str, Any]) -> TiledImages:
        """settings: preprocessor_config.json. Raises ValueError for those that contradict config.json, or that are not
        supported.
        """
        found = {**DEFAULTS, **{name: settings[name] for name in DEFAULTS if settings.get(name) is not None}}
        for name, value in FIXED.items():
            if found[name] != value:
                raise ValueError(f"{name}={found[name]!r} is not supported; it must be {value!r}")
        pixels = vision["side"] * vision["patch_size"]
        size = {"height": pixels, "width": pixels}
        if found["size"] != size:
            raise ValueError(f"its size is {found['size']}; config.json asks for {size}")
        most = found["max_patches"]
        if not 1 <= most <= MAX_TILES:
            raise ValueError(f"max_patches={most} is not supported; it must be 1 to {MAX_TILES}")
        numbers = _numbers(found["rescale_factor"], found["image_mean"], found["image_std"])
        return cls(pixels, most, bool(found["resize_to_max_canvas"]), numbers, vision["patch_size"], vision["merge"])

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise InvalidImage for bounds of a request: the checkpoint bounds tiles instead."""
        if message["min_pixels"] is not None or message["max_pixels"] is not None:
            raise InvalidImage(
                f"is cut into at most {self.most} tiles of {self.side} x {self.side} pixels by this model; leave out "
                "min_pixels and max_pixels."
            )

    def tiles(self, width: int, height: int) -> Size:
        """Rows and columns of tiles of an image with this many pixels, without the tile of the whole image."""
        canvas = best_canvas((height, width), self.side, self.most, self.enlarges)
        return canvas[0] // self.side, canvas[1] // self.side

    def patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · patch_size²] float32, tile by tile, those of a token next to each other, and
        their grid: a tile is a frame, the whole image the last one if there are several.
        """
        pixels, side = np.asarray(image), self.side
        rows, columns = self.tiles(image.width, image.height)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        size = fitted(pixels.shape[:2], canvas.shape[:2], side, self.enlarges)
        canvas[: size[0], : size[1]] = resized(pixels, size)
        cut = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
        if rows * columns > 1:
            cut = np.concatenate((cut, resized(pixels, (side, side))[None]))
        count, tokens, merge, patch = len(cut), side // (self.merge * self.patch_size), self.merge, self.patch_size
        parts = cut.reshape(count, tokens, merge, patch, tokens, merge, patch, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
        flat = parts.reshape(-1, 3, patch * patch)
        numbers = np.stack([self.numbers[channel][flat[:, channel]] for channel in range(3)], 1)
        return numbers.reshape(len(flat), -1), (count, tokens * merge, tokens * merge)


def best_canvas(size: Size, side: int, most: int, enlarges: bool) -> Size:
    """The canvas of 1 to ``most`` tiles for an image: the one that enlarges it least, or most with ``enlarges``; if all
    reduce it, the one that reduces it least. Of several the smallest.
    """
    shapes = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    canvases = side * np.array(shapes)
    scales = (canvases.astype(np.float32) / np.array(size, np.float32)).min(1)
    larger = scales[scales >= 1]
    scale = scales.max() if not len(larger) or enlarges else larger.min()
    fitting = canvases[scales == scale]
    rows, columns = fitting[fitting.prod(1).argmin()].tolist()
    return rows, columns


def fitted(size: Size, canvas: Size, side: int, enlarges: bool) -> Size:
    """An image's size in its canvas: its shape is kept, and without ``enlarges`` it grows to one tile at most.

    Where the canvas bounds an edge, transformers divides float32 tensors, otherwise Python's numbers.
    """
    bounds = [edge if enlarges else min(max(own, side), edge) for own, edge in zip(size, canvas, strict=True)]
    tensors = [enlarges or edge < max(own, side) for own, edge in zip(size, canvas, strict=True)]
    down, across = (
        np.float32(bound) / np.float32(own) if tensor else bound / own
        for bound, own, tensor in zip(bounds, size, tensors, strict=True)
    )
    if across < down:
        return max(min(math.floor(_times(size[0], across)), bounds[0]), 1), bounds[1]
    return bounds[0], max(min(math.floor(_times(size[1], down)), bounds[1]), 1)


def _times(pixels: int, scale: Any) -> Any:
    """The product in the scale's precision."""
    return np.float32(pixels) * scale if isinstance(scale, np.float32) else pixels * scale


def resized(image: np.ndarray, size: Size) -> np.ndarray:
    """Resize with a triangle filter, antialiased: columns first, then rows; bytes in between."""
    for axis in (1, 0):
        if image.shape[axis] != size[axis]:
            image = _along(image, axis, size[axis])
    return image


def _along(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The image with ``size`` pixels along an axis."""
    first, weights, bits = _taps(image.shape[axis], size)
    shape = [1, 1, 1]
    shape[axis] = size
    total = np.full((*image.shape[:axis], size, *image.shape[axis + 1 :]), 1 << (bits - 1), np.int32)
    for tap in range(weights.shape[1]):
        at = np.minimum(first + tap, image.shape[axis] - 1)
        total += image.take(at, axis).astype(np.int32) * weights[:, tap].reshape(shape)
    return np.clip(total >> bits, 0, 255).astype(np.uint8)


def _taps(size: int, new: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(the first pixel that each new one reads [new], weights [new, taps] int32, their fraction's bits)."""
    scale = size / new
    support = max(scale, 1.0)
    centre = scale * (np.arange(new) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), size) - first
    taps = np.arange(min(int(count.max()), 2 * math.ceil(support) + 1))
    distance = np.abs((taps + first[:, None] - centre[:, None] + 0.5) * (1.0 / support))
    weights = np.where(taps < count[:, None], np.maximum(1.0 - distance, 0.0), 0.0)
    weights /= weights.sum(1, keepdims=True)
    bits = next(bits for bits in range(23) if bits == 22 or int(0.5 + weights.max() * (1 << (bits + 1))) >= 1 << 15)
    return first, (0.5 + weights * (1 << bits)).astype(np.int32), bits


def _numbers(rescale: float, mean: Any, std: Any) -> np.ndarray:
    """[3, 256] float32: each channel's number for a byte, rounded to bfloat16 after each step."""
    scaled = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(rescale))
    mean, std = (_bfloat16(np.array(each, np.float32))[:, None] for each in (mean, std))
    return _bfloat16(_bfloat16(scaled - mean) / std)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to the nearest of bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
