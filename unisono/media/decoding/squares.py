"""Images that are resized to one square, whatever their shape: Gemma 3. Runs in the worker's process only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.media.decoding.images import InvalidImage


@dataclass(frozen=True)
class SquareImages:
    """A processor of the checkpoint whose images all have ``side`` rows and columns of patches.

    processor: transformers'. patch_size: pixels. merge: side of a token in patches.
    """

    processor: Any
    side: int
    patch_size: int
    merge: int

    @classmethod
    def of(cls, processor: Any, vision: Mapping[str, Any]) -> SquareImages:
        """Raises ValueError for settings that contradict config.json, or that are not supported."""
        side, patch = vision["side"], vision["patch_size"]
        size = processor.size["height"], processor.size["width"]
        if size != (side * patch, side * patch):
            raise ValueError(f"its size is {size}; config.json asks for {side * patch} pixels on both sides")
        if processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan, which adds crops of an image, is not supported; set it to false")
        return cls(processor, side, patch, vision["merge"])

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise InvalidImage for bounds of a request: there is one size."""
        if message["min_pixels"] is not None or message["max_pixels"] is not None:
            pixels = self.side * self.patch_size
            raise InvalidImage(
                f"is resized to {pixels} x {pixels} pixels by this model; leave out min_pixels and max_pixels."
            )

    def patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image, [side², 3 · patch_size²] float32, those of a token next to each other, and their
        grid.
        """
        (pixels,) = self.processor.preprocess([image], return_tensors="np")["pixel_values"]
        tokens, merge, patch = self.side // self.merge, self.merge, self.patch_size
        parts = pixels.reshape(3, tokens, merge, patch, tokens, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        flat = np.ascontiguousarray(parts, dtype=np.float32).reshape(self.side**2, 3 * patch**2)
        return flat, (1, self.side, self.side)
