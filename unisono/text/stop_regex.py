"""Stop expressions: the first match in a text, found character by character in linear time.

Python's ``re`` backtracks, exponentially for some patterns, and cannot tell which end of a text may still become a
match. So the pattern is compiled to an automaton (Thompson's construction) whose states are all tracked at once, each
with the start of its match. The first character that completes a match ends the text; of the matches that end there it
is the longest, independent of token boundaries. Anchors, look-around and references are not regular, or need later
text; they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from unisono.types import BadRequest
from unisono.types.limits import SAMPLING, shown

MAX_STATES = 500
"""Most states of all expressions of a request: the worst-case cost of a character."""

Test = Callable[[str], bool]

_WORD, _DIGIT, _SPACE = (re.compile(text).match for text in (r"\w", r"\d", r"\s"))
_CATEGORIES: dict[Any, Test] = {
    codes.CATEGORY_DIGIT: lambda c: _DIGIT(c) is not None,
    codes.CATEGORY_NOT_DIGIT: lambda c: _DIGIT(c) is None,
    codes.CATEGORY_SPACE: lambda c: _SPACE(c) is not None,
    codes.CATEGORY_NOT_SPACE: lambda c: _SPACE(c) is None,
    codes.CATEGORY_WORD: lambda c: _WORD(c) is not None,
    codes.CATEGORY_NOT_WORD: lambda c: _WORD(c) is None,
}
_REFUSED = {
    codes.AT: "anchors (^, $, \\b)",
    codes.ASSERT: "look-around",
    codes.ASSERT_NOT: "look-around",
    codes.GROUPREF: "references to groups",
    codes.GROUPREF_EXISTS: "references to groups",
    codes.ATOMIC_GROUP: "atomic groups",
    codes.POSSESSIVE_REPEAT: "possessive repeats",
}


@dataclass
class _Automaton:
    """A nondeterministic automaton; states are numbers, and an edge without a test reads nothing."""

    tests: list[tuple[Test, int] | None] = field(default_factory=list)  # of a state that reads a character
    empty: list[list[int]] = field(default_factory=list)
    shared: dict[tuple[Any, int, int], tuple[Any, Test]] = field(default_factory=dict)

    def state(self) -> int:
        if len(self.tests) >= MAX_STATES:
            raise ValueError(f"it needs more than {MAX_STATES} states; make it shorter, or its counted repeats smaller")
        self.tests.append(None)
        self.empty.append([])
        return len(self.tests) - 1

    def add(self, nodes: Iterable[Any], start: int, flags: int) -> int:
        """Append a parsed expression at state ``start``; returns its last state. Raises ValueError."""
        for code, value in nodes:
            start = self._add(code, value, start, flags)
        return start

    def _add(self, code: Any, value: Any, start: int, flags: int) -> int:
        if code in _REFUSED:
            raise ValueError(f"{_REFUSED[code]} cannot end a text that is still being written")
        if code is codes.SUBPATTERN:
            _, added, removed, inner = value
            return self.add(inner, start, (flags | added) & ~removed)
        if code is codes.BRANCH:
            end = self.state()
            for branch in value[1]:
                first = self.state()
                self.empty[start].append(first)
                self.empty[self.add(branch, first, flags)].append(end)
            return end
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, start, flags)
        end = self.state()
        self.tests[start] = (self._shared(code, value, flags), end)
        return end

    def _shared(self, code: Any, value: Any, flags: int) -> Test:
        """The test of an element, shared by all states that a repeat makes of it."""
        key = (code, id(value), flags)
        if key not in self.shared:
            self.shared[key] = (value, _test(code, value, flags))  # keep the value alive, so that its id stays unique
        return self.shared[key][1]

    def _repeat(self, least: int, most: Any, inner: Any, start: int, flags: int) -> int:
        for _ in range(least):
            start = self._once(inner, start, flags)
        if most is codes.MAXREPEAT:
            loop, end = self.state(), self.state()
            self.empty[start].append(loop)
            self.empty[self._once(inner, loop, flags)].append(loop)
            self.empty[loop].append(end)
            return end
        ends = [start]
        for _ in range(most - least):
            ends.append(start := self._once(inner, start, flags))
        end = self.state()
        for one in ends:
            self.empty[one].append(end)
        return end

    def _once(self, inner: Any, start: int, flags: int) -> int:
        """Add one iteration of a repeat, at a new state: ``start`` may have other edges."""
        first = self.state()
        self.empty[start].append(first)
        return self.add(inner, first, flags)


def _test(code: Any, value: Any, flags: int) -> Test:
    """The test of a character. Raises ValueError for an unknown element."""
    if code is codes.ANY:
        return (lambda c: True) if flags & re.DOTALL else (lambda c: c != "\n")
    one = _in(value) if code is codes.IN else _in([(code, value)])
    if not flags & re.IGNORECASE:
        return one
    return lambda c: one(c) or one(c.lower()) or one(c.upper())


def _in(items: Iterable[Any]) -> Test:
    tests: list[Test] = []
    literals: set[str] = set()
    negated = False
    for code, value in items:
        if code is codes.NEGATE:
            negated = True
        elif code is codes.LITERAL:
            literals.add(chr(value))
        elif code is codes.NOT_LITERAL:
            tests.append(chr(value).__ne__)
        elif code is codes.RANGE:
            low, high = map(chr, value)
            tests.append(lambda c, low=low, high=high: low <= c <= high)  # type: ignore[misc]
        elif code is codes.CATEGORY and value in _CATEGORIES:
            tests.append(_CATEGORIES[value])
        else:
            raise ValueError(f"{code} is not supported")
    if literals:
        tests.insert(0, literals.__contains__)
    return lambda c: any(test(c) for test in tests) != negated


class StopRegex:
    """The automaton of some expressions, and its state after a text.

    Raises BadRequest for unsupported expressions.

    ``partial_start``: start of the earliest match that more text may complete; None without one.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = tuple(patterns)
        if (problem := SAMPLING[PARAM].problem(patterns)) is not None:
            raise BadRequest(f"{PARAM}={shown(patterns)} is not valid: {problem}.", PARAM)
        self._automaton = _Automaton()
        self._first = self._automaton.state()
        self._ends = {_compiled(self._automaton, pattern, self._first) for pattern in patterns}
        self._closures: dict[int, frozenset[int]] = {}
        self._alive: dict[int, int] = {}  # reading states -> the earliest start of a match in that state
        self._position = 0
        if self._ends & self._reached(self._first):
            raise BadRequest("stop_regex matches the empty text, which would end every answer at once.", PARAM)

    @property
    def partial_start(self) -> int | None:
        return min(self._alive.values(), default=None)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Read more text; (start, end) of the first match that ends in it, counted from the text's beginning."""
        found: tuple[int, int] | None = None
        for char in text:
            match = self._step(char)
            found = found or match
        return found

    def _step(self, char: str) -> tuple[int, int] | None:
        passed: dict[int, bool] = {}  # by the test's id: states of a repeated element share its test
        alive: dict[int, int] = {}
        first = None
        starting = dict.fromkeys(self._reached(self._first), self._position)
        # The earliest match first, so that each state is reached with its earliest start.
        for state, start in sorted({**starting, **self._alive}.items(), key=lambda one: one[1]):
            found = self._automaton.tests[state]
            if found is None:
                continue
            test, after = found
            if id(test) not in passed:
                passed[id(test)] = test(char)
            if passed[id(test)]:
                for one in self._spread(after, alive, start):
                    if one in self._ends and first is None:
                        first = start
        self._position += 1
        self._alive = {state: start for state, start in alive.items() if self._automaton.tests[state] is not None}
        return None if first is None else (first, self._position)

    def _spread(self, state: int, known: dict[int, int], start: int) -> list[int]:
        """Add ``state`` and its empty closure to the ``known`` states; returns the new ones."""
        if state in known:
            return []
        known[state] = start
        new = [state]
        for one in new:
            for after in self._automaton.empty[one]:
                if after not in known:
                    known[after] = start
                    new.append(after)
        return new

    def _reached(self, state: int) -> frozenset[int]:
        """The empty closure of ``state``."""
        known = self._closures.get(state)
        if known is None:
            seen, stack = {state}, [state]
            while stack:
                for after in self._automaton.empty[stack.pop()]:
                    if after not in seen:
                        seen.add(after)
                        stack.append(after)
            known = self._closures[state] = frozenset(seen)
        return known


PARAM = "stop_regex"


def _compiled(automaton: _Automaton, pattern: str, first: int) -> int:
    """Add an expression at state ``first``; returns its last state."""
    shown = pattern if len(pattern) <= 80 else pattern[:79] + "…"
    try:
        parsed = parser.parse(pattern)
        start = automaton.state()
        automaton.empty[first].append(start)
        return automaton.add(parsed, start, parsed.state.flags)
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise BadRequest(f"stop_regex={shown!r} is not valid: {error}.", PARAM) from None
