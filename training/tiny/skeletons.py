"""Reads ``skeletons.txt``: word problems written by hand, in the language of ``stories``.

A block is a line "name | variables" followed by lines "? wording" and "= step"; blank lines separate blocks. Wordings
that begin with "!" and all skeletons below the line "--- held out ---" belong to the test split. Skeletons between the
line "--- trained only ---" and that line occur in the training split only.
"""

from __future__ import annotations

import re
from pathlib import Path

from training.tiny.stories import Skeleton

DIVIDERS = re.compile(r"\n--- (?:trained only|held out) ---\n")


def parse(source: str, held_out: bool) -> tuple[Skeleton, ...]:
    """The skeletons of a text in this format. Raises ValueError that names an invalid block."""
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
