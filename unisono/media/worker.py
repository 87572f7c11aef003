"""The process that decodes images and videos: Pillow, and the checkpoint's image processor on its PIL backend.

A fork of it serves one item after the other. The kernel ends it after too much processor time, and allocations beyond
the memory limit fail (``sandbox/forks.py``). The caller imports nothing of it, and it imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unisono.media.decoding import images as image_decoding
from unisono.media.decoding import videos
from unisono.media.decoding.pooled import MergedImages, PooledImages, PooledVideos, minutes
from unisono.media.decoding.rows import RowImages
from unisono.media.decoding.squares import SquareImages
from unisono.media.decoding.tiles import TiledImages
from unisono.media.memory import memory_file
from unisono.sandbox.channel import ForkChannel
from unisono.sandbox.forks import keep_freed_memory, limit_memory, limit_time, serve
from unisono.types.media_item import DIGEST_BYTES

KINDS: dict[str, type[SquareImages] | type[PooledImages] | type[RowImages] | type[TiledImages]] = {
    "Gemma3ImageProcessor": SquareImages,
    "Gemma4ImageProcessor": PooledImages,
    "PixtralImageProcessor": RowImages,
    "Gemma4UnifiedImageProcessor": MergedImages,
    "Llama4ImageProcessor": TiledImages,
}
"""Beginning of the name of transformers' image processor -> the class that uses it. Others are as Qwen2-VL's."""
LIST_FPS = 2.0
"""Default rate of a list of frames, frames per second: Qwen's models were trained with it."""
MAX_FILE_FRAMES = 10_000
"""Most frames of an animated file."""


def main(descriptor: int) -> None:
    """Fork a decoding process for each message."""
    serve(descriptor, _begin)


def _begin(first: list[Any]) -> Any:
    import sys

    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without it: 4 s and 300 MB less
    (setup,) = first
    try:
        decoder: MediaDecoder | str = MediaDecoder.of(setup)
    except Exception as error:  # transformers raises any exception here
        decoder = f"{type(error).__name__}: {error}"[:1000]
    return lambda channel, message: _serve_all(channel, decoder, setup)


def _serve_all(channel: ForkChannel, decoder: MediaDecoder | str, setup: dict[str, Any]) -> None:
    limit_memory(setup["memory"])
    keep_freed_memory()
    while True:
        message, descriptors = channel.receive()
        limit_time(message["seconds"])
        if isinstance(decoder, str):
            answer, data = ["broken", decoder], None
        else:
            answer, data = _answer(decoder, message, descriptors, setup)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, answer, data)
        data = None
        limit_time(0)


def _answer(
    decoder: MediaDecoder, message: dict[str, Any], descriptors: list[int], setup: dict[str, Any]
) -> tuple[Any, Any]:
    """The result of an item: a list for the message, and its pixels."""
    if message["kind"] == "check":
        return ["item", {"videos": decoder.videos is not None}], None
    try:
        payloads = _payloads(message["payloads"], descriptors)
        facts, pixels = getattr(decoder, message["kind"])(payloads, message)
        return ["item", facts], pixels
    except image_decoding.InvalidImage as error:
        return ["bad", str(error)], None
    except (MemoryError, OverflowError):
        return ["bad", f"takes more than {setup['memory'] >> 20} MiB to decode; scale it down."], None
    except Exception as error:
        return ["bad", f"cannot be decoded: {type(error).__name__}: {' '.join(str(error).split())[:200]}."], None


def _send(channel: ForkChannel, answer: list[Any], data: Any) -> None:
    """Send an answer; its pixels go through a file in memory."""
    if data is None:
        channel.send(answer)
        return
    descriptor = memory_file()
    try:
        with open(os.dup(descriptor), "wb") as file:
            file.write(data)
        channel.send(answer, [descriptor])
    finally:
        os.close(descriptor)


def _payloads(described: list[dict[str, Any]], descriptors: list[int]) -> list[tuple[dict[str, Any], bytes]]:
    """Each payload's description with its bytes, which are concatenated in the file of the message."""
    size = sum(one["size"] for one in described)
    found, start = [], 0
    with mmap.mmap(descriptors[0], max(1, size), access=mmap.ACCESS_READ) if size else _Nothing() as data:
        for one in described:
            found.append((one, data[start : start + one["size"]]))
            start += one["size"]
    return found


class _Nothing:
    def __enter__(self) -> bytes:
        return b""

    def __exit__(self, *error: object) -> None:
        pass


@dataclass
class MediaDecoder:
    """The processors of one checkpoint.

    images: transformers' processor, or one for images of one size. setup: dtype, max_tokens of an item, max_bytes,
    max_pixels, max_frames.
    """

    images: Any
    videos: Any
    setup: dict[str, Any]

    @classmethod
    def of(cls, setup: dict[str, Any]) -> MediaDecoder:
        """The processors of the checkpoint in ``setup["directory"]``. Raises any exception for broken files."""
        Image.init()  # Pillow's readers, once for all forks
        directory = Path(setup["directory"])
        images, name = _image_processor(directory)
        own_kind = next((kind for beginning, kind in KINDS.items() if name.startswith(beginning)), None)
        if own_kind is not None:
            own_images = own_kind.of(images, setup["vision"])
            if not isinstance(own_images, PooledImages):
                return cls(own_images, None, setup)
            return cls(own_images, PooledVideos.of(videos.own_config(directory), own_images), setup)
        if "image_grid_thw" not in images.model_input_names:
            raise ValueError(f"its image processor is a {type(images).__name__}; those of Qwen2-VL and later are known")
        own = {
            "patch_size": images.patch_size,
            "merge": images.merge_size,
            "temporal_patch_size": images.temporal_patch_size,
        }
        if wrong := {name: value for name, value in own.items() if setup["vision"].get(name, value) != value}:
            raise ValueError(f"its preprocessor_config.json has {wrong}, which config.json contradicts")
        raw = directory / "preprocessor_config.json"
        config = json.loads(raw.read_text(encoding="utf-8")) if raw.is_file() else {}
        rules, rate = videos.video_rules(directory, config), setup["vision"].get("tokens_per_second")
        timed = rate == 0 and not setup["vision"].get("even_frames")
        if rules is not None and rate is not None and rules.timestamps != timed:
            raise ValueError("preprocessor_config.json and config.json disagree about video timestamps")
        return cls(images, rules, setup)

    # ---- images ---------------------------------------------------------------------------------

    def image(
        self, payloads: list[tuple[dict[str, Any], bytes]], message: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """One image: grid and digest, and its patches' bytes. An animated file gives its first frame."""
        ((payload, data),) = payloads
        image = self._opened(payload, data)
        width, height = image.size
        image_decoding.check_size(width, height, self.setup["max_pixels"])
        own = self.images
        if isinstance(own, (SquareImages, PooledImages, RowImages, TiledImages)):
            own.check(message)
            upright = image_decoding.decoded(image, tuple(message["background"]))
            pixels, own_grid = own.patches(upright)
            self._check_tokens(len(pixels), own_grid[0], f"{width} x {height} pixels")
            facts, data = self._packed("image", pixels, own_grid, 0.0, [])
            return facts | {"tiles": own.tiles(*upright.size) if isinstance(own, TiledImages) else (0, 0)}, data
        bounds = self._bounds(message)
        if max(width, height) / min(width, height) > 200:
            raise image_decoding.InvalidImage(
                f"has {width} x {height} pixels, more than 200 times as long as wide; crop it."
            )
        if _orientation(image) in (5, 6, 7, 8):
            width, height = height, width
        count = self.images.get_number_of_image_patches(
            height, width, {"min_pixels": bounds["shortest_edge"], "max_pixels": bounds["longest_edge"]}
        )
        self._check_tokens(count, 1, f"{width} x {height} pixels")
        rgb = image_decoding.decoded(image, tuple(message["background"]))
        found = self.images.preprocess([rgb], size=bounds, return_tensors="np")
        (grid,) = found["image_grid_thw"].tolist()
        return self._packed("image", found["pixel_values"], grid, 0.0, [])

    def _bounds(self, message: dict[str, Any]) -> dict[str, int]:
        size = self.images.size
        shortest, longest = message["min_pixels"], message["max_pixels"]
        found = {
            "shortest_edge": size["shortest_edge"] if shortest is None else shortest,
            "longest_edge": size["longest_edge"] if longest is None else longest,
        }
        return _ordered(found, shortest, longest)

    def _opened(self, payload: dict[str, Any], data: bytes) -> Any:
        if payload["form"] == "pixels":
            return Image.frombytes(payload["mode"], tuple(payload["shape"]), data)
        return image_decoding.opened(image_decoding.unpacked(payload, data), self.setup["max_bytes"])

    def _check_tokens(self, patches: int, frames: int, what: str) -> None:
        tokens, most = patches // self.setup["vision"]["merge"] ** 2, self.setup["max_tokens"]
        if tokens > most:
            raise image_decoding.InvalidImage(
                f"has {what}, which make {tokens} tokens; the model's context has room for {most}. Scale it down, or "
                "set max_pixels."
            )
        each, most = tokens // frames, self.setup["max_frame_tokens"]
        if each > most:
            raise image_decoding.InvalidImage(
                f"has {what}, which make {each} tokens a frame; the encoder takes {most}. Scale it down, or set "
                "max_pixels."
            )

    def _packed(
        self, kind: str, pixels: Any, grid: Sequence[int], seconds: float, stamps: list[str]
    ) -> tuple[dict[str, Any], Any]:
        """Properties of an item, and its patches as bytes in the model's dtype."""
        data = as_dtype(pixels, self.setup["dtype"])
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        digest.update(f"{kind} {list(grid)} {seconds!r} {self.setup['dtype']}".encode())
        digest.update(data)
        facts = {"grid": list(grid), "digest": digest.digest(), "size": int(pixels.shape[1]), "seconds": seconds}
        return facts | {"timestamps": stamps, "tiles": (0, 0)}, data

    # ---- videos -----------------------------------------------------------------------------------

    def video(
        self, payloads: list[tuple[dict[str, Any], bytes]], message: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """A video: a list of frames, or one animated file."""
        rules = self.videos
        if rules is None:
            raise image_decoding.InvalidImage(
                "is a video, and this checkpoint has no video processor that is known here."
            )
        if not payloads:
            raise image_decoding.InvalidImage("has no frames; give at least one.")
        frames = _Frames([self._opened(*one) for one in payloads], self.setup["max_pixels"], message["background"])
        most, fps, count = self.setup["max_frames"], message["fps"], message["num_frames"]
        if frames.listed:
            rate, indices = fps or LIST_FPS, list(range(frames.total))
            if frames.total > most:
                raise image_decoding.InvalidImage(
                    f"has {frames.total} frames; the limit is {most} (--media-max-frames)."
                )
        else:
            rate = frames.rate()
            sampled = rules.sampled if isinstance(rules, PooledVideos) else partial(videos.sampled, rules)
            indices = sampled(frames.total, rate, fps, count, most)
        if isinstance(rules, PooledVideos):
            return self._pooled_frames(rules, frames, indices, rate, message)
        if len(indices) == 1:  # as long as one patch
            indices *= rules.temporal_patch_size
        width, height = frames.size
        bounds = message["min_pixels"], message["max_pixels"]
        rows, columns = videos.resized(rules, len(indices), height, width, bounds)
        steps = -(-len(indices) // rules.temporal_patch_size)
        what = f"{len(indices)} frames of {width} x {height} pixels"
        self._check_tokens(steps * (rows // rules.patch_size) * (columns // rules.patch_size), steps, what)

        def normalised(values: np.ndarray) -> np.ndarray:
            return self.images.normalize(self.images.rescale(values, rules.rescale), rules.mean, rules.std)

        pixels, grid = videos.patches(rules, len(indices), lambda i: frames[indices[i]], rows, columns, normalised)
        shown = rate if frames.listed else rate * len(indices) / max(frames.total, len(indices))
        _, stamps = videos.times(rules, indices, rate)
        seconds, _ = videos.times(rules, indices, shown)
        return self._packed("video", pixels, grid, seconds, stamps)

    def _pooled_frames(
        self, rules: PooledVideos, frames: _Frames, indices: list[int], rate: float, message: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """A video whose frames are images of few tokens."""
        self.images.check(message)
        parts: list[np.ndarray] = []
        grid = (1, 0, 0)
        for index in indices:
            pixels, grid = self.images.patches(frames[index], rules.tokens)
            if not parts:
                width, height = frames.size
                what = f"{len(indices)} frames of {width} x {height} pixels"
                self._check_tokens(len(pixels) * len(indices), len(indices), what)
            parts.append(pixels)
        stamps = [minutes(index, rate) for index in indices]
        return self._packed("video", np.concatenate(parts), (len(indices), *grid[1:]), 1 / rate, stamps)


def _image_processor(directory: Path) -> tuple[Any, str]:
    """transformers' image processor of a checkpoint on its PIL backend, and the name of its class.

    Gemma 4 12B's has no such backend: it is Gemma 4's, which resizes alike. Llama 4's has none either: its settings are
    returned.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    # before 5.18 the package exports none without torch
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    config, _ = ImageProcessingMixin.get_image_processor_dict(str(directory), local_files_only=True)
    name = config.get("image_processor_type") or ""
    if name.startswith("Gemma4Unified"):
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_pretrained(str(directory), local_files_only=True), name
    if name.startswith("Llama4"):
        return config, name
    images = AutoImageProcessor.from_pretrained(str(directory), backend="pil", local_files_only=True)
    return images, type(images).__name__


class _Frames:
    """The frames of a video: images of one size, or an animated file."""

    def __init__(self, images: list[Any], most_pixels: int, background: Sequence[int]) -> None:
        red, green, blue = background
        self._images, self._background = images, (red, green, blue)
        self.size = images[0].size
        self.total = getattr(images[0], "n_frames", 1) if len(images) == 1 else len(images)
        self.listed = len(images) > 1 or self.total == 1
        for number, one in enumerate(images):
            image_decoding.check_size(one.size[0], one.size[1], most_pixels)
            if one.size != self.size:
                sizes = [f"{width} x {height}" for width, height in (one.size, self.size)]
                raise image_decoding.InvalidImage(
                    f"has frames of several sizes: frame {number} is {sizes[0]}, frame 0 {sizes[1]}."
                )
        if self.total > MAX_FILE_FRAMES:
            raise image_decoding.InvalidImage(f"has {self.total} frames; files of at most {MAX_FILE_FRAMES} are read.")

    def rate(self) -> float:
        """Frames per second of an animated file."""
        image, milliseconds = self._images[0], 0.0
        for number in range(self.total):
            self._seek(number)
            milliseconds += image.info.get("duration") or 100  # browsers play a duration of 0 as 100 ms
        return 1000 * self.total / milliseconds

    def __getitem__(self, index: int) -> Any:
        if self.listed:
            return image_decoding.decoded(self._images[index if len(self._images) > 1 else 0], self._background)
        self._seek(index)
        return image_decoding.decoded(self._images[0], self._background).copy()

    def _seek(self, number: int) -> None:
        try:
            self._images[0].seek(number)
        except (EOFError, OSError, SyntaxError, ValueError) as error:
            raise image_decoding.InvalidImage(
                f"is damaged at frame {number}: {' '.join(str(error).split())[:100]}."
            ) from None


def _orientation(image: Any) -> int:
    """EXIF's orientation; from 5 on rows and columns are swapped."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # errors are reported when it is decoded
        return 1


def _ordered(found: dict[str, int], shortest: int | None, longest: int | None) -> dict[str, int]:
    """Bounds in order: the one that the request sets moves the other along."""
    if found["shortest_edge"] > found["longest_edge"]:
        moved = "longest_edge" if longest is None and shortest is not None else "shortest_edge"
        other = "shortest_edge" if moved == "longest_edge" else "longest_edge"
        found[moved] = found[other]
    return found


def as_dtype(values: Any, dtype: str) -> bytes:
    """float32 numbers as bytes of float32, float16 or bfloat16, rounded to the nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        bits = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
        return (bits >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16).tobytes() if dtype == "float16" else values.tobytes()
