"""Loads sources: gets the bytes, has them decoded and preprocessed, caches items.

Every function blocks its thread. The server calls them in worker threads, never in its event loop.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.media.decoding.frames import Payload, frames_of, image_payload
from unisono.media.fetching.fetch import Fetcher
from unisono.media.fetching.files import read_file
from unisono.media.fetching.sources import WITH_ARTICLE, LoadedMedia, MediaSource
from unisono.media.settings import MediaSettings
from unisono.media.workers import Workers
from unisono.types import BadRequest, CheckpointError, Vectors

SEEING = (
    "Qwen3-VL, Qwen2.5-VL, Qwen2-VL, Qwen3.5, Gemma 3, Gemma 4, Mistral 3 and Llama 4 checkpoints with a vision tower "
    "see (docs/reference/models.md)"
)
"""The models that take images, for the refusal by other models."""
CHECKED = ("merge", "patch_size", "temporal_patch_size", "tokens_per_second", "even_frames", "side")
"""Settings in which the checkpoint's processors must agree with the tower."""
FILM_TYPE = "video/jpeg"
"""Media type of vLLM's data URL for the frames of a video: base64 each, separated by commas."""


@dataclass(frozen=True)
class Vision:
    """The properties of a vision tower that the frontend needs, from the engine's ``info()["vision"]``.

    merge: side of an embedding in patches. image_token_id, video_token_id: placeholders of a prompt; -1: no videos.
    vision_start_token_id: -1: no token opens an image.
    side: rows and columns of every image in patches, 0: any. placeholder_token_id, around, row_end, picture_end,
    tile_marks, even_frames, frame_time, between_frames: see :class:`unisono.models.vision.config.VisionConfig`.
    tokens_per_second: 0 if text gives the times of a video's frames (without even_frames); None if unknown.
    max_frame_tokens: most tokens of an image, of one frame of a video, or of a tile.
    """

    merge: int
    patch_size: int
    temporal_patch_size: int
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int | None = None
    tokens_per_second: float | None = None
    max_frame_tokens: int | None = None
    side: int = 0
    placeholder_token_id: int = -1
    around: str = ""
    row_end: str = ""
    picture_end: str = ""
    frame_time: str = "<{} seconds>"
    between_frames: str = ""
    tile_marks: Sequence[str] = ()
    even_frames: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Vision | None:
        """From the engine's dict; None for a model without a tower."""
        if value is None:
            return None
        return cls(**{name: value[name] for name in cls.__dataclass_fields__ if name in value})


class MediaLoader:
    """Loader of the images and videos of one model's requests.

    vision: None refuses all. directory: the checkpoint's. dtype: the model's, by name. max_tokens: of one item.
    fetcher: replaces that of ``settings`` in tests.
    """

    def __init__(
        self,
        vision: Vision | None,
        directory: Path | None,
        settings: MediaSettings,
        dtype: str,
        max_tokens: int,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.vision, self.settings, self._directory = vision, settings, directory
        self.setup = {
            "directory": str(directory),
            "dtype": dtype,
            "max_tokens": max_tokens,
            "max_frame_tokens": (vision and vision.max_frame_tokens) or max_tokens,
            "max_bytes": settings.max_bytes,
            "max_pixels": settings.media_max_pixels,
            "max_frames": settings.media_max_frames,
            "vision": {name: getattr(vision, name) for name in CHECKED} if vision else {},
        }
        self._dtype = dtype
        self._fetcher = fetcher or Fetcher(settings.allowed_media_domains, settings.max_bytes, settings.media_timeout)
        self._kept = _LoadedCache(int(settings.mm_processor_cache_gb * 2**30))

    @cached_property
    def workers(self) -> Workers:
        """The decoding processes."""
        return Workers(self.setup, self.settings.media_processes)

    @property
    def has_processor(self) -> bool:
        """True if the checkpoint has an image processor."""
        names = ("preprocessor_config.json", "processor_config.json")
        return self._directory is not None and any((self._directory / name).is_file() for name in names)

    def prepare(self) -> None:
        """Start a decoding process, if the model takes images.

        Raises CheckpointError for an image processor that cannot be used.
        """
        if self.vision is None or not self.has_processor:
            return
        became, facts, _ = self.workers.ask({"kind": "check"}, [])
        if became != "item":
            raise CheckpointError(f"The image processor in {self._directory} cannot be used: {facts}.")

    def close(self) -> None:
        """End the processes."""
        if "workers" in self.__dict__:
            self.workers.close()

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise BadRequest if this model takes no images, or fewer, before any of them is read."""
        if not sources:
            return
        first = sources[0]
        if self.vision is None:
            raise BadRequest(
                f"{first.param} is {WITH_ARTICLE[first.kind]}, and this model takes text only. {SEEING}.",
                first.param,
                "unsupported_media",
            )
        if (video := next((one for one in sources if one.kind == "video"), None)) and self.vision.video_token_id < 0:
            raise BadRequest(
                f"{video.param} is a video, and this model takes images only: send its frames as images.",
                video.param,
                "unsupported_media",
            )
        if not self.has_processor:
            raise BadRequest(
                f"{first.param} is {WITH_ARTICLE[first.kind]}, and this checkpoint has no "
                "preprocessor_config.json, which describes the preprocessing of images; copy it from the base model.",
                first.param,
                "unsupported_media",
            )
        for kind, most in self.settings.limit_mm_per_prompt.items():
            found = [one for one in sources if one.kind == kind]
            if len(found) > most:
                raise BadRequest(
                    f"{found[most].param} is {kind} {most + 1} of {len(found)}; the limit per prompt is "
                    f"{most} (--limit-mm-per-prompt).",
                    found[most].param,
                    "too_many_media",
                )

    def load_all(self, sources: Sequence[MediaSource]) -> list[LoadedMedia]:
        """Load the items of one prompt, several at once. Raises BadRequest."""
        self.check(sources)
        if len(sources) < 2:
            return [self.load(one) for one in sources]
        with ThreadPoolExecutor(min(8, len(sources)), "media") as threads:
            return list(threads.map(self.load, sources))

    def load(self, source: MediaSource) -> LoadedMedia:
        """Load one item. Raises BadRequest."""
        if source.content is None:
            return self._kept_by_name(source)
        payloads = self._payloads(source)
        key = _key(source, payloads)
        loaded = self._kept.get(key)
        if loaded is None:
            loaded = self._decoded(source, payloads)
        self._kept.put(key, loaded, source.uuid and _name(source))
        return loaded

    def _kept_by_name(self, source: MediaSource) -> LoadedMedia:
        loaded = self._kept.get(_name(source))
        if loaded is None:
            raise BadRequest(
                f"{source.param} has no content, and {source.uuid!r} is not kept (any more); give the content too.",
                source.param,
            )
        return loaded

    def _payloads(self, source: MediaSource) -> list[Payload]:
        """The encoded bytes, or pixels, of an item."""
        value, param = source.content, source.param
        if source.kind == "image":
            return [self._referred(value, param) if isinstance(value, str) else image_payload(value, param)]
        if isinstance(value, str):
            return self._film(value, param)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return [image_payload(value, param)]
        found = []
        for i, one in enumerate(frames_of(value, param)):
            place = f"{param}[{i}]"
            found.append(self._referred(one, place) if isinstance(one, str) else image_payload(one, place))
        return found

    def _film(self, url: str, param: str) -> list[Payload]:
        """A file, or a list of frames in one data URL."""
        head, comma, rest = url.partition(",")
        if comma and head.lower() == f"data:{FILM_TYPE};base64":
            return [self._base64(one, param) for one in rest.split(",")]
        return [self._referred(url, param)]

    def _referred(self, url: str, param: str) -> Payload:
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            return self._data_url(url, param)
        if scheme.startswith(("http:", "https:")):
            return Payload("file", self._fetcher.fetch(url, param))
        if scheme.startswith("file:"):
            path = self.settings.allowed_local_media_path
            return Payload("file", read_file(url, path, self.settings.max_bytes, param))
        if "://" in url[:40]:
            raise BadRequest(
                f"{param} has a URL of the scheme {url[:40].partition(':')[0]!r}; supported are data:, "
                "and http(s): and file: if the server allows them.",
                param,
            )
        return self._base64(url, param)

    def _data_url(self, url: str, param: str) -> Payload:
        head, comma, rest = url.partition(",")
        if not comma or not head.lower().rstrip().endswith(";base64"):
            raise BadRequest(
                f"{param} is a data URL without base64; send data:image/png;base64,… with the file's bytes.", param
            )
        return self._base64(rest, param)

    def _base64(self, text: str, param: str) -> Payload:
        least = len(text) // 4 * 3 - 2
        if least > self.settings.max_bytes:
            raise BadRequest(
                f"{param} is larger than {self.settings.media_max_mb} MiB (--media-max-mb); send less.", param
            )
        if not text.isascii():
            raise BadRequest(f"{param} is not base64, and no URL that is known.", param)
        return Payload("base64", text.encode())

    def _decoded(self, source: MediaSource, payloads: list[Payload]) -> LoadedMedia:
        options = source.options
        message = {
            "kind": source.kind,
            "payloads": [one.described() for one in payloads],
            "min_pixels": options.min_pixels,
            "max_pixels": options.max_pixels,
            "fps": options.fps,
            "num_frames": options.num_frames,
            "background": list(options.background),
        }
        became, facts, data = self.workers.ask(message, [one.data for one in payloads])
        if became == "broken":
            raise BadRequest(
                f"{source.param} cannot be read, for this checkpoint's image processor cannot be used: {facts}.",
                source.param,
                "unsupported_media",
            )
        if became == "bad":
            raise BadRequest(f"{source.param} {facts}", source.param, "invalid_media")
        frames, rows, columns = facts["grid"]
        pixels = Vectors(self._dtype, facts["size"], data)
        stamps = tuple(facts["timestamps"])
        down, across = facts["tiles"]
        return LoadedMedia(
            source.kind, facts["digest"], (frames, rows, columns), pixels, facts["seconds"], stamps, (down, across)
        )


def _name(source: MediaSource) -> tuple[str, ...]:
    """The key of an item that a client has named."""
    return source.owner, source.kind, source.uuid or ""


def _key(source: MediaSource, payloads: Sequence[Payload]) -> bytes:
    """A hash of everything that a loaded item depends on."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(repr((source.kind, source.options, [one.described() for one in payloads])).encode())
    for one in payloads:
        digest.update(one.data)
    return digest.digest()


class _LoadedCache:
    """An LRU cache of loaded items, ``size`` bytes of pixels. Names refer to items in the cache."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._lock = threading.Lock()
        self._items: OrderedDict[bytes, LoadedMedia] = OrderedDict()
        self._names: OrderedDict[Any, bytes] = OrderedDict()

    def get(self, key: Any) -> LoadedMedia | None:
        with self._lock:
            if not isinstance(key, bytes):
                key = self._names.get(key, b"")
            if (found := self._items.get(key)) is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: bytes, item: LoadedMedia, name: Any = None) -> None:
        with self._lock:
            if key not in self._items and len(item.pixels.data) <= self._size:
                self._items[key] = item
                self._used += len(item.pixels.data)
            if name and key in self._items:
                self._names[name] = key
            while self._used > self._size:
                _, old = self._items.popitem(last=False)
                self._used -= len(old.pixels.data)
            while len(self._names) > 10_000:
                self._names.popitem(last=False)
