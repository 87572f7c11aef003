"""Encoded images to pixels: the formats that Pillow may open, and the refusals before decoding.

Runs in the worker's process only (``worker.py``).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", *(["AVIF"] if features.check("avif") else [])]
"""Formats that are opened. Pillow's other formats start programs (EPS), are drawings, or are hardly ever used."""
SUPPORTED = "PNG, JPEG, WebP, GIF, BMP and TIFF"
FILMS = {b"ftyp": "an MP4 or QuickTime", b"\x1a\x45\xdf\xa3": "a Matroska or WebM", b"RIFF": "an AVI"}
"""Magic numbers of video files (``ftyp``: after 4 bytes)."""
WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Modes of images with 16 bits per channel."""


class InvalidImage(Exception):
    """An image that cannot be used; the text is the end of a sentence that begins with its parameter."""


def unpacked(payload: Mapping[str, Any], data: bytes) -> bytes:
    """The bytes of a file, sent raw or in base64. Raises Bad."""
    if payload["form"] != "base64":
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImage("is not base64: send the standard alphabet without line breaks, padded with '='.") from None


def opened(data: bytes, most_bytes: int) -> Image.Image:
    """An image with its header parsed and its pixels not yet decoded. Raises Bad."""
    if not data:
        raise InvalidImage("has 0 bytes; send an image.")
    if len(data) > most_bytes:
        raise InvalidImage(f"is larger than {most_bytes >> 20} MiB (--media-max-mb); send less.")
    Image.MAX_IMAGE_PIXELS = None  # check_size has the limit
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidImage(_why_unknown(data)) from None
    except Exception as error:  # Pillow's readers raise any exception on hostile files
        raise InvalidImage(f"cannot be opened as an image: {_line(error)}.") from None


def _why_unknown(data: bytes) -> str:
    head = data[:512].lstrip().lower()
    if b"<svg" in head or head.startswith((b"<?xml", b"<!doctype svg")):
        return f"is an SVG, a drawing that has no pixels: render it to PNG. Taken are {SUPPORTED}."
    film = next((name for mark, name in FILMS.items() if mark in (data[4:8], data[: len(mark)])), None)
    if film is not None and not (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return f"is {film} file, and no video decoder is part of this server: send its frames as images."
    return f"is not an image in a supported format: {SUPPORTED}."


def check_size(width: int, height: int, most: int) -> None:
    """Raise Bad for an image with more than ``most`` pixels."""
    if width < 1 or height < 1:
        raise InvalidImage(f"has {width} x {height} pixels; it must have some.")
    if width * height > most:
        raise InvalidImage(
            f"has {width} x {height} = {width * height} pixels; at most {most} are decoded (--media-max-pixels). "
            "Scale it down."
        )


def decoded(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """The current frame in RGB, upright, transparent pixels over ``background``. Raises Bad."""
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        return _rgb(turned, background)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidImage(f"is damaged: {_line(error)}.") from None


def _rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode in WIDE_MODES:
        wide = np.asarray(image)
        return Image.fromarray((np.clip(wide, 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, (*background, 255)), over).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
