"""Images and videos before and after loading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.types import Vectors

Kind = Literal["image", "video"]
IMAGE: Kind = "image"
VIDEO: Kind = "video"
WITH_ARTICLE = {"image": "an image", "video": "a video"}


@dataclass(frozen=True)
class Options:
    """Preprocessing settings of an item.

    None: the checkpoint processor's default.

    min_pixels, max_pixels: bounds after resizing, of an image, or of a video as its processor counts them. fps: frames
    per second: the rate of a list of frames, or the sampling rate of an animated file. num_frames: number of frames
    sampled evenly from an animated file. background: red, green and blue under transparent pixels.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    background: tuple[int, int, int] = (255, 255, 255)


@dataclass(frozen=True)
class MediaSource:
    """An image or video of a request.

    param: the caller's name of it. content: a URL (data:, http:, https:, file:) or plain base64; a Pillow image, or an
    array [rows, columns, channels] of bytes; for a video a list of these, or an array [frames, rows, columns,
    channels]; None if ``uuid`` names an item that is loaded already. uuid: the caller's name of the content. owner: the
    name of the client's API key, which scopes uuids.
    """

    kind: Kind
    param: str
    content: Any = field(repr=False)
    options: Options = field(default_factory=Options)
    uuid: str | None = None
    owner: str = ""


@dataclass(frozen=True)
class LoadedMedia:
    """A preprocessed item; see ``types.MediaItem`` for its fields.

    timestamps: text before each frame of a video with timestamps: seconds, as printed. tiles: rows and columns of tiles
    of an image that is cut; a tile of the whole image follows if there are several. (0, 0): it is not cut.
    """

    kind: Kind
    digest: bytes
    grid: tuple[int, int, int]
    pixels: Vectors = field(repr=False)
    seconds: float = 0.0
    timestamps: tuple[str, ...] = ()
    tiles: tuple[int, int] = (0, 0)


def shown(value: object) -> str:
    """A caller's value, short enough for a sentence. Only its beginning is read, because it may be megabytes."""
    text = repr(value[:80] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= 80 else text[:79] + "…"
