"""Benchmarks only: drafts that are accepted as often as one says, so that a random head costs what a good one does.

The text is then what the target picks, given that it verified what it would have picked anyway; how long rounds take is
what counts. Which drafts are accepted follows from a request's seed and their positions, so runs can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from unisono.config import EngineConfig
from unisono.engine.slots import Slots
from unisono.kernels.rounds import force_drafts

AcceptanceRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(drafts [R, k], sampled [R, 1 + k], slots [R]), all int32: overwrite the drafts, from the picks."""


def forcing(config: EngineConfig, slots: Slots) -> AcceptanceRule | None:
    """What was asked for; None verifies in earnest."""
    mean, rates = config.synthetic_acceptance_length, config.synthetic_acceptance_rates
    if mean is not None:
        return lambda drafts, sampled, rows: force_drafts(drafts, sampled, rows, slots.length, mean)
    if not rates:
        return None
    # Of each place, the share where those before it were accepted.
    conditional = [rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates))]
    shares = torch.tensor([*conditional, 0.0], device=slots.length.device)

    def force(drafts: torch.Tensor, sampled: torch.Tensor, rows: torch.Tensor) -> None:
        place = torch.arange(drafts.shape[1], dtype=torch.int32, device=drafts.device)
        at = slots.length.index_select(0, rows)[:, None] + place
        chance = uniform(slots.seed_lo.index_select(0, rows)[:, None], at)
        right = chance < shares.index_select(0, place.clamp_max(len(rates)))
        drafts.copy_(torch.where(right.cumprod(1).bool(), sampled[:, :-1], -1))

    return force


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) that look independent, float32, by a hash of int32 (seed, position); they broadcast."""
    word = 0xFFFFFFFF
    x = (seed.long() * 0x9E3779B1 + position.long() * 0x85EBCA77) & word
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & word
    return ((x ^ (x >> 16)) >> 8).float() / (1 << 24)
