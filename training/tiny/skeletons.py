"""Reads ``skeletons.txt``: the word problems written by hand, in the language of ``stories``.

A block is a line "name | variables", then "? wording" and "= step" lines; a blank line ends it. A wording that begins
with "!" is asked in the test split only; so is every skeleton below the line "--- held out ---". Skeletons between the
line "--- trained only ---" and that one are never asked: they widen the training, and the test split stays what it was.
"""

from __future__ import annotations

import re
from pathlib import Path

from training.tiny.stories import Skeleton

DIVIDERS = re.compile(r"\n--- (?:trained only|held out) ---\n")


def parse(source: str, held_out: bool) -> tuple[Skeleton, ...]:
    """The skeletons of a text in the format above; ValueError names a block that is not in it."""
    found = []
    for block in source.strip().split("\n\n"):
        head, *rest = block.splitlines()
        name, _, variables = (part.strip() for part in head.partition("|"))
        wordings = tuple(line[2:] for line in rest if line.startswith("? "))
        steps = tuple(line[2:] for line in rest if line.startswith("= "))
        if not wordings or len(wordings) + len(steps) != len(rest):
            raise ValueError(f"{name!r}: every line of a block begins with '? ' or '= ', and one wording is needed")
        found.append(Skeleton(name, variables, wordings, steps, held_out))
    return tuple(found)


_seen, _added, _unseen = DIVIDERS.split((Path(__file__).parent / "skeletons.txt").read_text())
SKELETONS = parse(_seen, held_out=False)
TRAINED_ONLY = parse(_added, held_out=False)
HELD_OUT = parse(_unseen, held_out=True)
