"""What serving will see of a draft: the engine itself, on prompts that training never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.llm import LLM
from unisono.tools.draft_training.answers import play
from unisono.tools.draft_training.data import Prompt
from unisono.types import SamplingParams, SpeculativeConfig

DRAFTS = 3
"""k of the figure that training prints."""


@dataclass(frozen=True)
class Acceptance:
    """Of k drafts a round, greedy, in a chain. length: tokens a round commits on average, the bonus token included.
    positions: share of rounds in which draft 1, 2 … k was accepted."""

    length: float
    positions: tuple[float, ...]
    drafted: int
    accepted: int
    answers: list[list[int]] = field(repr=False, default_factory=list)

    def line(self) -> str:
        """For people."""
        positions = ", ".join(f"{share:.2f}" for share in self.positions)
        return f"mean accept length {self.length:.2f} at k = {len(self.positions)} (accepted by position: {positions})"


def measure(
    target: str, prompts: Sequence[Prompt], spec: SpeculativeConfig | None, *, max_tokens: int, longest: int,
    **flags: Any,
) -> Acceptance:  # fmt: skip
    """Answer the prompts greedily with this speculation, and read the engine's counters.

    Texts that were learnt whole are asked to be continued from their middle.
    """
    with LLM(target, max_model_len=longest, speculative=spec, **flags) as llm:
        llm.engine.pin_drafts(llm.engine.runner.choices[-1])
        halves = [p.token_ids[: max(2, len(p.token_ids) // 2)] if p.complete else p.token_ids for p in prompts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
        answers = dict(play(llm, halves, lambda i: params))
        counters = llm.engine.counters
        return Acceptance(
            counters.accept_length,
            counters.accepted_share_per_position,
            counters.drafted_tokens,
            counters.accepted_tokens,
            [answers[i] for i in range(len(halves))],
        )
