"""``unisono eval``: accuracy on held-out problems, speed, and draft acceptance.

The problems are grade-school maths in the form of GSM8K (``problems.py``); a vision model gets problems with small
images instead (``picture_problems.py``). The model answers greedily. An answer is right when the word after ``####`` is
right.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono.tools.eval.picture_problems import PictureProblem, picture_problems
from unisono.tools.eval.problems import HeldOutProblem, final_answer, held_out_problems
from unisono.types import SamplingParams

if TYPE_CHECKING:
    from unisono.entrypoints.llm import LLM


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation.

    right: problems solved. by_kind: (solved, total) per kind of problem. tokens: generated. seconds: to generate them.
    accept_length: mean tokens committed per round, None without speculation. positions: fraction of rounds in which the
    draft at position 1, 2 … was accepted. pictures: the problems had images. answers: token ids of each.
    """

    problems: int
    right: int
    by_kind: dict[str, tuple[int, int]]
    tokens: int
    seconds: float
    accept_length: float | None
    positions: tuple[float, ...]
    pictures: bool = False
    answers: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def lines(self) -> list[str]:
        """The result as text."""
        kinds = ", ".join(f"{kind} {right} of {count}" for kind, (right, count) in self.by_kind.items())
        lines = [f"{self.right} of {self.problems} right ({100 * self.right / self.problems:.1f} %): {kinds}"]
        lines.append(f"{self.tokens} tokens in {self.seconds:.1f} s, {self.tokens / self.seconds:.0f} tokens/s")
        return lines if self.accept_length is None else [*lines, self.acceptance]

    @property
    def acceptance(self) -> str:
        """Draft acceptance as text."""
        shares = ", ".join(f"{share:.2f}" for share in self.positions)
        return f"{self.accept_length:.2f} tokens per round (accepted by position: {shares})"


def evaluate(llm: LLM, count: int, max_tokens: int) -> Evaluation:
    """Ask the first ``count`` problems in one batch. ``llm`` needs a tokenizer with a chat template."""
    sees = bool(llm.engine.info().get("vision"))
    problems: Sequence[HeldOutProblem | PictureProblem] = picture_problems(count) if sees else held_out_problems(count)
    llm.engine.pin_drafts(llm.engine.runner.choices[-1])  # acceptance by position needs the same k in every round
    started = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    outputs = llm.chat([problem.messages() for problem in problems], params)
    seconds = time.perf_counter() - started
    right, totals = Counter[str](), Counter(problem.kind for problem in problems)
    for problem, output in zip(problems, outputs, strict=True):
        right[problem.kind] += final_answer(output.outputs[0].text) == problem.final_answer
    counters = llm.engine.counters
    drafts = llm.engine.runner.choices[-1]
    return Evaluation(
        len(problems),
        right.total(),
        {kind: (right[kind], totals[kind]) for kind in totals},
        sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds,
        counters.accept_length if drafts else None,
        counters.accepted_share_per_position[:drafts],
        sees,
        tuple(tuple(output.outputs[0].token_ids) for output in outputs),
    )


@contextlib.contextmanager
def pictures_withheld() -> Iterator[None]:
    """Draft heads of engines that are built and run inside read placeholders in place of image embeddings.

    The difference in acceptance is the benefit of image embeddings for drafts. The text is the same.
    """
    from unisono.drafters.eagle.model import DraftBlock

    usual = DraftBlock.sees_embeddings
    DraftBlock.sees_embeddings = property(lambda head: False)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DraftBlock.sees_embeddings = usual  # type: ignore[method-assign]
