"""Static expert placement: an order of a layer's experts, of which each rank holds equally many in turn.

An order changes the rank that computes an expert, and no sum. ``unisono place-experts`` computes orders from the tokens
that each expert had, and ``--expert-placement`` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config.untrusted_files import read_json
from unisono.types import CheckpointError, ConfigError

Placement = tuple[tuple[str, tuple[int, ...]], ...]
"""(path of a layer's experts, their order)."""


def balanced(tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return an order of experts in which the ranks have about equally many tokens.

    tokens: of each expert. Greedy: the busiest expert first, each to the rank with the fewest tokens that has a place
    left. Raises ConfigError if the ranks do not divide the experts.
    """
    each, rest = divmod(len(tokens), ranks)
    if rest:
        raise ConfigError(f"{len(tokens)} experts cannot be divided among {ranks} ranks.")
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for expert in sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < each), key=lambda rank: (loads[rank], rank))
        held[rank].append(expert)
        loads[rank] += tokens[expert]
    return tuple(expert for experts in held for expert in sorted(experts))


def busiest_share(tokens: Sequence[int], order: Sequence[int], ranks: int) -> float:
    """Return the tokens of the busiest rank over the mean of the ranks; 1 without tokens."""
    each, total = len(order) // ranks, sum(tokens)
    loads = [sum(tokens[expert] for expert in order[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    return max(loads) * ranks / total if total else 1.0


def tokens_in(info: Any) -> dict[str, list[int]]:
    """Read the tokens of each expert, by the path of a layer's experts, from the JSON of ``/server_info``.

    Raises ConfigError for another JSON.
    """
    for name in ("engine", "info"):
        info = info.get(name, info) if isinstance(info, dict) else None
    counted = info.get("expert_tokens") if isinstance(info, dict) else None
    if not isinstance(counted, dict) or not counted:
        raise ConfigError("there are no expert_tokens: give the JSON of /server_info of a model with experts.")
    for path, tokens in counted.items():
        if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
            raise ConfigError(f"expert_tokens of {path} must be a list of counts, not {str(tokens)[:80]}.")
    return counted


def placement_of(info: Any, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return balanced orders by path, from the JSON of ``/server_info``. Raises ConfigError."""
    return {path: balanced(tokens, ranks) for path, tokens in tokens_in(info).items()}


def read_placement(file: str) -> Placement:
    """Read the orders in a JSON file: path -> permutation of the experts. Raises ConfigError for anything else."""
    try:
        found: Mapping[str, Any] = read_json(Path(file))
    except CheckpointError as error:
        raise ConfigError(f"--expert-placement: {error}") from None
    orders = []
    for path, order in found.items():
        numbers = [each for each in order if type(each) is int] if isinstance(order, list) else None
        if not numbers or sorted(numbers) != [*range(len(order))]:
            raise ConfigError(
                f"--expert-placement: {file}: {path} must be a list with each expert's number once, from 0 on."
            )
        orders.append((path, tuple(order)))
    return tuple(orders)
