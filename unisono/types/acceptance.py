"""Acceptance of drafts in one generated sequence, in the form of vLLM's per-request metrics."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

LEVELS = ("none", "summary", "detailed")
"""Values of ``--per-request-spec-decode-metrics``."""


class FewerDrafts(enum.IntEnum):
    """Reason why a step of a sequence had fewer drafts than the drafter's k.

    NONE: it had k. COST: fewer drafts bring more tokens a second, as costs and acceptance are. PROBE: the engine
    measured another number. CATCH_UP: the drafter first had to observe tokens. NO_GRAPH: no graph of a round with k was
    captured. PROMPTS: the token came from a pass that also computed prompts. PINNED: the number is fixed. LIMIT: the
    request's own limit. SHARED: other requests used the drafts that all share. NOT_FOUND: the drafter found fewer.
    """

    NONE = 0
    COST = 1
    PROBE = 2
    CATCH_UP = 3
    NO_GRAPH = 4
    PROMPTS = 5
    PINNED = 6
    LIMIT = 7
    SHARED = 8
    NOT_FOUND = 9


class RequestAcceptance(msgspec.Struct):
    """Acceptance of one sequence's drafts. Names are vLLM's up to ``num_spec_tokens``.

    mean_acceptance_length: 1 + accepted drafts per step with drafts. draft_acceptance_rate: accepted of all drafts.
    acceptance_histogram: entry j is the number of steps that accepted j drafts, j = 0 … num_spec_tokens.
    num_spec_steps: verified steps with drafts. num_spec_tokens: largest number of drafts of a step.
    drafter: name of the drafter, or "none". num_steps_without_drafts: steps in which nothing was drafted: the drafter
    found nothing, or the engine chose no drafts because they would have cost time.
    mean_draft_tokens: drafts per step with drafts: the mean k. drafts_histogram: entry j is the number of steps with j
    drafts; entry 0 is ``num_steps_without_drafts``. accepted_per_position, drafted_per_position: entry j is the number
    of accepted drafts, and of drafts, at position j of a step. fewer_drafts: number of steps with fewer than
    num_spec_tokens drafts, by reason (:class:`FewerDrafts`, in lower case).
    per_step_accepted, per_step_drafted: one entry per step with drafts; absent in a summary.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    drafter: str
    num_steps_without_drafts: int
    mean_draft_tokens: float
    drafts_histogram: list[int]
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    fewer_drafts: dict[str, int]
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class DraftCount:
    """Drafts and accepted drafts of one sequence, step by step."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.num_drafted = self.num_accepted = 0  # their sums, which streams read with every chunk
        self.fewer: Counter[int] = Counter()
        self.steps = 0
        """Steps so far, the prompt's pass included."""

    def add(self, rounds: Iterable[tuple[int, int, int]], tokens: int, fewer: Iterable[int] = ()) -> None:
        """Add the ``TokenDelta.rounds`` of a delta of which the text has the first ``tokens`` tokens.

        An entry with accepted and without drafted tokens continues the step before it. fewer: the delta's
        ``fewer_drafts``; empty: none of these rounds had fewer.
        """
        for (length, drafted, accepted), why in zip(rounds, itertools.chain(fewer, itertools.repeat(0)), strict=False):
            if tokens > 0 and accepted and not drafted:
                self.accepted[-1] += accepted
                self.num_accepted += accepted
            elif tokens > 0:
                self.steps += 1
                self.fewer[why] += 1
                if drafted:
                    self.drafted.append(drafted)
                    self.accepted.append(min(accepted, tokens))
                    self.num_drafted += drafted
                    self.num_accepted += self.accepted[-1]
            tokens -= length

    @property
    def rejected(self) -> int:
        """Rejected draft tokens."""
        return self.num_drafted - self.num_accepted

    def result(self, drafter: str, num_spec_tokens: int, detailed: bool = False) -> RequestAcceptance:
        """Summarise. drafter, num_spec_tokens: the engine's. detailed: with one entry per step."""
        accepted, drafted, steps = self.num_accepted, self.num_drafted, len(self.drafted)
        largest, without = max([num_spec_tokens, *self.drafted, *self.accepted]), max(0, self.steps - 1 - steps)
        histogram, by_drafts = _histogram(self.accepted, largest), _histogram(self.drafted, largest)
        return RequestAcceptance(
            mean_acceptance_length=1 + accepted / max(1, steps),
            draft_acceptance_rate=accepted / max(1, drafted),
            acceptance_histogram=histogram,
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            num_spec_tokens=num_spec_tokens,
            drafter=drafter,
            num_steps_without_drafts=without,
            mean_draft_tokens=drafted / max(1, steps),
            drafts_histogram=[without, *by_drafts[1:]],
            accepted_per_position=_per_position(histogram),
            drafted_per_position=_per_position(by_drafts),
            fewer_drafts={FewerDrafts(why).name.lower(): n for why, n in sorted(self.fewer.items()) if why},
            per_step_accepted=list(self.accepted) if detailed else UNSET,
            per_step_drafted=list(self.drafted) if detailed else UNSET,
        )


def _histogram(counts: Sequence[int], largest: int) -> list[int]:
    """Number of entries that are 0 … ``largest``."""
    found = [0] * (largest + 1)
    for count in counts:
        found[count] += 1
    return found


def _per_position(histogram: Sequence[int]) -> list[int]:
    """Entry j: number of steps with more than j drafts, from the steps by their number of drafts."""
    return [sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)]
