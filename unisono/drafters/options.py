"""Options of a speculative config, for the drafter that reads them: what it does not know it refuses."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.types import ConfigError, SpeculativeConfig


def read_options(spec: SpeculativeConfig, defaults: Mapping[str, float]) -> dict[str, float]:
    """The options of a method without a checkpoint, over their ``defaults``; whole where the default is.

    Raises ConfigError for a model, for an option that is not in ``defaults`` and for one that is no number.
    """
    if spec.model is not None:
        raise ConfigError(f'"model": {spec.model!r}: the method {spec.method!r} has no checkpoint; leave it out.')
    unknown = sorted(spec.options.keys() - defaults.keys())
    if unknown:
        raise ConfigError(
            f"the method {spec.method!r} has no option {', '.join(map(repr, unknown))}. "
            f"Known: {', '.join(defaults) or 'none'}."
        )
    for name, value in spec.options.items():
        kinds = (int,) if isinstance(defaults[name], int) else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: give a {'whole ' if kinds == (int,) else ''}number.")
    return {**defaults, **spec.options}


def in_range(options: Mapping[str, float], name: str, low: float, high: float) -> None:
    """Raises ConfigError unless ``low <= options[name] <= high``."""
    if not low <= options[name] <= high:
        raise ConfigError(f"{name}={options[name]}: give {low} to {high}.")
