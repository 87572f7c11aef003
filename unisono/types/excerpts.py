"""Excerpts of JSON values for error messages."""

from __future__ import annotations

import itertools
import json

MAX_VALUE_CHARS = 80
"""Longest value in an error message, characters."""


def show(value: object) -> str:
    """A value of the client's JSON, short enough for a sentence.

    Only its beginning is read, because it may be megabytes.
    """
    try:
        text = json.dumps(_beginning(value, [MAX_VALUE_CHARS]), ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of nested objects
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def _beginning(value: object, left: list[int]) -> object:
    """The first part of a value: at most ``left[0]`` further values, and as many characters of each text."""
    left[0] -= 1
    if isinstance(value, str):
        return value[: MAX_VALUE_CHARS + 1]
    if isinstance(value, dict):
        entries = ((name, _beginning(one, left)) for name, one in value.items() if left[0] > 0)
        return {name[: MAX_VALUE_CHARS + 1]: one for name, one in itertools.islice(entries, MAX_VALUE_CHARS)}
    if isinstance(value, list):
        return [_beginning(one, left) for one in itertools.islice(value, max(0, left[0]))]
    return value
