"""Questions about scenes and their worked answers, which end in ``#### `` and the final answer, one word.

An answer says what it counts before it counts, in reading order, so that a small model can work it out token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from unisono.tools.eval.scenes import COLOURS, Scene, Thing

MOST_SUMMED = 99


@dataclass(frozen=True)
class Asked:
    """A question and its worked answer. kind: its group in tables."""

    kind: str
    question: str
    answer: str

    @property
    def final_answer(self) -> str:
        return self.answer.rpartition("#### ")[2]


def ask(rng: Random, scene: Scene) -> Asked:
    """A random question about a scene."""
    makers = CHART if scene.bars else THINGS
    while True:
        made = rng.choice(makers)(rng, scene)
        if made is not None:
            return made


def _name(thing: Thing) -> str:
    return f"{thing.colour} {'digit ' if thing.is_digit else ''}{thing.kind}"


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _shapes(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.in_order() if not thing.is_digit]


def _digits(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.in_order() if thing.is_digit]


def _unique(things: list[Thing]) -> list[Thing]:
    """Things that their colour and kind name."""
    names = Counter(_name(thing) for thing in things)
    return [thing for thing in things if names[_name(thing)] == 1]


def _listed(words: list[str]) -> str:
    return ", ".join(words) if words else "none"


# ---- shapes and digits --------------------------------------------------------------------------


def describe(rng: Random, scene: Scene) -> Asked | None:
    question = rng.choice(("What is in the picture?", "Describe the picture.", "List everything that you see."))
    told = [f"{scene.place(thing)}: {_name(thing)}" for thing in scene.in_order()]
    return Asked("describe", question, f"{'; '.join(told)}. #### {len(told)}")


def count_shapes(rng: Random, scene: Scene) -> Asked | None:
    shapes = _shapes(scene)
    question = rng.choice(("How many shapes are there?", "Count the shapes.", "How many shapes do you see?"))
    return Asked("count", question, f"{_listed([_name(s) for s in shapes])}: {len(shapes)}. #### {len(shapes)}")


def count_colour(rng: Random, scene: Scene) -> Asked | None:
    shapes = _shapes(scene)
    colour = rng.choice([s.colour for s in shapes] + [rng.choice(list(COLOURS))])
    found = [s for s in shapes if s.colour == colour]
    question = rng.choice((f"How many {colour} shapes are there?", f"Count the {colour} shapes."))
    return Asked("colour", question, f"{colour}: {_listed([s.kind for s in found])}: {len(found)}. #### {len(found)}")


def count_kind(rng: Random, scene: Scene) -> Asked | None:
    shapes = _shapes(scene)
    if not shapes:
        return None
    kind = rng.choice(shapes).kind
    found = [s for s in shapes if s.kind == kind]
    question = rng.choice((f"How many {_plural(kind)} are there?", f"Count the {_plural(kind)}."))
    told = _listed([s.colour for s in found])
    return Asked("count", question, f"{_plural(kind)}: {told}: {len(found)}. #### {len(found)}")


def add_colours(rng: Random, scene: Scene) -> Asked | None:
    shapes = _shapes(scene)
    if len({s.colour for s in shapes}) < 2:
        return None
    first, second = rng.sample(sorted({s.colour for s in shapes}), 2)
    a, b = ([s.kind for s in shapes if s.colour == colour] for colour in (first, second))
    question = rng.choice(
        (f"How many {first} and {second} shapes are there together?", f"Add the {first} and the {second} shapes.")
    )
    total = len(a) + len(b)
    told = f"{first}: {_listed(a)}: {len(a)}. {second}: {_listed(b)}: {len(b)}. {len(a)} + {len(b)} = {total}"
    return Asked("sum", question, f"{told}. #### {total}")


def which_colour(rng: Random, scene: Scene) -> Asked | None:
    kinds = Counter(thing.kind for thing in scene.things)
    found = [thing for thing in scene.things if kinds[thing.kind] == 1]
    if not found:
        return None
    thing = rng.choice(found)
    what = f"digit {thing.kind}" if thing.is_digit else thing.kind
    question = rng.choice((f"What colour is the {what}?", f"Which colour does the {what} have?"))
    told = f"The {what} at the {scene.place(thing)} is {thing.colour}"
    return Asked("colour", question, f"{told}. #### {thing.colour}")


def where(rng: Random, scene: Scene) -> Asked | None:
    found = _unique(list(scene.things))
    if not found:
        return None
    thing = rng.choice(found)
    question = rng.choice((f"Where is the {_name(thing)}?", f"In which place is the {_name(thing)}?"))
    place = scene.place(thing)
    return Asked("position", question, f"The {_name(thing)} is at the {place}. #### {place}")


def beside(rng: Random, scene: Scene) -> Asked | None:
    found = _unique(list(scene.things))
    if len(found) < 2:
        return None
    a, b = rng.sample(found, 2)
    (row_a, column_a), (row_b, column_b) = scene.cell(a), scene.cell(b)
    word, truth = rng.choice((("left of", column_a < column_b), ("above", row_a < row_b)))
    told = f"The {_name(a)} is at the {scene.place(a)}, the {_name(b)} at the {scene.place(b)}"
    final = "yes" if truth else "no"
    return Asked("position", f"Is the {_name(a)} {word} the {_name(b)}?", f"{told}: {final}. #### {final}")


def what_is_at(rng: Random, scene: Scene) -> Asked | None:
    thing = rng.choice(scene.things)
    place = scene.place(thing)
    question = rng.choice((f"What is at the {place}?", f"Which thing is at the {place}?"))
    return Asked("position", question, f"At the {place} is a {_name(thing)}. #### {thing.kind}")


def read_digits(rng: Random, scene: Scene) -> Asked | None:
    digits = [d.kind for d in _digits(scene)]
    if not digits:
        return None
    question = rng.choice(("Which digits are shown?", "Read the digits.", "What number do the digits make?"))
    return Asked("digits", question, f"The digits are {' '.join(digits)}. #### {''.join(digits)}")


def add_digits(rng: Random, scene: Scene) -> Asked | None:
    digits = [int(d.kind) for d in _digits(scene)]
    if len(digits) < 2:
        return None
    question = rng.choice(("What is the sum of the digits?", "Add the digits.", "What do the digits add up to?"))
    return Asked("sum", question, f"{_summed(digits)}. #### {sum(digits)}")


def largest_digit(rng: Random, scene: Scene) -> Asked | None:
    digits = [d.kind for d in _digits(scene)]
    if not digits:
        return None
    question = rng.choice(("What is the largest digit?", "Which digit is the largest?"))
    largest = max(digits)
    return Asked("digits", question, f"Of {' '.join(digits)} the largest is {largest}. #### {largest}")


def _summed(numbers: list[int]) -> str:
    """ "3 + 5 + 2: 3 + 5 = 8, 8 + 2 = 10"."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return f"{' + '.join(map(str, numbers))}: {', '.join(steps)}"


# ---- bar charts ---------------------------------------------------------------------------------


def describe_chart(rng: Random, scene: Scene) -> Asked | None:
    question = rng.choice(("What is in the picture?", "Describe the chart.", "Read the chart."))
    told = ", ".join(f"{bar.colour} {bar.height}" for bar in scene.bars)
    return Asked("describe", question, f"A bar chart: {told}. #### {len(scene.bars)}")


def bar_height(rng: Random, scene: Scene) -> Asked | None:
    bar = rng.choice(scene.bars)
    question = rng.choice((f"How high is the {bar.colour} bar?", f"What is the value of the {bar.colour} bar?"))
    return Asked("chart", question, f"The {bar.colour} bar is {bar.height} high. #### {bar.height}")


def count_bars(rng: Random, scene: Scene) -> Asked | None:
    question = rng.choice(("How many bars are there?", "Count the bars."))
    told = ", ".join(bar.colour for bar in scene.bars)
    return Asked("count", question, f"{told}: {len(scene.bars)}. #### {len(scene.bars)}")


def highest_bar(rng: Random, scene: Scene) -> Asked | None:
    heights = Counter(bar.height for bar in scene.bars)
    chosen, word = rng.choice(((max(scene.bars, key=lambda b: b.height), "highest"),
                               (min(scene.bars, key=lambda b: b.height), "lowest")))  # fmt: skip
    if heights[chosen.height] > 1:
        return None
    told = ", ".join(f"{bar.colour} {bar.height}" for bar in scene.bars)
    question = rng.choice((f"Which bar is the {word}?", f"What colour is the {word} bar?"))
    return Asked("chart", question, f"{told}: the {word} is {chosen.colour}. #### {chosen.colour}")


def add_bars(rng: Random, scene: Scene) -> Asked | None:
    a, b = rng.sample(scene.bars, 2)
    question = rng.choice(
        (
            f"What is the sum of the {a.colour} and the {b.colour} bar?",
            f"How much are the {a.colour} and the {b.colour} bar together?",
        )
    )
    total = a.height + b.height
    told = f"{a.colour} {a.height}, {b.colour} {b.height}: {a.height} + {b.height} = {total}"
    return Asked("sum", question, f"{told}. #### {total}")


Maker = Callable[[Random, Scene], Asked | None]
THINGS: tuple[Maker, ...] = (
    describe, describe, count_shapes, count_colour, count_kind, add_colours, which_colour, where, beside, what_is_at,
    read_digits, add_digits, largest_digit,
)  # fmt: skip
CHART: tuple[Maker, ...] = (describe_chart, bar_height, bar_height, count_bars, highest_bar, add_bars)
