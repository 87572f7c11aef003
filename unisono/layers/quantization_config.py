"""What readers of a quantization_config share: how it names modules, and which values of its fields are supported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.types import CheckpointError

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


def require(method: str, config: Mapping[str, Any], rules: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError unless each field of a quantization_config is one of its supported values.

    The first of them is what a config means that leaves the field out.
    """
    for name, supported in rules.items():
        value = config.get(name, supported[0])
        if value not in supported:
            ways = " or ".join(repr(each) for each in supported)
            raise CheckpointError(f"quant_method {method!r} with {name}={value!r}: supported is {ways}.")
