"""A small language for word problems, and the renderer that fills it with names, things and numbers.

A ``Skeleton`` is a template: variables with ranges, wordings of the question, and worked steps. ``tell`` draws
numbers until the result of every step is a whole number in bounds, then fills in one wording.

    variables   "a=2-12 d=2|4|5 t=a*d thing=:cakes,plum_pies"   range, choice, product of earlier ones, word
    wordings    "{N} buys {a} (boxes|crates) of {items}."       {hole}, (one|of|these); leading "!": test split only
    steps       "{N} has [x=a*b] {items}."                      defines x, prints "3 * 4 = 12"; the last is the answer

Predefined holes: N, F, G, H four people; he, He, his, him; item(s), item2/items2, food(s), shop;
frac_d ("a third" for d = 3), times_k ("twice" for k = 2).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

TRIES = 400
"""Draws of numbers before ``tell`` gives up and returns None."""

SMALLEST, LARGEST = 2, 999
"""Bounds of the result of every step. They avoid "1 apples" and numbers that are too large for a tiny model."""

LISTS: dict[str, list[str]] = defaultdict(list)
"""The word lists of ``words.txt``: names, things, foods, places and more."""
for _line in (Path(__file__).parent / "words.txt").read_text().splitlines():
    LISTS[_line.split(":")[0]] += _line.split(":")[1].split()

PLURALS = {
    "candy": "candies", "cherry": "cherries", "tomato": "tomatoes", "sandwich": "sandwiches", "mango": "mangoes",
    "peach": "peaches",
}  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"
)  # fmt: skip
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 10: "a tenth"}

_STEP = re.compile(r"\[(\w+)=(\w+)([-+*/])(\w+)\]")
CHOICE = re.compile(r"\(([^()|]*\|[^()]*)\)")
_HOLE = re.compile(r"(\$?)\{(\w+)\}(%?)")


@dataclass(frozen=True)
class Skeleton:
    """A template of a word problem. held_out: it belongs to the test split."""

    name: str
    variables: str
    wordings: tuple[str, ...]
    steps: tuple[str, ...]
    held_out: bool = False


@dataclass(frozen=True)
class Problem:
    """A rendered word problem. template: names of skeleton and wording. numbers: the values drawn, in order."""

    template: str
    numbers: tuple[int, ...]
    question: str
    worked_answer: str
    final_answer: str


def tell(skeleton: Skeleton, wording: int, rng: Random) -> Problem | None:
    """Render one wording of a skeleton; None if no numbers in bounds were found."""
    for _ in range(TRIES):
        values = _draw(skeleton.variables, rng)
        numbers = tuple(v for v in values.values() if isinstance(v, int))
        if _work(skeleton.steps, values):
            break
    else:
        return None
    holes = {**_cast(rng), **values}
    question = _fill(skeleton.wordings[wording].lstrip("!"), holes, rng, in_words=rng.random() < 0.08)
    lines: list[str] = []
    final: int | str = 0
    for step in skeleton.steps:
        final = next((values[m[1]] for m in _STEP.finditer(step)), final)
        lines.append(_fill(_STEP.sub(lambda m: _equation(m, values), step), holes, rng))
    worked = "\n".join([*lines, f"#### {final}"])
    return Problem(f"{skeleton.name}/{wording}", numbers, question, worked, str(final))


def plural(noun: str) -> str:
    """The plural of one of this module's nouns."""
    return PLURALS.get(noun, noun + "s")


@lru_cache(maxsize=65536)
def _parse(variables: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((name, _sort(value), value) for name, value in (pair.split("=", 1) for pair in variables.split()))


def _sort(value: str) -> str:
    """The kind of a variable's definition: word, choice, range or expression."""
    if value.startswith(":"):
        return "word"
    if "|" in value:
        return "choice"
    return "range" if re.fullmatch(r"\d+-\d+", value) else "expression"


def _draw(variables: str, rng: Random) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for name, what, value in _parse(variables):
        if what == "word":
            values[name] = rng.choice(value[1:].split(",")).replace("_", " ")
        elif what == "choice":
            values[name] = int(rng.choice(value.split("|")))
        elif what == "range":
            low, high = value.split("-")
            values[name] = rng.randint(int(low), int(high))
        else:
            left, operator, right = re.split(r"([-+*/])", value)
            values[name] = _calculate(_number(left, values), operator, _number(right, values))
    return values


def _number(text: str, values: dict[str, int | str]) -> int:
    return int(text) if text.isdigit() else int(values[text])


def _calculate(left: int, operator: str, right: int) -> int:
    """The result, or -1 if a division leaves a remainder."""
    if operator == "/":
        return left // right if left % right == 0 else -1
    return left * right if operator == "*" else left + right if operator == "+" else left - right


def _work(steps: tuple[str, ...], values: dict[str, int | str]) -> bool:
    """Compute the result of every step into ``values``; False if one is out of bounds."""
    if any(isinstance(v, int) and v < SMALLEST for v in values.values()):
        return False
    for step in steps:
        for target, left, operator, right in _STEP.findall(step):
            result = _calculate(_number(left, values), operator, _number(right, values))
            if not SMALLEST <= result <= LARGEST:
                return False
            values[target] = result
    return True


def _equation(match: re.Match[str], values: dict[str, int | str]) -> str:
    target, left, operator, right = match.groups()
    return f"{_number(left, values)} {operator} {_number(right, values)} = {values[target]}"


def _cast(rng: Random) -> dict[str, str]:
    """Random people, things and places for one problem."""
    people = rng.sample(LISTS["he"], 3) + rng.sample(LISTS["she"], 3)
    rng.shuffle(people)
    first, friend, third = people[:3]
    he, his, him = ("he", "his", "him") if first in LISTS["he"] else ("she", "her", "her")
    item, item2 = rng.sample(LISTS["things"] + LISTS["foods"], 2)
    food = rng.choice(LISTS["foods"])
    holes = {"N": first, "F": friend, "G": third, "H": people[3]}
    holes |= {"he": he, "He": he.capitalize(), "his": his, "him": him}
    holes |= {
        "item": item,
        "items": plural(item),
        "item2": item2,
        "items2": plural(item2),
        "food": food,
        "foods": plural(food),
    }
    return {name: word.replace("_", " ") for name, word in holes.items()} | {"shop": rng.choice(LISTS["shops"])}


def _fill(text: str, holes: Mapping[str, int | str], rng: Random, in_words: bool = False) -> str:
    def hole(match: re.Match[str]) -> str:
        dollar, name, percent = match.groups()
        prefix, _, rest = name.partition("_")
        if prefix == "frac":
            return FRACTIONS[int(holes[rest])]
        if prefix == "times":
            times = int(holes[rest])
            return "twice" if times == 2 else f"{NUMBER_WORDS[times]} times"
        value = holes[name]
        if in_words and isinstance(value, int) and value < len(NUMBER_WORDS) and not dollar and not percent:
            return NUMBER_WORDS[value]
        return f"{dollar}{value}{percent}"

    filled = _HOLE.sub(hole, CHOICE.sub(lambda m: rng.choice(m[1].split("|")), text))
    return re.sub(r"(^|[.?!] )([a-z])", lambda m: m[1] + m[2].upper(), filled)
