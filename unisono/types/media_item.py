"""Images and videos of a prompt as the engine takes them: preprocessed, with the positions that they fill.

``frontend`` makes them, the engine reads them. Holds no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.types.outputs import Vectors

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a video in a prompt.

    digest: DIGEST_BYTES bytes of a hash of everything that its embeddings depend on: kind, grid and pixels.
    grid: (frames, rows, columns) of patches, before merging. One frame is ``temporal_patch_size`` images.
    pixels: [frames * rows * columns, channels * temporal_patch_size * patch_size ** 2], in the order of the
    checkpoint's processor and the model's dtype.
    positions: prompt positions of its embeddings, ascending, one for each merged patch. The prompt's token id there is
    the checkpoint's placeholder.
    seconds: time between two frames of ``grid`` of a video; 0 for an image.
    """

    kind: Literal["image", "video"]
    digest: bytes
    grid: tuple[int, int, int]
    pixels: Vectors
    positions: list[int]
    seconds: float = 0.0
