"""Images and frames in a caller's memory (Pillow images, arrays, tensors), as bytes for the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.types import BadRequest

MODES = ("L", "LA", "RGB", "RGBA")
CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class Payload:
    """One image on its way to the worker.

    form: "file" (encoded), "base64" (of that), or "pixels". mode, shape: of pixels: Pillow's mode, and (columns, rows).
    """

    form: str
    data: bytes
    mode: str = ""
    shape: tuple[int, int] = (0, 0)

    def described(self) -> dict[str, Any]:
        """All fields except the bytes."""
        return {"form": self.form, "size": len(self.data), "mode": self.mode, "shape": list(self.shape)}


def image_payload(value: Any, param: str) -> Payload:
    """The payload of a Pillow image, an encoded file as bytes, or uint8 pixels [rows, columns, channels] or [rows,
    columns].

    Raises BadRequest.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Payload("file", bytes(value))
    if _is_pillow(value):
        return _of_pillow(value, param)
    array = _array(value, param)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in CHANNELS or not array.size:
        raise BadRequest(f"{param} has shape {array.shape}; give [rows, columns, channels] with 1, 3 or 4.", param)
    rows, columns, channels = array.shape
    return Payload("pixels", np.ascontiguousarray(array).tobytes(), CHANNELS[channels], (columns, rows))


def frames_of(value: Any, param: str) -> Sequence[Any]:
    """The frames of a video: a list, or an array [frames, rows, columns, channels]. Raises BadRequest."""
    if isinstance(value, (list, tuple)):
        return value
    array = _array(value, param)
    if array.ndim != 4:
        raise BadRequest(f"{param} has shape {array.shape}; give [frames, rows, columns, channels], or a list.", param)
    return list(array)


def with_metadata(value: Any) -> tuple[Any, float | None]:
    """(frames, fps) of vLLM's form of a video, (frames, metadata) with ``fps``; fps is None without metadata."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value[0], value[1].get("fps")
    return value, None


def _is_pillow(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") or hasattr(value, "getbands")


def _of_pillow(image: Any, param: str) -> Payload:
    try:
        from PIL import ImageOps

        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("P", "PA") or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
        elif image.mode.startswith("I"):
            image = _narrowed(image)
        elif image.mode not in MODES:
            image = image.convert("RGB")
        return Payload("pixels", image.tobytes(), image.mode, image.size)
    except BadRequest:
        raise
    except Exception as error:
        raise BadRequest(f"{param} is an image that cannot be read: {error}.", param) from None


def _narrowed(image: Any) -> Any:
    """Convert 16 bits per channel to 8."""
    from PIL import Image

    return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))


def _array(value: Any, param: str) -> np.ndarray:
    """An array or tensor as uint8. Raises BadRequest for other numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise BadRequest(
            f"{param} is a {type(value).__name__}; give a Pillow image, or an array or tensor of bytes.", param
        )
    if value.dtype != np.uint8:
        raise BadRequest(f"{param} has numbers of type {value.dtype}; give uint8, from 0 to 255.", param)
    return value
