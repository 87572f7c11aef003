"""Stop expressions against Python's own, and the text that they let out early."""

from __future__ import annotations

import random
import re
import time

import pytest

from unisono.text.detokenizer import _Stops
from unisono.text.stop_regex import StopRegex
from unisono.types import BadRequest

PATTERNS = (
    r"ab+c", r"(?i)Ab|ba{2,3}", r"[^ab]+c.", r"a(b|c)*d", r"\w\s", r"(?s)a.b", r"x?y?ab{0,2}a", r"a.b", r"\d{2}|\D\S",
    r"(?:a|(b))c", r"[a-c]{3}d?A", r"a+?b", r"(?i:a)B", r"aab|b", r"a*b|cb",
)  # fmt: skip


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """By trying every part of the text: the earliest end, and the earliest start of those."""
    whole = re.compile(pattern)
    for end in range(1, len(text) + 1):
        starts = [start for start in range(end) if whole.fullmatch(text, start, end)]
        if starts:
            return min(starts), end
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_stop_regex_finds_the_first_match(pattern: str) -> None:
    rng = random.Random(pattern)
    for _ in range(200):
        text = "".join(rng.choice("abcdAB 1\n") for _ in range(rng.randrange(1, 15)))
        assert StopRegex([pattern]).feed(text) == first_match(pattern, text), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pieces_do_not_matter(pattern: str) -> None:
    """Cut anywhere, the text is the same, and nothing is let out that the match begins with."""
    rng = random.Random(pattern)
    for _ in range(100):
        text = "".join(rng.choice("abcdAB 1\n") for _ in range(rng.randrange(1, 20)))
        match = first_match(pattern, text)
        expected = text if match is None else text[: match[0]]
        stops, out = _Stops((), False, StopRegex([pattern])), ""
        rest = text
        while rest:
            cut = rng.randrange(1, len(rest) + 1)
            out += stops.push(rest[:cut])
            rest = rest[cut:]
        if match is not None:
            assert stops.found == text[slice(*match)]
        assert out + stops.flush() == expected


def test_text_that_begins_no_match_is_let_out_at_once() -> None:
    stops = _Stops((), False, StopRegex([r"\d+ apples"]))
    assert stops.push("I have 1") == "I have "
    assert stops.push("2 pears") == "12 pears"
    assert stops.push(" and 3 apples more") == " and "
    assert stops.found == "3 apples"


def test_stop_regex_is_linear_in_text() -> None:
    """Exponential for Python's re: linear here."""
    begun = time.perf_counter()
    assert StopRegex([r"(a+)+b", r"(a|aa)+c"]).feed("a" * 5000) is None
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "unterminated"), ("a*", "empty text"), ("|a", "empty text"), ("^a", "anchors"), (r"a\b", "anchors"),
        ("a(?=b)", "look-around"), ("(?<!b)a", "look-around"), (r"(a)\1", "references"), ("a{1000}", "500 states"),
        ("(a{50}){50}", "500 states"), ("a" * 1001, "1001 characters"), ("(?>a)b", "atomic"), ("a++b", "possessive"),
    ],
)  # fmt: skip
def test_refusals(pattern: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        StopRegex([pattern])
