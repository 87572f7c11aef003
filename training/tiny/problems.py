"""Writes the held-out problems that the installed package ships: ``python -m training.tiny.problems``.

By default it overwrites ``unisono/tools/eval/problems.jsonl``. The output is the same every time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.tiny.data import test_split
from unisono.tools.eval.problems import COUNT, FILE


def lines(count: int) -> list[str]:
    """One JSON object per problem, in the order of the test split."""
    return [
        json.dumps({"kind": kind, "question": problem.question, "final_answer": problem.final_answer})
        for kind, problem in test_split(count)
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="JSONL file to write")
    options = parser.parse_args()
    options.out.write_text("\n".join(lines(COUNT)) + "\n", encoding="utf-8")
    print(f"{COUNT} problems in {options.out}")


if __name__ == "__main__":
    main()
