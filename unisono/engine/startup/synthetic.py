"""Benchmarks only: acceptance rules that accept drafts at a configured rate, regardless of their tokens.

A random draft head then costs as much as a trained one. The text is sampled by the target after verified tokens; it has
no meaning, only the time of rounds counts. Acceptance depends on a request's seed and positions, so runs can be
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from unisono.config import EngineConfig
from unisono.config.synthetic_rates import rates_by_kind
from unisono.kernels.speculation.rounds import force_drafts
from unisono.passes.acceptance import CandidateRule, ExactMatch
from unisono.passes.slot_tensors import SlotTensors


def candidate_rule(config: EngineConfig, slots: SlotTensors) -> CandidateRule:
    """Return the rule of the configuration; :class:`ExactMatch` by default."""
    if config.synthetic_acceptance_length is not None:
        return MeanLength(slots, config.synthetic_acceptance_length)
    if config.synthetic_acceptance_rates:
        return RatesByPlace(slots, rates_by_kind(config.synthetic_acceptance_rates))
    return ExactMatch()


class _Forced:
    """Common part of both rules: in a tree one path is accepted, another one for each length; all drafts count."""

    def __init__(self, slots: SlotTensors) -> None:
        self._slots = slots

    def candidates(
        self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor, paths: int, shared: bool = False
    ) -> torch.Tensor:
        unverified = drafts < 0 if shared else None
        forced = self._forced(drafts, sampled, slots)
        if unverified is not None:
            return forced.masked_fill(unverified, -1)
        if paths == 1:
            return forced
        accepted_path = self._slots.length.index_select(0, slots) % paths
        path = torch.arange(len(slots), dtype=torch.int32, device=drafts.device) % paths
        return forced.masked_fill((path != accepted_path)[:, None], -1)

    def count(self, drafted: torch.Tensor, drafts: int) -> None:
        drafted.fill_(drafts)

    def _forced(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MeanLength(_Forced):
    """Commit ``mean`` tokens per round on average, including the bonus token."""

    def __init__(self, slots: SlotTensors, mean: float) -> None:
        super().__init__(slots)
        self._mean = mean

    def _forced(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        force_drafts(drafts, sampled, slots, self._slots.length, self._mean)
        return drafts


class RatesByPlace(_Forced):
    """Accept draft i in a fraction ``rates[i]`` of rounds; drafts beyond the last rate are never accepted.

    kinds: rates of each kind of request, at least one. A request's kind is its seed modulo their number.
    """

    def __init__(self, slots: SlotTensors, kinds: Sequence[Sequence[float]]) -> None:
        super().__init__(slots)
        self._places, self._kinds = max(map(len, kinds)), len(kinds)
        # Conditional rate of each position, given that those before it were accepted.
        conditional = [
            [rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates))]
            + [0.0] * (1 + self._places - len(rates))
            for rates in kinds
        ]
        self._shares = torch.tensor(conditional, device=slots.length.device)

    def _forced(self, drafts: torch.Tensor, sampled: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        place = torch.arange(drafts.shape[1], dtype=torch.int32, device=drafts.device)
        at = self._slots.length.index_select(0, slots)[:, None] + place
        seed = self._slots.seed_lo.index_select(0, slots)
        shares = self._shares.index_select(0, seed % self._kinds).index_select(1, place.clamp_max(self._places))
        right = uniform(seed[:, None], at) < shares
        return torch.where(right.cumprod(1).bool(), sampled[:, :-1], -1)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random float32 numbers in [0, 1): a hash of int32 (seed, position), which broadcast."""
    word = 0xFFFFFFFF
    x = (seed.long() * 0x9E3779B1 + position.long() * 0x85EBCA77) & word
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & word
    return ((x ^ (x >> 16)) >> 8).float() / (1 << 24)
