"""Images that keep their shape and become a bounded number of tokens: Gemma 4. Runs in the worker's process only.

Frames of its videos are such images with a lower bound (transformers/models/gemma4/video_processing_gemma4.py, 5.24).
"""

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

    def patches(self, image: Any, most: int | None = None) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · patch_size²] float32 from -1 to 1, those of a token next to each other, and
        their grid. most: tokens, by default the checkpoint's bound of images.
        """
        tokens = self._tokens(image, most)
        rows, columns, pixels = len(tokens) * self.merge, tokens.shape[1] * self.merge, tokens.shape[-1]
        shifted = 2 * (tokens.reshape(rows * columns, pixels) - np.float32(0.5))
        return np.ascontiguousarray(shifted), (1, rows, columns)

    def _tokens(self, image: Any, most: int | None) -> np.ndarray:
        """Patches by token [rows / k, columns / k, k, k, 3 · patch_size²] float32 from 0 to 1, k = merge."""
        most = self.processor.max_soft_tokens if most is None else most
        found = self.processor.preprocess([image], max_soft_tokens=most, return_tensors="np")
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

    def patches(self, image: Any, most: int | None = None) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Patches of an RGB image [n, 3 · (merge · patch_size)²] float32 from 0 to 1 in rows, and their grid. most: see
        :meth:`PooledImages.patches`."""
        tokens, patch = self._tokens(image, most), self.patch_size
        rows, columns = tokens.shape[:2]
        lines = tokens.reshape(rows * columns, self.merge, self.merge, patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        return np.ascontiguousarray(lines).reshape(rows * columns, -1), (1, rows, columns)


@dataclass(frozen=True)
class PooledVideos:
    """The settings of a checkpoint's video processor. A frame has a time of its own, as text.

    tokens: most of a frame. frames: number of frames that a file is sampled to; fps: or their rate. samples: False: all
    frames of a file are taken.
    """

    tokens: int = 70
    frames: int | None = 32
    fps: float | None = None
    samples: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any], images: PooledImages) -> PooledVideos:
        """Read them. Raises ValueError for patches other than those of images, or other numbers of tokens.

        config: of the video processor; what it lacks has transformers' defaults.
        """
        for name in ("patch_size", "pooling_kernel_size"):
            own = getattr(images.processor, name)
            if config.get(name, own) != own:
                raise ValueError(f"its video processor has {name}={config[name]}; its image processor has {own}")
        tokens = config.get("max_soft_tokens") or cls.tokens
        if tokens not in TOKENS:
            raise ValueError(f"its video processor has max_soft_tokens={tokens}; it must be one of {TOKENS}")
        frames, samples = config.get("num_frames", cls.frames), config.get("do_sample_frames", True)
        return cls(tokens, frames, config.get("fps"), bool(samples))

    def sampled(self, total: int, rate: float, fps: float | None, count: int | None, most: int) -> list[int]:
        """Indices of the frames that are used, of ``total`` frames at ``rate`` per second.

        fps, count: the request's settings, if any. most: the server's limit.
        """
        if count is None and (fps or (self.samples and self.frames is None and self.fps)):
            count = int(total / rate * (fps or self.fps or rate))
        elif count is None:
            count = self.frames if self.samples else total
        count = max(1, min(count or total, total, most))
        return [int(index) for index in np.arange(0, total, total / count)[:count]]


TOKENS = (70, 140, 280, 560, 1120)
"""Bounds of tokens for which transformers' processors resize."""


def minutes(index: int, rate: float) -> str:
    """Text of the time of a frame, ``mm:ss``."""
    seconds = index / rate
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
