"""Modules as a quantization_config names them; ``preflight.quantization`` has the rules of its other fields."""

from __future__ import annotations

import re
from collections.abc import Iterable

REGEX = "re:"
"""What a regular expression begins with in compressed-tensors' lists."""


def named(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name in the checkpoint is in a list as transformers writes them.

    A pattern names a module and all below it, by some of the parts of their names ("visual", "layers.3.mlp",
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
    """Whether a module is among compressed-tensors' targets: by its name, by ``re:`` and an expression, by its kind."""
    kinds = set(kinds)
    return any(
        re.match(target[len(REGEX) :], module) is not None if target.startswith(REGEX) else target in (module, *kinds)
        for target in targets
    )
