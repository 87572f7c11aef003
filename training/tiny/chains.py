"""Word problems composed from events. The families are: holding things, comparing people, shopping, and earning pay.

``compose`` joins parts of ``chains.txt`` into a ``Skeleton``. A *composition* is a family and a sequence of parts. Of
the several hundred compositions ``data`` holds some out for the test split.

Parts are written like skeletons and named "family.role.kind". They change a running amount. In their text ``#`` is the
index of the part ("v#" becomes "v1"), ``@`` is the amount before the part, and the step target ``!`` is the amount
after it. {A} and {B} are the people being compared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.tiny.skeletons import parse
from training.tiny.stories import LISTS, Skeleton

STEPS = range(2, 6)
"""Allowed numbers of worked steps."""

PEOPLE = "NFGH"
_PARTS: dict[str, dict[str, Skeleton]] = defaultdict(dict)
for _part in parse((Path(__file__).parent / "chains.txt").read_text(), held_out=False):
    _group, _, _kind = _part.name.rpartition(".")
    _PARTS[_group][_kind] = _part


def _compositions() -> Iterator[str]:
    """Every "family:part-part-…-end" with a number of steps in ``STEPS``."""
    for family, most in (("hold", 3), ("compare", 3), ("pay", 2)):
        parts = (_PARTS[f"{family}.start"], _PARTS[f"{family}.event"], _PARTS[f"{family}.end"])
        for start, count, end in itertools.product(parts[0], range(most + 1), parts[2]):
            for events in itertools.product(parts[1], repeat=count):
                yield f"{family}:" + "-".join((start, *events, end))
    for count, end in itertools.product(range(1, 4), _PARTS["shop.end"]):
        for lines in itertools.product(_PARTS["shop.start"], repeat=count):
            yield "shop:" + "-".join((*lines, end))


def compose(composition: str, rng: Random) -> Skeleton:
    """A skeleton for the composition, with one wording: a random phrase of each part."""
    family, _, kinds = composition.partition(":")
    story = _Story(family, rng)
    *heads, end = kinds.split("-")
    if family == "shop":
        story.shop([_PARTS["shop.start"][kind] for kind in heads])
    else:
        story.add(_PARTS[f"{family}.start"][heads[0]])
        for kind in heads[1:]:
            story.add(_PARTS[f"{family}.event"][kind])
    if end == "total" and family == "compare":
        story.sum_people()
    story.add(_PARTS[f"{family}.end"][end], end=True)
    return Skeleton(composition, " ".join(story.variables), (" ".join(story.said),), tuple(story.steps))


class _Story:
    """A skeleton under construction. amounts: names of the running amounts so far, newest last."""

    def __init__(self, family: str, rng: Random) -> None:
        self.rng, self.place = rng, 0
        self.variables: list[str] = []
        self.said: list[str] = []
        self.steps: list[str] = []
        self.amounts = ["v"] if family in ("hold", "compare") else []

    def add(self, part: Skeleton, end: bool = False) -> None:
        """Append a random phrase of the part, its variables and its steps."""
        place, amount = str(self.place), self.amounts[-1] if self.amounts else ""
        people = {"{A}": f"{{{PEOPLE[max(self.place - 1, 0)]}}}", "{B}": f"{{{PEOPLE[self.place - end]}}}"}

        def here(text: str) -> str:
            for mark, meaning in {"#": place, "@": amount, "[!": f"[z{place}", **people}.items():
                text = text.replace(mark, meaning)
            return text

        self.variables += here(part.variables).split()
        self.said.append(here(self.rng.choice(part.wordings)))
        self.steps += map(here, part.steps)
        if any("[!" in step for step in part.steps):
            self.amounts.append(f"z{place}")
        self.place += 1

    def shop(self, lines: list[Skeleton]) -> None:
        """Append a sentence that lists the purchases, and the steps that add up their prices."""
        goods, singles = self.rng.sample(LISTS["goods"], len(lines)), self.rng.sample(LISTS["singles"], len(lines))
        for line in lines:
            self.variables += [f"thing{self.place}=:{goods[self.place]}", f"single{self.place}=:{singles[self.place]}"]
            self.add(line)
        bought, self.said = self.said, []
        listed = bought[0] if len(bought) == 1 else ", ".join(bought[:-1]) + " and " + bought[-1]
        opening = self.rng.choice(("{N} buys ", "{N} goes to the {shop} and buys ", "At the {shop} {N} gets "))
        self.said.append(f"{opening}{listed}.")
        self.amounts.append("y0")
        for place in range(1, len(lines)):
            self.steps.append(f"Together that is [s{place}={self.amounts[-1]}+y{place}] dollars.")
            self.amounts.append(f"s{place}")

    def sum_people(self) -> None:
        """Append the steps that add up the amounts of all people."""
        each, total = self.amounts, self.amounts[0]
        for place in range(1, len(each)):
            self.steps.append(f"Together that is [t{place}={total}+{each[place]}] {{items}}.")
            total = f"t{place}"


def _by_steps() -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for composition in _compositions():
        steps = len(compose(composition, Random(0)).steps)
        if steps in STEPS:
            found[steps].append(composition)
    return dict(found)


COMPOSITIONS: dict[int, list[str]] = _by_steps()
"""Compositions by their number of worked steps."""
