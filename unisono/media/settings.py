"""Limits of a server or an ``LLM`` on images and videos: sources, sizes, numbers.

Names of flags are vLLM's where it has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.types import ConfigError

KINDS = ("image", "video")
MB = 1 << 20
DEFAULT_LIMITS = {"image": 32, "video": 4}
HINTS = {"width", "height", "num_frames", "length"}
"""Size hints in vLLM's limits, beside the count: vLLM plans memory by them. They are ignored here."""


@dataclass(frozen=True)
class MediaSettings:
    """The media flags.

    allowed_media_domains: hosts that images may be fetched from; ``*.example.com`` matches all below a domain, ``*``
    any host. allowed_local_media_path: the directory of files that requests may name. limit_mm_per_prompt: items of
    each kind in a prompt. mm_processor_kwargs, media_io_kwargs: settings that requests may override (``options.py``).
    media_max_mb: MiB of one encoded image or video. media_max_pixels: of one decoded image or frame. media_max_frames:
    frames of a video. media_timeout: seconds to fetch one item. mm_processor_cache_gb: GiB of cached preprocessed
    items.
    media_processes: items decoded at once.

    Raises ConfigError.
    """

    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_LIMITS))
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_max_mb: int = 32
    media_max_pixels: int = 1 << 26
    media_max_frames: int = 256
    media_timeout: float = 10.0
    mm_processor_cache_gb: float = 1.0
    media_processes: int = 2

    def __post_init__(self) -> None:
        path = self.allowed_local_media_path
        if path is not None and not path.is_dir():
            raise ConfigError(f"--allowed-local-media-path {path}: there is no such directory.")
        for name in ("media_max_mb", "media_max_pixels", "media_max_frames", "media_processes"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: give a whole number from 1 on.")
        if not 0 < self.media_timeout < float("inf"):
            raise ConfigError(f"--media-timeout {self.media_timeout:g}: give seconds above 0.")
        if not 0 <= self.mm_processor_cache_gb < float("inf"):
            raise ConfigError(f"--mm-processor-cache-gb {self.mm_processor_cache_gb:g}: give GiB, or 0 for no cache.")

    @property
    def max_bytes(self) -> int:
        """Most bytes of one encoded item."""
        return self.media_max_mb * MB

    @staticmethod
    def of(**flags: Any) -> MediaSettings:
        """Settings from flags' values, or from keywords of ``LLM``: JSON or objects; None is the default."""
        fields = {name: value for name, value in flags.items() if value is not None}
        if (path := fields.pop("allowed_local_media_path", None)) not in (None, ""):
            fields["allowed_local_media_path"] = Path(path)
        if (domains := fields.get("allowed_media_domains")) is not None:
            fields["allowed_media_domains"] = _domains(domains)
        if "limit_mm_per_prompt" in fields:
            fields["limit_mm_per_prompt"] = _limits(fields["limit_mm_per_prompt"])
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if name in fields:
                fields[name] = _object(name, fields[name])
        return MediaSettings(**fields)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _domains(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
    names = tuple(str(one).strip().lower().rstrip(".") for one in value)
    wrong = next((one for one in names if not one or set(one) & set("/:@ \\")), None)
    if wrong is not None:
        raise ConfigError(
            f"--allowed-media-domains {wrong!r}: give host names, for example images.example.com, *.example.com or *."
        )
    return names


def _limits(flags: Any) -> dict[str, int]:
    """Parse ``{"image": 4}``, vLLM's longer form with ``count``, or its older ``image=4,video=1``."""
    if isinstance(flags, str) and "=" in flags and not flags.lstrip().startswith("{"):
        flags = dict(part.strip().split("=", 1) for part in flags.split(","))
        flags = {name: int(value) if value.isdecimal() else value for name, value in flags.items()}
    found = dict(DEFAULT_LIMITS)
    for name, value in _object("limit_mm_per_prompt", flags).items():
        if isinstance(value, Mapping) and not value.keys() - {"count", *HINTS}:
            value = value.get("count", DEFAULT_LIMITS.get(name, 0))
        if name == "audio" and value == 0:
            continue
        if name not in KINDS or isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"--limit-mm-per-prompt: {name}={value!r} is not valid; give whole numbers for image and video, for "
                'example {"image": 4, "video": 1}.'
            )
        found[name] = value
    return found


def _object(name: str, value: Any) -> dict[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{_flag(name)} is not valid JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_flag(name)} {value!r}: give a JSON object.")
    return dict(value)
