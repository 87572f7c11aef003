"""Shared rules of a ``quantization_config``'s fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.types import CheckpointError

BLOCK = 128
"""Side of a square block of fp8 weights with one scale: 128 outputs by 128 inputs."""

INT_GROUPS = (32, 64, 128, -1)
"""Group sizes of integer weights: inputs with one scale; -1: all inputs."""


def require(method: str, config: Mapping[str, Any], rules: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError unless each field of a quantization_config has one of its supported values.

    rules: supported values by field; the first one is the meaning of an absent field.
    """
    for name, supported in rules.items():
        value = config.get(name, supported[0])
        if value not in supported:
            ways = " or ".join(repr(each) for each in supported)
            raise CheckpointError(f"quant_method {method!r} with {name}={value!r}: supported is {ways}.")
