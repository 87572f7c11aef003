"""Preprocessing options of requests: ``mm_processor_kwargs`` and ``media_io_kwargs`` (vLLM's names), ``detail``.

The innermost setting wins: the content part, then the request, then the server's flags, then the checkpoint's
preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unisono.media.fetching.sources import Options, shown
from unisono.types import BadRequest

LOW_DETAIL_PIXELS = 512 * 512
"""Most pixels of an image with ``detail`` low: the size that OpenAI scales such images to."""
DETAILS = ("auto", "low", "high", "original")

PROCESSOR, IO = "mm_processor_kwargs", "media_io_kwargs"
NESTED = {"image": "images_kwargs", "video": "videos_kwargs"}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**40


def _rate(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value) and 0.001 <= value <= 1000


RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "min_pixels": (_whole, "a whole number from 1 on"),
    "max_pixels": (_whole, "a whole number from 1 on"),
    "num_frames": (_whole, "a whole number from 1 on"),
    "fps": (_rate, "a number from 0.001 to 1000"),
}
"""Fields of Options that requests set by name: (check, rule in words)."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "do_sample_frames": (True, False), "do_resize": (True,), "do_rescale": (True,), "do_normalize": (True,),
    "return_tensors": ("pt", "np"), "num_frames": (-1,), "use_audio_in_video": (False,),
}  # fmt: skip
"""Names of other engines, with the values that change nothing here."""
SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Keys of the processors' ``size``; in spite of their names they count pixels."""


def checked(name: str, value: Any, param: str) -> Any:
    """A checked value of one of RULES. Raises BadRequest."""
    ok, rule = RULES[name]
    if not ok(value):
        raise BadRequest(f"{param}={shown(value)} is not valid: it must be {rule}.", param)
    return value


def with_kwargs(options: Options, kind: str, kwargs: Mapping[str, Any], param: str = PROCESSOR) -> Options:
    """``options`` with the mm_processor_kwargs for items of a kind. Raises BadRequest for an unknown name."""
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        where = f"{param}.{name}"
        if value is None or any(value == one and type(value) is type(one) for one in NEUTRAL.get(name, ())):
            continue
        if name in NESTED.values():
            if not isinstance(value, Mapping):
                raise BadRequest(f"{where}={shown(value)} is not valid: it must be an object.", where)
            inner = with_kwargs(options, kind, value, where)
            if name == NESTED[kind]:
                options = inner
        elif name == "size":
            found |= _size(value, where)
        elif name in RULES:
            found[name] = checked(name, value, where)
        else:
            raise BadRequest(
                f"{where}={shown(value)} is not supported; the supported names are {', '.join(RULES)}, size, "
                f"{', '.join(NESTED.values())}.",
                where,
            )
    return replace(options, **found)


def _size(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value or value.keys() - SIZES.keys():
        raise BadRequest(
            f"{where}={shown(value)} is not valid: it must be an object of shortest_edge and longest_edge, which "
            "count pixels.",
            where,
        )
    return {SIZES[name]: checked(SIZES[name], one, f"{where}.{name}") for name, one in value.items()}


def with_io_kwargs(options: Options, kind: str, kwargs: Mapping[str, Any], param: str = IO) -> Options:
    """``options`` with the media_io_kwargs: {"image": {…}, "video": {…}}. Raises BadRequest."""
    for name, settings in kwargs.items():
        where = f"{param}.{name}"
        if name not in NESTED or not isinstance(settings, Mapping):
            raise BadRequest(f"{where}={shown(settings)} is not valid: give an object for image or for video.", where)
        found: dict[str, Any] = {}
        for key, value in settings.items():
            place = f"{where}.{key}"
            if value is None or (key, value) in (("image_mode", "RGB"), ("num_frames", -1)):
                continue
            if name == "video" and key in ("fps", "num_frames"):
                found[key] = checked(key, value, place)
            elif name == "image" and key == "rgba_background_color":
                found["background"] = _colour(value, place)
            else:
                known = "fps, num_frames" if name == "video" else "rgba_background_color"
                raise BadRequest(f"{place}={shown(value)} is not supported; the supported names are {known}.", place)
        if name == kind or "background" in found:
            options = replace(options, **found)
    return options


def _colour(value: Any, where: str) -> tuple[int, int, int]:
    ok = isinstance(value, (list, tuple)) and len(value) == 3
    if not (ok and all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= 255 for one in value)):
        raise BadRequest(
            f"{where}={shown(value)} is not valid: it must be red, green and blue, whole numbers from 0 to 255.", where
        )
    red, green, blue = value
    return red, green, blue


def with_detail(options: Options, detail: Any, where: str) -> Options:
    """``options`` with OpenAI's ``detail`` of an image: low bounds its pixels, other values change nothing."""
    if detail is not None and detail not in DETAILS:
        raise BadRequest(f"{where}={shown(detail)} is not supported; use one of {', '.join(DETAILS)}.", where)
    if detail != "low":
        return options
    most = LOW_DETAIL_PIXELS if options.max_pixels is None else min(options.max_pixels, LOW_DETAIL_PIXELS)
    return replace(options, max_pixels=most)
