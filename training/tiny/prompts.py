"""Maths prompts for ``unisono train-draft``: ``python -m training.tiny.prompts --out FILE.jsonl --count N``.

Each line is a conversation, ``{"messages": [{"role": "user", "content": question}]}``. ``--split train`` draws problems
of the bundled model's training split and rewords half of them. ``--split test`` gives the held-out problems of
``unisono eval``, in the same order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from training.tiny.data import test_split, train_problem
from training.tiny.retell import retell

SPLITS = ("train", "test")
RETOLD = 0.5
"""Share of training prompts that are reworded, as in the training text."""


def questions(split: str, count: int, seed: int = 0) -> list[str]:
    """``count`` different questions of a split; they depend on the arguments only. seed: for the training split."""
    if split == "test":
        return [problem.question for _, problem in test_split(count)]
    rng = Random(f"prompts {seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        question = train_problem(rng).question
        found[retell(question, rng) if rng.random() < RETOLD else question] = None
    return list(found)


def write_prompts(file: Path, split: str, count: int, seed: int = 0) -> None:
    """Write one JSON line per question."""
    with file.open("w", encoding="utf-8") as out:
        for question in questions(split, count, seed):
            out.write(json.dumps({"messages": [{"role": "user", "content": question}]}) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0, help="seed for the training split")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count}: give at least 1")
    write_prompts(options.out, options.split, options.count, options.seed)
    print(f"{options.count} prompts of the {options.split} split in {options.out}")


if __name__ == "__main__":
    main()
