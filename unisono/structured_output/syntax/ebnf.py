"""Grammars in EBNF (``root ::= …``, in the dialect of xgrammar and llama.cpp), translated to Lark for llguidance.

EBNF is matched character by character; llguidance reads terminals greedily, the longest first. So a literal is one
terminal only if no other terminal of the grammar begins it, and a sequence of characters otherwise. Rules that can
never end are removed, and a grammar that no text matches is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

ROOT = "root"
LAST = 0x10FFFF
UNBOUNDED = -1
MAX_DEPTH = 200
"""Most nested groups."""

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_HEAD = re.compile(r"([A-Za-z_][\w.-]*)(?:[ \t\r\n]+|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0", "e": "\x1b"}
_HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}"), "U": re.compile(r"[0-9A-Fa-f]{8}")}
_BRACED = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")


class GrammarTextError(ValueError):
    """A grammar that cannot be parsed, or that no text matches; the text has the place and the reason."""


@dataclass(frozen=True)
class Literal:
    text: str


@dataclass(frozen=True)
class Characters:
    """One character in ``ranges`` (code points, inclusive), sorted and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    low: int
    high: int


Node = Literal | Characters | Name | Concatenation | Alternation | Repeat


def ebnf_to_lark(text: str) -> str:
    """Translate a grammar in EBNF to Lark. Raises GrammarTextError."""
    rules = _EbnfReader(text).rules()
    if ROOT not in rules:
        raise GrammarTextError(f'it has no rule "{ROOT}", where every text begins')
    for name, body in rules.items():
        for used in _names(body):
            if used not in rules:
                raise GrammarTextError(f'rule "{name}" uses "{used}", which is not defined')
    rules = _without_endless(rules)
    writer = _Writer(rules)
    return "%llguidance {}\n" + "".join(
        f"{writer.name(name)}: {writer.written(body)}\n" for name, body in rules.items()
    )


# ---- reading ----------------------------------------------------------------------------------------


class _EbnfReader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._error('a rule ("name ::= …") is expected')
            if head[1] in found:
                raise self._error(f'rule "{head[1]}" is defined twice')
            self._at = head.end()
            found[head[1]] = self._choice()
        return found

    def _error(self, why: str) -> GrammarTextError:
        line = self._text.count("\n", 0, self._at) + 1
        return GrammarTextError(f"line {line}: {why}, at {self._text[self._at : self._at + 20]!r}")

    def _skip(self) -> None:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _take(self, sign: str) -> bool:
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH}")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._skip()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if _HEAD.match(self._text, self._at):
                break
            parts.append(self._repeated(self._atom()))
            self._skip()
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _atom(self) -> Node:
        if self._take('"'):
            return Literal(self._string())
        if self._take("["):
            return self._characters()
        if self._take("."):
            return Characters(((0, LAST),))
        if self._take("("):
            if self._text.startswith("=", self._at):
                raise self._error("a lookahead (= …) is not supported: write the rule out")
            inner = self._choice()
            if not self._take(")"):
                raise self._error("')' is expected")
            return inner
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error("a string, a character class, a group or a rule's name is expected")
        self._at = name.end()
        if self._text.startswith("(", self._at):
            raise self._error(f"{name[0]}(…) is not supported: use a structural tag")
        return Name(name[0])

    def _repeated(self, atom: Node) -> Node:
        while True:
            count = _COUNT.match(self._text, self._at)
            if self._take("?"):
                atom = Repeat(atom, 0, 1)
            elif self._take("*"):
                atom = Repeat(atom, 0, UNBOUNDED)
            elif self._take("+"):
                atom = Repeat(atom, 1, UNBOUNDED)
            elif count is not None and (count[1] or count[3]):
                low = int(count[1] or 0)
                high = int(count[3]) if count[3] else (UNBOUNDED if count[2] else low)
                if high != UNBOUNDED and high < low:
                    raise self._error("a repetition's upper bound is below its lower one")
                self._at = count.end()
                atom = Repeat(atom, low, high)
            else:
                return atom

    def _string(self) -> str:
        text = ""
        while not self._take('"'):
            if self._at >= len(self._text) or self._text[self._at] == "\n":
                raise self._error("a string is not closed")
            text += self._character()
        return text

    def _characters(self) -> Characters:
        negated, ranges = self._take("^"), []
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._error("a character class is not closed")
            first = last = ord(self._character())
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = ord(self._character())
            if last < first:
                raise self._error("a range of characters is the wrong way round")
            ranges.append((first, last))
        return Characters(complement(ranges) if negated else merged(ranges))

    def _character(self) -> str:
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        if self._at >= len(self._text):
            raise self._error("an escape is not complete")
        kind = self._text[self._at]
        self._at += 1
        digits = _HEX[kind].match(self._text, self._at) if kind in _HEX else None
        braced = _BRACED.match(self._text, self._at) if kind in "uU" else None
        if braced or digits:
            match = braced or digits
            code = int(braced[1] if braced else match[0], 16)  # type: ignore[index]
            self._at = match.end()  # type: ignore[union-attr]
            if code > LAST or 0xD800 <= code < 0xE000:
                raise self._error(f"U+{code:X} is not a character")
            return chr(code)
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind.isalnum():
            raise self._error(f"the escape \\{kind} is not known")
        return kind


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges of code points, sorted and disjoint."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """All other code points."""
    found, after = [], 0
    for first, last in merged(ranges):
        if first > after:
            found.append((after, first - 1))
        after = last + 1
    return (*found, (after, LAST)) if after <= LAST else tuple(found)


# ---- rules ------------------------------------------------------------------------------------------


def _names(node: Node) -> Iterator[str]:
    open_ = [node]
    while open_:
        one = open_.pop()
        match one:
            case Name(name):
                yield name
            case Concatenation(parts) | Alternation(parts):
                open_ += parts
            case Repeat(part, _, _):
                open_.append(part)


def _without_endless(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that some text matches, without the alternatives that no text matches."""
    ending: set[str] = set()
    while True:
        more = {name for name, body in rules.items() if name not in ending and _pruned(body, ending) is not None}
        if not more:
            break
        ending |= more
    if ROOT not in ending:
        raise GrammarTextError("no text matches it: every way through its rules goes on for ever")
    return {name: body for name in rules if name in ending and (body := _pruned(rules[name], ending)) is not None}


def _pruned(node: Node, ending: set[str]) -> Node | None:
    """``node`` without alternatives that no text matches, by the rules that some text matches; None if none is left."""
    match node:
        case Name(name):
            return node if name in ending else None
        case Characters(ranges):
            return node if ranges else None
        case Concatenation(parts):
            kept = [_pruned(part, ending) for part in parts]
            return None if None in kept else Concatenation(tuple(part for part in kept if part is not None))
        case Alternation(options):
            left = [one for option in options if (one := _pruned(option, ending)) is not None]
            return (left[0] if len(left) == 1 else Alternation(tuple(left))) if left else None
        case Repeat(part, low, high):
            inner = _pruned(part, ending)
            if inner is None:
                return None if low else Literal("")
            return Repeat(inner, low, high)
    return node


# ---- writing ----------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._split = _split_literals(rules.values())

    def name(self, name: str) -> str:
        return "start" if name == ROOT else f"rule_{self._numbers[name]}"

    def written(self, node: Node) -> str:
        match node:
            case Literal(text):
                parts = text if text in self._split else [text]
                return " ".join(quoted(part) for part in parts) or '""'
            case Characters(ranges):
                return f"/{character_class(ranges)}/"
            case Name(name):
                return self.name(name)
            case Concatenation(parts):
                return " ".join(self._inner(part) for part in parts) or '""'
            case Alternation(options):
                return " | ".join(self.written(option) for option in options)
            case Repeat(part, low, high):
                return f"({self.written(part)}){counted(low, high)}"

    def _inner(self, node: Node) -> str:
        return f"({self.written(node)})" if isinstance(node, Alternation) else self.written(node)


def counted(low: int, high: int) -> str:
    """A repetition's sign in Lark."""
    signs = {(0, 1): "?", (0, UNBOUNDED): "*", (1, UNBOUNDED): "+"}
    return signs.get((low, high)) or f"{{{low},{'' if high == UNBOUNDED else high}}}"


def quoted(text: str) -> str:
    """``text`` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def character_class(ranges: Iterable[tuple[int, int]]) -> str:
    """A character class of a regular expression with the code points in ``ranges``, without surrogates."""
    pieces = []
    for first, last in ranges:
        for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
            if low <= high:
                pieces.append(f"\\x{{{low:X}}}" + (f"-\\x{{{high:X}}}" if high > low else ""))
    return "[" + "".join(pieces) + "]"


def _split_literals(bodies: Iterable[Node]) -> set[str]:
    """The literals that another terminal begins, or that begin another: they are written character by character."""
    literals: set[str] = set()
    singles: list[Characters] = []
    open_ = list(bodies)
    while open_:
        match open_.pop():
            case Literal(text):
                literals.add(text)
            case Characters() as one:
                singles.append(one)
            case Concatenation(parts) | Alternation(parts):
                open_ += parts
            case Repeat(part, _, _):
                open_.append(part)
    inside: Callable[[str], bool] = lambda char: any(  # noqa: E731
        first <= ord(char) <= last for one in singles for first, last in one.ranges
    )
    long = sorted(text for text in literals if len(text) > 1)
    begins = {text[0] for text in literals if len(text) == 1}
    split = {text for text in long if text[0] in begins or inside(text[0])}
    for begin, other in pairwise(long):
        if other.startswith(begin):  # sorted: literals with the prefix ``begin`` follow it
            split |= {begin, *(text for text in long if text.startswith(begin))}
    while True:  # a literal whose first character has become a terminal
        begins = {text[0] for text in split}
        more = {text for text in long if text[0] in begins} - split
        if not more:
            return split
        split |= more
