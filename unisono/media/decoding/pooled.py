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
        tokens = self._tokens(image)
        rows, columns, pixels = len(tokens) * self.merge, tokens.shape[1] * self.merge, tokens.shape[-1]
        shifted = 2 * (tokens.reshape(rows * columns, pixels) - np.float32(0.5))
        return np.ascontiguousarray(shifted), (1, rows, columns)

    def _tokens(self, image: Any) -> np.ndarray:
        """Patches by token [rows / k, columns / k, k, k, 3 · patch_size²] float32 from 0 to 1, k = merge."""
        found = self.processor.preprocess([image], return_tensors="np")
        places = found["image_position_ids"][0]
        used = places[:, 0] >= 0
        columns, rows = (int(size) + 1 for size in places[used].max(0))
        pixels, merge = found["pixel_values"][0][used].astype(np.float32), self.merge
        return pixels.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 1, 3, 4)


class MergedImages(PooledImages):
    """Gemma 4 12B: the patches of a token are one large patch."""

    @classmethod
    def of(cls, processor: Any, vision: Mapping[str, Any]) -> MergedImages:
        """See :meth:`PooledImages.of`."""
        side = processor.patch_size * processor.pooling_kernel_size
        if side != vision["patch_size"]:
            raise ValueError(f"its patches have {side} pixels a side; config.json asks for {vision['patch_size']}")
        return cls(processor, processor.patch_size, processor.pooling_kernel_size)

    def patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · (merge · patch_size)²] float32 from 0 to 1 in rows, and their grid."""
        tokens, patch = self._tokens(image), self.patch_size
        rows, columns = tokens.shape[:2]
        lines = tokens.reshape(rows * columns, self.merge, self.merge, patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        return np.ascontiguousarray(lines).reshape(rows * columns, -1), (1, rows, columns)
