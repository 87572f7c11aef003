"""Images and videos of offline prompts: vLLM's ``multi_modal_data`` and ``multi_modal_uuids``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono.media.decoding.frames import with_metadata
from unisono.media.fetching.sources import Kind, MediaSource, Options
from unisono.media.options import checked
from unisono.types import BadRequest

DATA, UUIDS, KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"
KEYS = {DATA, UUIDS, KWARGS}
"""Keys of a prompt's mapping."""


def sources_of(prompt: Mapping[str, Any]) -> list[MediaSource]:
    """The images and videos of a prompt's mapping, images first. Raises BadRequest."""
    data, uuids = prompt.get(DATA) or {}, prompt.get(UUIDS) or {}
    for name, value in ((DATA, data), (UUIDS, uuids)):
        if not isinstance(value, Mapping):
            raise BadRequest(f"{name} is a {type(value).__name__}; give a dict with image or video.", name)
        if unknown := sorted(value.keys() - {"image", "video"}):
            raise BadRequest(f"{name} has {unknown}; known kinds are image and video.", name)
    return [*_sources("image", data, uuids), *_sources("video", data, uuids)]


def _sources(kind: Kind, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[MediaSource]:
    items = _items(kind, data.get(kind))
    names = uuids.get(kind)
    names = [names] if isinstance(names, str) else list(names or ())
    if kind not in data and names:
        items = [None] * len(names)
    if names and len(names) != len(items):
        raise BadRequest(f"{UUIDS} has {len(names)} names for {len(items)} of {kind}; give one each, or None.", UUIDS)
    return [
        one if isinstance(one, MediaSource) else _source(kind, i, one, names[i] if names else None)
        for i, one in enumerate(items)
    ]


def _source(kind: Kind, index: int, value: Any, uuid: str | None) -> MediaSource:
    param = f"{DATA}.{kind}[{index}]"
    found, rate = with_metadata(value)
    if found is None and uuid is None:
        raise BadRequest(f"{param} is None; give it, or a name in {UUIDS} that it had before.", param)
    options = Options() if rate is None else Options(fps=checked("fps", rate, f"{param}.fps"))
    return MediaSource(kind, param, found, options, uuid)


def _items(kind: Kind, value: Any) -> list[Any]:
    """One item or a list of them, as a list."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return []
    if isinstance(value, Mapping):
        raise BadRequest(f"{DATA}.{kind} is a dict: image embeddings are not supported; give images.", DATA)
    if kind == "image":
        several = isinstance(value, (list, tuple)) or (_ndim(value) == 4)
        return list(value) if several else [value]
    if isinstance(value, list) and value and not any(_is_frame(one) for one in value):
        return list(value)
    if _ndim(value) == 5:
        return list(value)
    return [value]


def _is_frame(one: Any) -> bool:
    return hasattr(one, "getbands") or _ndim(one) in (2, 3)


def _ndim(one: Any) -> int:
    return one.ndim if isinstance(one, np.ndarray) or hasattr(one, "detach") else 0


def offline_mapping(sources: Sequence[MediaSource]) -> dict[str, Any]:
    """The keys of a prompt's mapping for these sources."""
    if not sources:
        return {}
    return {DATA: {kind: [one for one in sources if one.kind == kind] for kind in ("image", "video")}}
