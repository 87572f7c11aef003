"""Synthetic acceptance of benchmarks: shares of rounds that accept draft 1, 2 …, by kind of request."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from unisono.types import ConfigError

Rates = tuple[float, ...]


def rates_by_kind(rates: Rates | tuple[Rates, ...]) -> tuple[Rates, ...]:
    """Rates of each kind of request; empty if there are none. Raises ConfigError for shares that cannot be."""
    if not rates:
        return ()
    nested = [isinstance(kind, tuple) for kind in rates]
    if any(nested) and not all(nested):
        raise ConfigError(f"--synthetic-acceptance-rates {rates}: give numbers, or numbers for each kind of request.")
    kinds = cast(tuple[Rates, ...], rates) if all(nested) else (cast(Rates, rates),)
    if not all(1 >= a >= b >= 0 for kind in kinds for a, b in pairwise((1.0, *kind))):
        raise ConfigError(f"--synthetic-acceptance-rates {rates}: give shares of rounds, 1 to 0, none above the last.")
    return kinds
