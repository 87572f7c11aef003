"""Options and model of a speculative config. Unknown options are errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.drafters.quantization import CHOICES
from unisono.types import ConfigError, SpeculativeConfig

LOAD_FORMAT: Mapping[str, float | tuple[str, ...]] = {"load_format": ("auto", "dummy")}
"""Option of drafters with a checkpoint: ``dummy`` uses random weights and needs config.json only."""

DRAFT_QUANTIZATION: Mapping[str, float | tuple[str, ...]] = {"draft_quantization": CHOICES}
"""Option of drafters that can draft with fp8 weights and an fp8 copy of the target's LM head."""


def read_options(
    spec: SpeculativeConfig, known: Mapping[str, float | tuple[str, ...]], *, takes_model: bool = False
) -> dict[str, Any]:
    """Options of a method, with defaults.

    known: maps each option to its default, a number (integral if the default is), or to its allowed words, the default
        first. Raises ConfigError for an option not in ``known``, for a value of another kind, and for a model unless
        the method ``takes_model``.
    """
    if spec.model is not None and not takes_model:
        raise ConfigError(f'"model": {spec.model!r}: the method {spec.method!r} has no checkpoint; leave it out.')
    unknown = sorted(spec.options.keys() - known.keys())
    if unknown:
        options = f"Its options: {', '.join(known)}." if known else "It has none; leave it out."
        raise ConfigError(f"the method {spec.method!r} has no option {', '.join(map(repr, unknown))}. {options}")
    return {name: _checked(spec, name, default) for name, default in known.items()}


def _checked(spec: SpeculativeConfig, name: str, default: float | tuple[str, ...]) -> Any:
    value = spec.options.get(name, default[0] if isinstance(default, tuple) else default)
    if isinstance(default, tuple):
        if value not in default:
            raise ConfigError(f"{name}={value!r} of the method {spec.method!r}: choose one of {', '.join(default)}.")
        return value
    kinds = (int,) if isinstance(default, int) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: give a {'whole ' if kinds == (int,) else ''}number.")
    return value


def in_range(options: Mapping[str, Any], name: str, low: float, high: float) -> None:
    """Raise ConfigError unless ``low <= options[name] <= high``."""
    if not low <= options[name] <= high:
        raise ConfigError(f"{name}={options[name]}: give {low} to {high}.")


def required_model(spec: SpeculativeConfig, what: str) -> str:
    """Directory or bundled name of the checkpoint; ``what``: its kind, for the message. Raises ConfigError if there is
    none."""
    if spec.model is None:
        raise ConfigError(f'the method {spec.method!r} needs "model": the directory of {what}.')
    return spec.model
