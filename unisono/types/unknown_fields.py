"""Unknown fields of requests: an error, or dropped and counted if a server runs with ``--allow-unknown-fields``.

The server opens :func:`dropping` around a request; each reader of a part of its body calls :func:`dropped` before it
refuses a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MOST_NAMED = 32
"""Most names kept per request."""
MOST_CHARACTERS = 64
"""Most characters kept of a name."""

_names: ContextVar[dict[str, None] | None] = ContextVar("unknown fields", default=None)


@contextmanager
def dropping() -> Iterator[dict[str, None]]:
    """Drop unknown fields inside this context, in this task; yields their names, which are added as they are found."""
    names: dict[str, None] = {}
    token = _names.set(names)
    try:
        yield names
    finally:
        _names.reset(token)


def dropped(name: str) -> bool:
    """True if an unknown field is to be dropped; records its name. ``messages[3].x`` counts as ``messages[].x``."""
    names = _names.get()
    if names is None:
        return False
    if len(names) < MOST_NAMED:
        plain = re.sub(r"\[\d+\]", "[]", name[: 2 * MOST_CHARACTERS])
        names[re.sub(r"[^\w.\[\]-]", "?", plain, flags=re.ASCII)[:MOST_CHARACTERS]] = None
    return True


def known_part(value: Mapping[str, Any], known: Any, where: str) -> Mapping[str, Any]:
    """``value`` without the keys that are not in ``known``, if unknown fields are dropped; else ``value`` itself."""
    return {key: each for key, each in value.items() if key in known or not dropped(f"{where}.{key}")}
