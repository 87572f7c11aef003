"""Images that keep their shape, with a longest edge, and become rows of tokens: Pixtral. Runs in the worker's process
only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.media.decoding.images import InvalidImage

LONGEST = 200
"""Most times that an image may be as long as wide."""


@dataclass(frozen=True)
class RowImages:
    """A processor of the checkpoint that bounds the longest edge, and rounds both edges up to whole tokens.

    processor: transformers'. patch_size: pixels. merge: side of a token in patches.
    """

    processor: Any
    patch_size: int
    merge: int

    @classmethod
    def of(cls, processor: Any, vision: Mapping[str, Any]) -> RowImages:
        """Raises ValueError for settings that contradict config.json, or that are not supported."""
        patch = vision["patch_size"]
        own = {name: processor.patch_size[name] for name in ("height", "width")}
        if own != {"height": patch, "width": patch}:
            raise ValueError(f"its patch_size is {own}; config.json asks for {patch} pixels on both sides")
        if getattr(processor, "do_center_crop", False):
            raise ValueError("do_center_crop, which cuts an image, is not supported; set it to false")
        return cls(processor, patch, vision["merge"])

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise InvalidImage for bounds of a request: the checkpoint bounds the longest edge instead."""
        if message["min_pixels"] is not None or message["max_pixels"] is not None:
            raise InvalidImage(
                f"is resized to at most {self.processor.size['longest_edge']} pixels on an edge by this model; leave "
                "out min_pixels and max_pixels."
            )

    def patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · patch_size²] float32, those of a token next to each other, and their grid."""
        width, height = image.size
        if max(width, height) > LONGEST * min(width, height):
            raise InvalidImage(f"has {width} x {height} pixels, more than {LONGEST} times as long as wide; crop it.")
        patch, merge, side = self.patch_size, self.merge, self.patch_size * self.merge
        sizes = {"height": side, "width": side}
        (pixels,) = self.processor.preprocess([image], patch_size=sizes, return_tensors="np")["pixel_values"]
        rows, columns = (size // side for size in pixels.shape[1:])
        parts = pixels.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        flat = np.ascontiguousarray(parts, dtype=np.float32).reshape(-1, 3 * patch**2)
        return flat, (1, rows * merge, columns * merge)
