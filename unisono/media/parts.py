"""Images and videos in the messages of a conversation: content parts to sources, and to the input of chat templates.

The server and ``LLM.chat`` read messages by the same table of part types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.media.decoding.frames import with_metadata
from unisono.media.fetching.sources import IMAGE, VIDEO, Kind, MediaSource, Options, shown
from unisono.media.options import checked, with_detail, with_io_kwargs, with_kwargs
from unisono.types import BadRequest
from unisono.types.unknown_fields import known_part

Part = Mapping[str, Any]

SETTINGS = ("min_pixels", "max_pixels", "fps")
"""Settings in a part beside its content (Qwen's names)."""
IGNORED = {"type", "uuid", "detail", "cache_control", "format", *SETTINGS}
MEDIA_ROLES = ("user", "tool")
"""Roles of messages that may have images."""


def _referred(part: Part, name: str, where: str) -> tuple[Any, Part]:
    """The content of a part under ``name``: a string, or an object with ``url`` whose other keys are settings."""
    content = part.get(name)
    if isinstance(content, Mapping):
        others = {key: value for key, value in content.items() if key != "url"}
        inner = known_part(others, IGNORED, f"{where}.{name}")
        unknown = next((key for key, value in inner.items() if key not in IGNORED and value is not None), None)
        if unknown is not None:
            place = f"{where}.{name}.{unknown}"
            raise BadRequest(f"{place}={shown(inner[unknown])} is not supported; remove it.", place)
        return content.get("url"), inner
    return content, {}


def _url_part(kind: Kind, *names: str) -> Callable[[Part, str], tuple[Kind, Any, Part]]:
    """A reader of a part of this kind, with its content under one of ``names``."""

    def read(part: Part, where: str) -> tuple[Kind, Any, Part]:
        known = {*names, *IGNORED}
        part = known_part(part, {*known, "file_id"}, where)
        unknown = next((key for key, value in part.items() if key not in known and value is not None), None)
        if unknown is not None:
            way = "send the content itself, as a data URL" if unknown == "file_id" else "remove it"
            place = f"{where}.{unknown}"
            raise BadRequest(f"{place}={shown(part[unknown])} is not supported; {way}.", place)
        name = next((one for one in names if part.get(one) is not None), names[0])
        content, inner = _referred(part, name, where)
        return kind, content, {**part, **{key: value for key, value in inner.items() if value is not None}}

    return read


READERS: Mapping[str, Callable[[Part, str], tuple[Kind, Any, Part]]] = {
    "image_url": _url_part(IMAGE, "image_url"),
    "input_image": _url_part(IMAGE, "image_url"),
    "image": _url_part(IMAGE, "image", "url"),
    "image_pil": _url_part(IMAGE, "image_pil"),
    "video_url": _url_part(VIDEO, "video_url"),
    "video": _url_part(VIDEO, "video", "url"),
}
"""Part type -> reader, for parts that are images or videos."""


def is_media(part: Any) -> bool:
    """True if a content part is an image or a video."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in READERS


def source_of(part: Part, where: str, role: str, plain: bool = True) -> MediaSource:
    """The image or video of a content part.

    Raises BadRequest.

    plain: the content must be JSON, as in a request's body.
    """
    kind, content, settings = READERS[part["type"]](part, where)
    if role not in MEDIA_ROLES:
        raise BadRequest(
            f"{where}: images and videos are allowed in messages of the roles {' and '.join(MEDIA_ROLES)}, not {role}.",
            where,
        )
    found, rate = with_metadata(content)
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 1 <= len(uuid) <= 256):
        raise BadRequest(f"{where}.uuid={shown(uuid)} is not valid: it must be 1 to 256 characters.", f"{where}.uuid")
    if found is None and (plain or uuid is None):
        what = f"{where} of type {part['type']}"
        raise BadRequest(f"{what} has no content; give a URL, for example data:image/png;base64,…", where)
    if plain and not _is_url(found, kind):
        raise BadRequest(
            f"{where}={shown(content)} is not valid: give a URL, for example data:image/png;base64,…"
            + ("" if kind == "image" else ", or a list of them, the frames."),
            where,
        )
    options = {name: checked(name, settings[name], f"{where}.{name}") for name in SETTINGS if settings.get(name)}
    if rate is not None:
        options["fps"] = checked("fps", rate, f"{where}.fps")
    made = Options(**options)
    if kind == "image":
        made = with_detail(made, settings.get("detail"), f"{where}.detail")
    return MediaSource(kind, where, found, made, uuid)


def _is_url(content: Any, kind: str) -> bool:
    if kind == "video" and isinstance(content, list):
        return bool(content) and all(isinstance(one, str) and one for one in content)
    return isinstance(content, str) and bool(content)


def with_request(
    sources: Sequence[MediaSource], processor: Mapping[str, Any] | None, io: Mapping[str, Any] | None
) -> list[MediaSource]:
    """Sources with the settings of the whole request; their parts' own settings take precedence. Raises BadRequest."""
    found = []
    for one in sources:
        wide = with_io_kwargs(with_kwargs(Options(), one.kind, processor or {}), one.kind, io or {})
        found.append(_under(one, wide))
    if not sources:  # wrong settings are errors of requests without images, too
        with_io_kwargs(with_kwargs(Options(), "image", processor or {}), "image", io or {})
    return found


def _under(source: MediaSource, wide: Options) -> MediaSource:
    """``source`` with the options ``wide`` for those that it does not set."""
    blank, own = Options(), source.options
    changed = {
        name: getattr(wide, name)
        for name in blank.__dataclass_fields__
        if getattr(own, name) == getattr(blank, name) and getattr(wide, name) != getattr(blank, name)
    }
    if not changed:
        return source
    return MediaSource(
        source.kind,
        source.param,
        source.content,
        Options(**{name: changed.get(name, getattr(own, name)) for name in blank.__dataclass_fields__}),
        source.uuid,
    )


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """A conversation of ``LLM.chat`` as input of chat templates, and its images and videos. Raises BadRequest."""
    written, sources = [], list[MediaSource]()
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(is_media(part) for part in content):
            parts: list[Any] = []
            for j, part in enumerate(content):
                where = f"messages[{i}].content[{j}]"
                if is_media(part):
                    sources.append(source_of(part, where, str(message.get("role")), plain=False))
                    parts.append({"type": str(sources[-1].kind)})
                else:
                    parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
            message = {**message, "content": parts}
        written.append(dict(message))
    return written, sources
