"""The held-out word problems of ``unisono eval`` and the benchmarks, in the form of GSM8K.

They are stored in ``problems.jsonl``, one JSON object per line. ``python -m training.tiny.problems`` writes that file
from the test split of the bundled model's data (in a checkout of the repository).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.types import ConfigError

FILE = Path(__file__).parent / "problems.jsonl"
COUNT = 512
"""Number of stored problems."""


@dataclass(frozen=True)
class HeldOutProblem:
    """kind: how the problem differs from the training data. final_answer: the number after ``####``."""

    kind: str
    question: str
    final_answer: str

    def messages(self) -> list[dict[str, Any]]:
        """The question as a conversation for a chat request."""
        return [{"role": "user", "content": self.question}]


def held_out_problems(count: int) -> list[HeldOutProblem]:
    """The first ``count`` problems, always in the same order. Raises ConfigError above ``COUNT``."""
    if count > COUNT:
        raise ConfigError(f"{count} held-out problems were requested, but only {COUNT} exist: request fewer.")
    with FILE.open(encoding="utf-8") as lines:
        return [HeldOutProblem(**json.loads(line)) for line, _ in zip(lines, range(count), strict=False)]


def final_answer(text: str) -> str | None:
    """The word after the last ``####`` of a worked answer, without commas; None if there is none."""
    _, mark, rest = text.rpartition("####")
    words = rest.split()
    return words[0].replace(",", "").rstrip(".") if mark and words else None
