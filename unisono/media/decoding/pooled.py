"""Images that keep their shape and become a bounded number of tokens: Gemma 4. Runs in the worker's process only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.media.decoding.images import InvalidImage


@dataclass(frozen=True)
class PooledImages:
    """A processor of the checkpoint that resizes an image to at most ``max_soft_tokens`` tokens.

    processor: transformers'. patch_size: pixels. merge: side of a token in patches.
    """

    processor: Any
    patch_size: int
    merge: int

    @classmethod
    def of(cls, processor: Any, vision: Mapping[str, Any]) -> PooledImages:
        """Raises ValueError for settings that contradict config.json, or that are not supported."""
        own = {"patch_size": processor.patch_size, "pooling_kernel_size": processor.pooling_kernel_size}
        wanted = {"patch_size": vision["patch_size"], "pooling_kernel_size": vision["merge"]}
        if own != wanted:
            raise ValueError(f"it has {own}; config.json asks for {wanted}")
        return cls(processor, vision["patch_size"], vision["merge"])

    def check(self, message: Mapping[str, Any]) -> None:
        """Raise InvalidImage for bounds of a request: the checkpoint bounds tokens instead."""
        if message["min_pixels"] is not None or message["max_pixels"] is not None:
            raise InvalidImage(
                f"is resized to at most {self.processor.max_soft_tokens} tokens by this model; leave out min_pixels "
                "and max_pixels."
            )

    def patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · patch_size²] float32 from -1 to 1, those of a token next to each other, and
        their grid.
        """
        found = self.processor.preprocess([image], return_tensors="np")
        places = found["image_position_ids"][0]
        used = places[:, 0] >= 0
        columns, rows = (int(size) + 1 for size in places[used].max(0))
        pixels = found["pixel_values"][0][used].astype(np.float32)
        merge = self.merge
        parts = pixels.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 1, 3, 4)
        shifted = 2 * (parts.reshape(rows * columns, -1) - np.float32(0.5))
        return np.ascontiguousarray(shifted), (1, rows, columns)
