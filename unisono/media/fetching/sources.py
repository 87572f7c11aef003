"""What is known of a picture or video before and after it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.types import Vectors

Kind = Literal["image", "video"]
IMAGE: Kind = "image"
VIDEO: Kind = "video"
WORDS = {"image": "picture", "video": "video"}


@dataclass(frozen=True)
class Options:
    """How an item is preprocessed. None: as the checkpoint's processor says.

    min_pixels, max_pixels: of a picture, or of a video as its processor counts them, after resizing. fps: frames a
    second: of a list of frames, how fast they follow each other; of an animated file, how many are taken. num_frames:
    how many frames of an animated file are taken, evenly. background: red, green and blue under transparent pixels.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    background: tuple[int, int, int] = (255, 255, 255)


@dataclass(frozen=True)
class MediaSource:
    """A picture or video as a request gives it.

    param: the caller's name of it. given: a URL (data:, http:, https:, file:) or plain base64; a picture of Pillow, an
    array [rows, columns, channels] of bytes; of a video a list of these, or an array [frames, rows, columns, channels];
    None where ``uuid`` names an item that was loaded before. uuid: the caller's name of the content. owner: the name
    of the client's API key; one client's uuids mean nothing to another.
    """

    kind: Kind
    param: str
    given: Any = field(repr=False)
    options: Options = field(default_factory=Options)
    uuid: str | None = None
    owner: str = ""


@dataclass(frozen=True)
class Loaded:
    """A preprocessed item; ``types.MediaItem`` says what its fields are.

    timestamps: of a video whose frames are told apart by text, what stands before each: seconds, as it is written.
    """

    kind: Kind
    digest: bytes
    grid: tuple[int, int, int]
    pixels: Vectors = field(repr=False)
    seconds: float = 0.0
    timestamps: tuple[str, ...] = ()


def shown(value: object) -> str:
    """A value of a caller's, short enough for a sentence. It may be megabytes."""
    text = repr(value[:80] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= 80 else text[:79] + "…"
