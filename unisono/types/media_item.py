"""Pictures and videos of a prompt, as the engine takes them: preprocessed, with the positions that they fill.

``frontend`` makes them, the engine reads them. It holds no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.types.outputs import Vectors

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture or a video in a prompt.

    digest: DIGEST_BYTES bytes of a hash of all that its embeddings depend on: kind, grid and pixels. Equal items have
        equal digests.
    grid: (frames, rows, columns) of patches, before merging; one frame is ``temporal_patch_size`` pictures.
    pixels: [frames * rows * columns, channels * temporal_patch_size * patch_size ** 2], as the checkpoint's processor
        orders them, in the model's dtype.
    positions: the prompt positions that its embeddings fill, ascending: one for each merged patch. The prompt's token
        id there is the checkpoint's placeholder.
    seconds: of a video, the time between two frames of ``grid``; 0 for a picture.
    """

    kind: Literal["image", "video"]
    digest: bytes
    grid: tuple[int, int, int]
    pixels: Vectors
    positions: list[int]
    seconds: float = 0.0
