"""Prefixes of metric names."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.types import ConfigError

PREFIXES: Mapping[str, tuple[str, ...]] = {"unisono": ("unisono:",), "vllm": ("vllm:",), "both": ("unisono:", "vllm:")}
"""Values of ``--metrics-prefix``."""


def check_prefix(prefix: str) -> None:
    """Raise ConfigError for an unknown ``--metrics-prefix``."""
    if prefix not in PREFIXES:
        raise ConfigError(f"--metrics-prefix {prefix!r} is unknown; choose one of {', '.join(PREFIXES)}.")
