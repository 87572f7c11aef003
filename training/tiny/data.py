"""The maths problems of the bundled model: the training split, and a test split that does not overlap with it.

A problem belongs to the test split if a hash of its template and numbers says so. In three of the four kinds of test
problem the template does not occur in training either. This module does not import torch. ``problems`` writes the test
split to the file that ``unisono eval`` reads.

    numbers      a template of the training split, with other numbers
    wording      a skeleton of the training split, in a wording that training does not use
    composition  a sequence of events that does not occur in training
    skeleton     a story that does not occur in training (its sequence of operations may)
"""

from __future__ import annotations

import itertools
import zlib
from random import Random

from training.tiny.chains import COMPOSITIONS, compose
from training.tiny.skeletons import HELD_OUT, SKELETONS, TRAINED_ONLY
from training.tiny.stories import Problem, Skeleton, tell

KINDS = {"numbers": 10, "wording": 6, "composition": 6, "skeleton": 3}
"""Kinds of test problem, and how many of 25 problems are of each kind."""

HELD_OUT_NUMBERS = 16
"""One in this many draws of numbers belongs to the test split."""

HELD_OUT_COMPOSITIONS = 7
"""One in this many compositions belongs to the test split."""

DRILLS = (
    ("add", "a=2-500 b=2-400", "a+b"),
    ("subtract", "a=2-900 b=2-500", "a-b"),
    ("subtract", "a=2-200 b=2-150", "a-b"),
    ("multiply", "a=2-99 b=2-12", "a*b"),
    ("multiply", "b=2-12 a=2-99", "b*a"),
    ("divide", "b=2-12 q=2-80 a=b*q", "a/b"),
)
"""Bare arithmetic: name, variables, operation."""

_TEST_SEED = 20_261_120


def template_of(problem: Problem) -> str:
    """The name of the skeleton or composition, without the wording."""
    return problem.template.rpartition("/")[0]


def numbers_held_out(problem: Problem) -> bool:
    """Whether the problem's numbers belong to the test split, for its skeleton or composition."""
    return _hash(f"{template_of(problem)} {problem.numbers}") % HELD_OUT_NUMBERS == 0


def composition_held_out(composition: str) -> bool:
    """Whether this sequence of events belongs to the test split."""
    return _hash(composition) % HELD_OUT_COMPOSITIONS == 0


def train_problem(rng: Random) -> Problem:
    """A random problem of the training split."""
    while True:
        draw = rng.random()
        if draw < 0.06:
            problem = _drill(rng)
        else:
            problem = _chain(rng, False) if draw < 0.42 else _skeleton(SKELETONS + TRAINED_ONLY, False, rng)
        if problem and not numbers_held_out(problem):
            return problem


def test_problem(kind: str, rng: Random) -> Problem:
    """A random problem of the test split; ``kind`` is one of ``KINDS``."""
    makers = {
        "numbers": lambda: _chain(rng, False) if rng.random() < 0.5 else _skeleton(SKELETONS, False, rng),
        "wording": lambda: _skeleton(SKELETONS, True, rng),
        "composition": lambda: _chain(rng, True),
        "skeleton": lambda: _skeleton(HELD_OUT, False, rng),
    }
    while True:
        problem = makers[kind]()
        if problem and numbers_held_out(problem):
            return problem


def test_split(n: int = 500) -> list[tuple[str, Problem]]:  # noqa: PT028 (no pytest test)
    """The first ``n`` (kind, problem) pairs of the test split.

    The result is always the same. Questions are unique, and kinds have the shares of ``KINDS``.
    """
    rng = Random(_TEST_SEED)
    order = [kind for kind, share in KINDS.items() for _ in range(share)]
    rng.shuffle(order)
    chosen: dict[str, tuple[str, Problem]] = {}
    for kind in itertools.cycle(order):
        if len(chosen) == n:
            break
        problem = test_problem(kind, rng)
        while problem.question in chosen:
            problem = test_problem(kind, rng)
        chosen[problem.question] = kind, problem
    return list(chosen.values())


def test_problems(n: int = 500) -> list[tuple[str, str, str]]:  # noqa: PT028 (no pytest test)
    """The first ``n`` problems of the test split as (question, worked answer, final answer)."""
    return [(problem.question, problem.worked_answer, problem.final_answer) for _, problem in test_split(n)]


def _skeleton(skeletons: tuple[Skeleton, ...], held_out_wording: bool, rng: Random) -> Problem | None:
    skeleton = rng.choice(skeletons)
    wordings = [i for i, wording in enumerate(skeleton.wordings) if wording.startswith("!") == held_out_wording]
    return tell(skeleton, rng.choice(wordings), rng)


def _chain(rng: Random, held_out: bool) -> Problem | None:
    composition = rng.choice(COMPOSITIONS[rng.choice(sorted(COMPOSITIONS))])
    if composition_held_out(composition) != held_out:
        return None
    return tell(compose(composition, rng), 0, rng)


def _drill(rng: Random) -> Problem | None:
    """A problem of bare arithmetic."""
    name, variables, operation = rng.choice(DRILLS)
    shown = f"{{{operation[0]}}} {operation[1]} {{{operation[2]}}}"
    asked = (
        f"What is {shown}?",
        f"(Compute|Calculate|Work out) {shown}.",
        f"{shown}",
        f"{shown} = ?",
        f"How much is {shown}?",
    )
    drill = Skeleton(f"drill-{name}", variables, asked, (f"[x={operation}]",))
    return tell(drill, rng.randrange(len(asked)), rng)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
