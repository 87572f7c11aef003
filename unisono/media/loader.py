"""Sources to loaded items: brings the bytes, has them decoded and preprocessed, keeps what may be asked for again.

Everything here blocks its thread. The server calls it in threads of its own, so its event loop waits for none of it.
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

from unisono.media.decoding.frames import Payload, frames_of, picture_of
from unisono.media.fetching.fetch import Fetcher
from unisono.media.fetching.files import read_file
from unisono.media.fetching.sources import WORDS, Loaded, MediaSource
from unisono.media.settings import MediaSettings
from unisono.media.workers import Workers
from unisono.types import BadRequest, CheckpointError, Vectors

SEEING = "Qwen3-VL, Qwen2.5-VL and Qwen3.5 checkpoints with a vision tower see (docs/models.md)"
"""Which models take pictures, for those who asked another one."""
CHECKED = ("merge", "patch_size", "temporal_patch_size", "tokens_per_second")
"""What the checkpoint's processors must agree with the tower on."""
FILM_TYPE = "video/jpeg"
"""The media type of a data URL that has the frames of a video, base64 each, between commas: vLLM's form."""


@dataclass(frozen=True)
class Vision:
    """What the frontend has to know of a vision tower, from the engine's ``info()["vision"]``.

    merge: merged patches on a side of an embedding. image_token_id, video_token_id: placeholders of a prompt.
    tokens_per_second: 0 where text tells the times of a video's frames; None where nobody says.
    max_frame_tokens: of a picture or of one frame of a video, at most.
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

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Vision | None:
        """From the engine's dict; None for a model without a tower."""
        if given is None:
            return None
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})


class MediaLoader:
    """Loads the pictures and videos of one model's requests.

    vision: None refuses all. directory: the checkpoint's. dtype: the model's, by name. max_tokens: of one item.
    fetcher: stands in for the one of ``settings`` in tests.
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
        self._kept = _Kept(int(settings.mm_processor_cache_gb * 2**30))

    @cached_property
    def workers(self) -> Workers:
        """The processes that decode."""
        return Workers(self.setup, self.settings.media_processes)

    @property
    def has_processor(self) -> bool:
        """Whether the checkpoint says how pictures become patches."""
        names = ("preprocessor_config.json", "processor_config.json")
        return self._directory is not None and any((self._directory / name).is_file() for name in names)

    def prepare(self) -> None:
        """Start the process that decodes, where there will be something to decode.

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
        """Raise BadRequest where this model takes no pictures, or fewer, before any of them is looked at."""
        if not sources:
            return
        first = sources[0]
        if self.vision is None:
            raise BadRequest(
                f"{first.param} is a {WORDS[first.kind]}, and this model takes text only. {SEEING}.",
                first.param,
                "unsupported_media",
            )
        if not self.has_processor:
            raise BadRequest(
                f"{first.param} is a {WORDS[first.kind]}, and this checkpoint has no preprocessor_config.json, which "
                "says how pictures are read; take that of the model it was made from.",
                first.param,
                "unsupported_media",
            )
        for kind, most in self.settings.limit_mm_per_prompt.items():
            found = [one for one in sources if one.kind == kind]
            if len(found) > most:
                raise BadRequest(
                    f"{found[most].param} is {WORDS[kind]} {most + 1} of {len(found)}; at most {most} of a prompt are "
                    "taken (--limit-mm-per-prompt).",
                    found[most].param,
                    "too_many_media",
                )

    def load_all(self, sources: Sequence[MediaSource]) -> list[Loaded]:
        """Load the items of one prompt, several at once. Raises BadRequest."""
        self.check(sources)
        if len(sources) < 2:
            return [self.load(one) for one in sources]
        with ThreadPoolExecutor(min(8, len(sources)), "media") as threads:
            return list(threads.map(self.load, sources))

    def load(self, source: MediaSource) -> Loaded:
        """Load one item. Raises BadRequest."""
        if source.given is None:
            return self._kept_by_name(source)
        payloads = self._payloads(source)
        key = _key(source, payloads)
        loaded = self._kept.get(key)
        if loaded is None:
            loaded = self._decoded(source, payloads)
        self._kept.put(key, loaded, source.uuid and _name(source))
        return loaded

    def _kept_by_name(self, source: MediaSource) -> Loaded:
        loaded = self._kept.get(_name(source))
        if loaded is None:
            raise BadRequest(
                f"{source.param} has no content, and {source.uuid!r} is not kept (any more); give the content too.",
                source.param,
            )
        return loaded

    def _payloads(self, source: MediaSource) -> list[Payload]:
        """The encoded bytes, or pixels, of an item."""
        given, param = source.given, source.param
        if source.kind == "image":
            return [self._referred(given, param) if isinstance(given, str) else picture_of(given, param)]
        if isinstance(given, str):
            return self._film(given, param)
        if isinstance(given, (bytes, bytearray, memoryview)):
            return [picture_of(given, param)]
        found = []
        for i, one in enumerate(frames_of(given, param)):
            place = f"{param}[{i}]"
            found.append(self._referred(one, place) if isinstance(one, str) else picture_of(one, place))
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
                f"{param} has a URL of the scheme {url[:40].partition(':')[0]!r}; taken are data:, and http(s): and "
                "file: where the server allows them.",
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

    def _decoded(self, source: MediaSource, payloads: list[Payload]) -> Loaded:
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
        return Loaded(source.kind, facts["digest"], (frames, rows, columns), pixels, facts["seconds"], stamps)


def _name(source: MediaSource) -> tuple[str, ...]:
    """Return the key of an item that a client has named."""
    return source.owner, source.kind, source.uuid or ""


def _key(source: MediaSource, payloads: Sequence[Payload]) -> bytes:
    """What a loaded item depends on."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(repr((source.kind, source.options, [one.described() for one in payloads])).encode())
    for one in payloads:
        digest.update(one.data)
    return digest.digest()


class _Kept:
    """Loaded items, those of the last use, in ``size`` bytes of pixels. Names stand for items that are still kept."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._lock = threading.Lock()
        self._items: OrderedDict[bytes, Loaded] = OrderedDict()
        self._names: OrderedDict[Any, bytes] = OrderedDict()

    def get(self, key: Any) -> Loaded | None:
        with self._lock:
            if not isinstance(key, bytes):
                key = self._names.get(key, b"")
            if (found := self._items.get(key)) is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: bytes, item: Loaded, name: Any = None) -> None:
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
