"""Module name patterns of a quantization_config; ``config/preflight/quantization.py`` has the rules of its other
fields."""

from __future__ import annotations

import re
from collections.abc import Iterable

REGEX = "re:"
"""Prefix of a regular expression in compressed-tensors' lists."""


def named(module: str, patterns: Iterable[str]) -> bool:
    """Return True if a module's checkpoint name matches a list of patterns in transformers' form.

    A pattern matches a module and everything below it by consecutive parts of its name ("visual", "layers.3.mlp",
    "lm_head"), or is a regular expression for the beginning of the name.
    """
    return any(_parts(module, pattern) or _begins(module, pattern) for pattern in patterns)


def _parts(module: str, pattern: str) -> bool:
    return f".{pattern.strip('.')}." in f".{module}."


def _begins(module: str, pattern: str) -> bool:
    try:
        return re.match(rf"(?:{pattern.removeprefix(REGEX)})(?=\.|$)", module) is not None
    except re.error:
        return False


def targeted(module: str, targets: Iterable[str], kinds: Iterable[str] = ()) -> bool:
    """Return True if a module is among compressed-tensors' targets: by name, by ``re:`` expression, or by kind."""
    kinds = set(kinds)
    return any(
        re.match(target[len(REGEX) :], module) is not None if target.startswith(REGEX) else target in (module, *kinds)
        for target in targets
    )
