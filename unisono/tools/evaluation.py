"""``unisono eval``: how many of the bundled model's held-out problems a model solves, and what speculation brings.

The problems are those of ``tools/tiny/data.py``: grade-school maths in GSM8K's form. Answers are greedy; one is right
when what follows ``####`` is the right number.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.tools.tiny.data import final_answer, test_split
from unisono.types import SamplingParams

if TYPE_CHECKING:
    from unisono.llm import LLM


@dataclass(frozen=True)
class Evaluation:
    """Of so many problems: how many are right, by kind too; generated tokens and the seconds that they took; with
    speculation the tokens a round and the share of rounds in which draft 1, 2 … was accepted."""

    problems: int
    right: int
    by_kind: dict[str, tuple[int, int]]
    tokens: int
    seconds: float
    accept_length: float | None
    positions: tuple[float, ...]

    def lines(self) -> list[str]:
        """For people."""
        kinds = ", ".join(f"{kind} {right} of {count}" for kind, (right, count) in self.by_kind.items())
        lines = [f"{self.right} of {self.problems} right ({100 * self.right / self.problems:.1f} %): {kinds}"]
        lines.append(f"{self.tokens} tokens in {self.seconds:.1f} s, {self.tokens / self.seconds:.0f} tokens/s")
        if self.accept_length is not None:
            shares = ", ".join(f"{share:.2f}" for share in self.positions)
            lines.append(f"{self.accept_length:.2f} tokens a round (accepted by position: {shares})")
        return lines


def evaluate(llm: LLM, count: int, max_tokens: int) -> Evaluation:
    """Ask the first ``count`` problems, all at once. llm: it has a tokenizer with a chat template."""
    problems = test_split(count)
    llm.engine.pin_drafts(llm.engine.runner.choices[-1])  # acceptance by place wants every round to draft as many
    started = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    outputs = llm.chat([[{"role": "user", "content": problem.question}] for _, problem in problems], params)
    seconds = time.perf_counter() - started
    right, asked = Counter[str](), Counter(kind for kind, _ in problems)
    for (kind, problem), output in zip(problems, outputs, strict=True):
        right[kind] += final_answer(output.outputs[0].text) == problem.final_answer
    counters = llm.engine.counters
    drafts = len(counters.accepted_per_position)
    return Evaluation(
        len(problems),
        right.total(),
        {kind: (right[kind], asked[kind]) for kind in asked},
        sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds,
        counters.accept_length if drafts else None,
        counters.accepted_share_per_position,
    )
