"""Pictures and frames that callers hold in memory: Pillow's objects, arrays and tensors, as bytes for the worker."""

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
    """One picture on its way to the worker. form: "file" (encoded), "base64" (of that), or "pixels".

    mode, shape: of pixels: Pillow's name of the channels, and (columns, rows).
    """

    form: str
    data: bytes
    mode: str = ""
    shape: tuple[int, int] = (0, 0)

    def described(self) -> dict[str, Any]:
        """Everything but the bytes."""
        return {"form": self.form, "size": len(self.data), "mode": self.mode, "shape": list(self.shape)}


def picture_of(given: Any, param: str) -> Payload:
    """A picture of Pillow, or an array or tensor [rows, columns, channels] (or [rows, columns]) of bytes.

    bytes are an encoded file. Raises BadRequest.
    """
    if isinstance(given, (bytes, bytearray, memoryview)):
        return Payload("file", bytes(given))
    if _is_pillow(given):
        return _of_pillow(given, param)
    array = _array(given, param)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in CHANNELS or not array.size:
        raise BadRequest(f"{param} has shape {array.shape}; give [rows, columns, channels] with 1, 3 or 4.", param)
    rows, columns, channels = array.shape
    return Payload("pixels", np.ascontiguousarray(array).tobytes(), CHANNELS[channels], (columns, rows))


def frames_of(given: Any, param: str) -> Sequence[Any]:
    """The frames of a video: of a list, or of an array [frames, rows, columns, channels]. Raises BadRequest."""
    if isinstance(given, (list, tuple)):
        return given
    array = _array(given, param)
    if array.ndim != 4:
        raise BadRequest(f"{param} has shape {array.shape}; give [frames, rows, columns, channels], or a list.", param)
    return list(array)


def with_metadata(given: Any) -> tuple[Any, float | None]:
    """vLLM's form of a video, (frames, metadata) with ``fps``, taken apart."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return given[0], given[1].get("fps")
    return given, None


def _is_pillow(given: Any) -> bool:
    return type(given).__module__.startswith("PIL.") or hasattr(given, "getbands")


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
        raise BadRequest(f"{param} is a picture that cannot be read: {error}.", param) from None


def _narrowed(image: Any) -> Any:
    """16 bits a channel as 8."""
    from PIL import Image

    return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))


def _array(given: Any, param: str) -> np.ndarray:
    """Bytes of an array or tensor. Raises BadRequest for other numbers."""
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    if not isinstance(given, np.ndarray):
        raise BadRequest(
            f"{param} is a {type(given).__name__}; give a picture of Pillow, or an array or tensor of bytes.", param
        )
    if given.dtype != np.uint8:
        raise BadRequest(f"{param} has numbers of type {given.dtype}; give uint8, from 0 to 255.", param)
    return given
