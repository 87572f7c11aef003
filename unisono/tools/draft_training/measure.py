"""Measures the acceptance of a trained draft model in the engine, on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.entrypoints.llm import LLM
from unisono.tools.draft_training.answers import answer_all
from unisono.tools.draft_training.data import TrainingPrompt
from unisono.types import SamplingParams, SpeculativeConfig

DRAFTS = 3
"""Drafts per round in the measurement."""


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance of greedy chain drafting.

    length: mean tokens committed per round, including the bonus token. positions: share of rounds in which the draft at
    position 1, 2 … k was accepted. drafted, accepted: numbers of drafts. answers: generated token ids by prompt.
    """

    length: float
    positions: tuple[float, ...]
    drafted: int
    accepted: int
    answers: list[list[int]] = field(repr=False, default_factory=list)

    def line(self) -> str:
        """The result as text."""
        positions = ", ".join(f"{share:.2f}" for share in self.positions)
        return f"mean accept length {self.length:.2f} at k = {len(self.positions)} (accepted by position: {positions})"


def measure(
    target: str, prompts: Sequence[TrainingPrompt], spec: SpeculativeConfig | None, *, max_tokens: int, longest: int,
    **flags: Any,
) -> DraftAcceptance:  # fmt: skip
    """Answer the prompts greedily with the speculation ``spec``, and read the engine's counters.

    A complete prompt is cut in half, and the target continues the first half.
    """
    spec = spec or SpeculativeConfig("none")  # None would speculate with what the target carries
    with LLM(target, max_model_len=longest, speculative=spec, **flags) as llm:
        llm.engine.pin_drafts(llm.engine.runner.choices[-1])
        halves = [p.token_ids[: max(2, len(p.token_ids) // 2)] if p.complete else p.token_ids for p in prompts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
        answers = dict(answer_all(llm, halves, lambda i: params))
        counters = llm.engine.counters
        return DraftAcceptance(
            counters.accept_length,
            counters.accepted_share_per_position,
            counters.drafted_tokens,
            counters.accepted_tokens,
            [answers[i] for i in range(len(halves))],
        )
