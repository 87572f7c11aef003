"""What a request may ask of its output's form, checked as far as that needs no grammar library.

``types.StructuredOutputs`` is made of this; ``grammar/`` compiles what passes. Imports nothing of the project: errors
are ValueErrors, worded to follow the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields that say what the output must be; a request sets one."""

MAX_CHARS = 100_000
"""Characters of a schema, expression or grammar, choices together."""

MAX_DEPTH = 64
"""Nesting of a JSON schema: reading one takes time that grows with the third power of it, 8 ms at 64."""


def checked(kind: str, value: Any) -> Any:
    """``value`` of the field ``kind`` as it is kept: JSON as text, choices as a tuple. Raises ValueError."""
    if kind == "json_object":
        if value is not True:
            raise ValueError("it must be true, or left out")
        return True
    if kind == "choice":
        value = _choices(value)
        length = sum(map(len, value))
    else:
        value = _json(value) if kind in ("json", "structural_tag") else value
        if not (isinstance(value, str) and value):
            raise ValueError("it must be a string that is not empty")
        length = len(value)
    if length > MAX_CHARS:
        raise ValueError(f"it has {length} characters; at most {MAX_CHARS} are taken")
    return value


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("it must be a list of strings")
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("it must have at least one string, and none that is empty")
    return tuple(value)


def _json(value: Any) -> str:
    """JSON as text, from text or data; properties keep their order, for answers follow it."""
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            return value
        try:
            value = json.loads(value)
        except RecursionError:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None
        except ValueError as error:
            raise ValueError(f"it is not valid JSON: {error}") from None
    if _deeper(value, MAX_DEPTH):  # as of what was too deep to be read, whatever it is: Pythons differ in what that is
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, (Mapping, bool)):
        raise ValueError("it must be a JSON object")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _deeper(value: Any, limit: int) -> bool:
    """Whether objects and lists are nested deeper than ``limit``."""
    layer = [value]
    for _ in range(limit + 1):
        layer = [
            part
            for one in layer
            if isinstance(one, (Mapping, list, tuple))
            for part in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not layer:
            return False
    return True
