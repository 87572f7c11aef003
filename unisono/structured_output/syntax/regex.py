"""Regular expressions of requests, checked and rewritten for llguidance.

Requests write expressions in Python's syntax (``structured_outputs.regex``) or ECMA-262's (``pattern`` in a JSON
schema). llguidance has Rust's syntax and matches whole texts. :func:`rewritten` parses an expression and prints it in a
form with the same meaning in Rust: classes as code points, anchors resolved, leading lookaheads as separate
expressions. An expression without such a form is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.structured_output.syntax.ebnf import UNBOUNDED, character_class, complement, counted, merged

LAST = 0x10FFFF
ANYTHING = r"(?s:.)*"
MAX_DEPTH = 200
MAX_ALTERNATIVES = 200
"""Most alternatives that anchors inside groups may make of an expression."""

Ranges = tuple[tuple[int, int], ...]
DIGITS: Ranges = ((0x30, 0x39),)
WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACES: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
PYTHON_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_PYTHON_COUNT = re.compile(r"\{(?=\d|,\d)(\d*)(,?)(\d*)\}")
_WRITTEN_COUNT = re.compile(r"(?:\{(\d+),\d*\}|[+*?])$")
_PROPERTY = re.compile(r"[pP](?:[A-Z]|\{[\w=:-]{1,40}\})")


class RegexError(ValueError):
    """A regular expression that cannot be enforced; the text names the part and the reason."""


@dataclass(frozen=True)
class Rewritten:
    """Expressions in Rust's syntax: a whole text matches ``body`` and all of ``also``, and none of ``never``."""

    body: str
    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Text:
    """A printed piece without an anchor."""

    text: str


@dataclass(frozen=True)
class _Anchor:
    end: bool


@dataclass(frozen=True)
class _Look:
    """A lookahead. options: its alternatives."""

    options: tuple[tuple[_Node, ...], ...]
    negative: bool


@dataclass(frozen=True)
class _Group:
    options: tuple[tuple[_Node, ...], ...]
    count: str = ""
    flags: str = ""


_Node = _Text | _Anchor | _Look | _Group


@dataclass
class _Way:
    """One alternative of an expression. start, end: it is anchored there."""

    parts: list[str] = field(default_factory=list)
    looks: list[_Look] = field(default_factory=list)
    start: bool = False
    end: bool = False

    def copy(self) -> _Way:
        return _Way([*self.parts], [*self.looks], self.start, self.end)


def rewritten(pattern: str, search: bool) -> Rewritten:
    """``pattern`` for llguidance.

    search: it may match anywhere in a text (ECMA); otherwise the whole text (Python).

    Raises RegexError.
    """
    parser = _RegexParser(pattern, ecma=search)
    options = parser.read()
    ways = _ways(options)
    looks = {look for way in ways for look in way.looks}
    if looks and (len(ways) > 1 or (search and not ways[0].start)):
        raise RegexError("a lookahead is supported at the beginning of the whole expression only: (?=…) or ^(?=…)")
    body = _joined(ways, search)
    also = tuple(_whole(look, True) for look in ways[0].looks if not look.negative) if looks else ()
    never = tuple(_whole(look, True) for look in ways[0].looks if look.negative) if looks else ()
    return Rewritten(body, also, never)


def _whole(look: _Look, search: bool) -> str:
    """The texts that a leading lookahead matches, as an expression."""
    ways = _ways(look.options)
    if any(way.looks for way in ways):
        raise RegexError("a lookahead within a lookahead is not supported")
    for way in ways:
        way.start = True
    return _joined(ways, search)


def _joined(ways: Sequence[_Way], search: bool) -> str:
    texts = []
    for way in ways:
        parts = [*way.parts]
        if search and not way.end:
            _shorten(parts, -1)
        if search and not way.start:
            _shorten(parts, 0)
        before = "" if way.start or not search else ANYTHING
        after = "" if way.end or not search else ANYTHING
        texts.append(before + "".join(parts) + after)
    return texts[0] if len(texts) == 1 else "(?:" + "|".join(texts) + ")"


def _shorten(parts: list[str], place: int) -> None:
    """Reduce a repetition beside ANYTHING to its lower bound."""
    while parts and (count := _WRITTEN_COUNT.search(parts[place])) is not None:
        least = int(count[1]) if count[1] else int(count[0] == "+")
        if least:
            parts[place] = parts[place][: count.start()] + (f"{{{least}}}" if least > 1 else "")
            return
        del parts[place]


def _ways(options: Sequence[Sequence[_Node]]) -> list[_Way]:
    """The alternatives of an expression, with the anchors and lookaheads of groups at its ends resolved."""
    found: list[_Way] = []
    for nodes in options:
        ways = [_Way()]
        for node in nodes:
            ways = [after for way in ways for after in _after(way, node)]
            if len(ways) > MAX_ALTERNATIVES:
                raise RegexError("its anchors make too many alternatives of it: write ^ and $ outside of groups")
        found += ways
        if len(found) > MAX_ALTERNATIVES:
            raise RegexError("its anchors make too many alternatives of it: write ^ and $ outside of groups")
    return found


def _after(way: _Way, node: _Node) -> list[_Way]:
    """``way`` followed by ``node``."""
    if isinstance(node, _Anchor):
        if node.end:
            way.end = True
        elif way.parts:
            raise RegexError("^ (or \\A) in the middle matches nothing there: leave it out, or put it first")
        else:
            way.start = True
        return [way]
    if isinstance(node, _Look):
        if way.parts:
            raise RegexError("a lookahead is supported at the beginning of the whole expression only")
        if way.end:
            raise RegexError("a lookahead after $ is not supported")
        way.looks.append(node)
        return [way]
    if isinstance(node, _Group):
        return _after_group(way, node)
    return [_with_text(way, node.text)]


def _after_group(way: _Way, group: _Group) -> list[_Way]:
    if not _has_anchors(group):
        inner = "|".join("".join(_plain(node) for node in option) for option in group.options)
        return [_with_text(way, f"(?{group.flags}:{inner}){group.count}")]
    optional = group.count == "?"
    if (group.count and not optional) or group.flags:
        raise RegexError("^, $ or a lookahead in a group that is repeated is not supported")
    found = [way.copy()] if optional else []
    for inner_way in _ways(group.options):
        if inner_way.start and way.parts:
            raise RegexError("^ (or \\A) in the middle matches nothing there: leave it out, or put it first")
        if inner_way.looks and way.parts:
            raise RegexError("a lookahead is supported at the beginning of the whole expression only")
        made = _with_text(way.copy(), "".join(inner_way.parts)) if inner_way.parts else way.copy()
        made.start, made.end = made.start or inner_way.start, made.end or inner_way.end
        made.looks += inner_way.looks
        found.append(made)
    return found


def _with_text(way: _Way, text: str) -> _Way:
    if way.end:
        raise RegexError("$ (or \\Z) in the middle matches nothing there: leave it out, or put it last")
    way.parts.append(text)
    return way


def _has_anchors(node: _Node) -> bool:
    if isinstance(node, _Group):
        return any(_has_anchors(one) for option in node.options for one in option)
    return not isinstance(node, _Text)


def _plain(node: _Node) -> str:
    if isinstance(node, _Group):
        return f"(?{node.flags}:" + "|".join("".join(map(_plain, option)) for option in node.options) + f"){node.count}"
    assert isinstance(node, _Text)
    return node.text


class _RegexParser:
    """Parser of one expression. ecma: in the syntax of JSON Schema's patterns; otherwise Python's ``re``."""

    def __init__(self, pattern: str, ecma: bool) -> None:
        self._pattern, self._ecma = pattern, ecma
        self._count = _COUNT if ecma else _PYTHON_COUNT
        self._at = self._depth = 0
        self._dot_all = False

    def read(self) -> tuple[tuple[_Node, ...], ...]:
        options = self._options()
        if self._at < len(self._pattern):
            raise self._error("a ')' has no '('")
        return options

    def _error(self, why: str) -> RegexError:
        return RegexError(f"{why}, at character {self._at} of the expression")

    def _peek(self, count: int = 1) -> str:
        return self._pattern[self._at : self._at + count]

    def _take(self, sign: str) -> bool:
        found = self._pattern.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _options(self) -> tuple[tuple[_Node, ...], ...]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH}")
        options: list[tuple[_Node, ...]] = []
        while True:
            nodes: list[_Node] = []
            while self._at < len(self._pattern) and self._peek() not in "|)":
                atom = self._atom()
                if atom is not None:
                    nodes.append(self._counted(atom))
            options.append(tuple(nodes))
            if not self._take("|"):
                self._depth -= 1
                return tuple(options)

    def _atom(self) -> _Node | None:
        char = self._peek()
        self._at += 1
        if char == "^":
            return _Anchor(end=False)
        if char == "$":
            return _Anchor(end=True)
        if char == ".":
            excluded = LINE_ENDS if self._ecma else ((0x0A, 0x0A),)
            return _Text(character_class(complement(()) if self._dot_all else complement(excluded)))
        if char == "[":
            return _Text(self._class())
        if char == "(":
            return self._group()
        if char == "\\":
            return self._escape()
        if char in "*+?" or (char == "{" and self._count.match(self._pattern, self._at - 1)):
            self._at -= 1
            raise self._error(f"the repetition {char!r} has nothing to repeat")
        return _Text(_literal(ord(char)))

    def _counted(self, atom: _Node) -> _Node:
        count = self._count.match(self._pattern, self._at)
        if self._peek() in ("*", "+", "?"):
            written = self._peek()
            self._at += 1
        elif count is not None:
            low, high = int(count[1] or 0), int(count[3]) if count[3] else UNBOUNDED if count[2] else int(count[1])
            if high != UNBOUNDED and high < low:
                raise self._error("a repetition's upper bound is below its lower one")
            written, self._at = counted(low, high), count.end()
        else:
            return atom
        if isinstance(atom, (_Anchor, _Look)):
            raise self._error("an anchor or a lookahead is repeated")
        if self._take("+"):
            raise self._error("a possessive repetition (such as a*+) is not supported: use a plain one")
        self._take("?")  # greedy or lazy: the same texts match
        if self._peek() in ("*", "+", "?") or self._count.match(self._pattern, self._at):
            raise self._error("a repetition of a repetition needs a group around the inner one")
        if isinstance(atom, _Group):
            return _Group(atom.options, written, atom.flags)
        return _Text(atom.text + written)

    def _group(self) -> _Node | None:
        look = next((sign for sign in ("?=", "?!") if self._take(sign)), None)
        flags = ""
        if look is None and self._take("?"):
            name = re.compile(r"P?<([A-Za-z_$]\w*)>").match(self._pattern, self._at)
            inline = re.compile(r"([a-z]*)([:)])").match(self._pattern, self._at)
            if name:
                self._at = name.end()
            elif inline and set(inline[1]) <= set("is"):
                self._at, flags = inline.end(), inline[1]
                if inline[2] == ")":
                    return self._flags_for_all(flags, inline.start())
            else:
                kinds = {"<": "a lookbehind", ">": "an atomic group", "P": "a named back reference", "#": "a comment"}
                what = kinds.get(self._peek(), f"(?{self._peek()}…)")
                raise self._error(f"{what} is not supported")
        before, self._dot_all = self._dot_all, self._dot_all or "s" in flags
        options = self._options()
        self._dot_all = before
        if not self._take(")"):
            raise self._error("a '(' is not closed")
        if look is not None:
            return _Look(options, look == "?!")
        return _Group(options, "", "i" if "i" in flags else "")

    def _flags_for_all(self, flags: str, at: int) -> _Node:
        """Parse flags of the rest of the expression, allowed only at its beginning."""
        if at != 2:
            raise self._error("flags are supported at the beginning of the expression, or as (?i:…)")
        self._dot_all = "s" in flags
        return _Group(self._options(), "", "i" if "i" in flags else "")

    # ---- characters -----------------------------------------------------------------------------

    def _escape(self) -> _Node:
        if self._at >= len(self._pattern):
            raise self._error("an escape is not complete")
        kind = self._peek()
        if not self._ecma and kind in "AZz":
            self._at += 1
            return _Anchor(end=kind != "A")
        if kind in "bB":
            raise self._error(f"the word boundary \\{kind} is not supported: write the characters that may stand there")
        named = _PROPERTY.match(self._pattern, self._at)
        if named:
            self._at = named.end()
            return _Text("\\" + named[0])
        if kind in "123456789k":
            raise self._error(f"the back reference \\{kind} is not supported")
        ranges = self._escaped()
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _Text(_literal(ranges[0][0]))
        return _Text(character_class(ranges))

    def _escaped(self) -> Ranges:
        """The characters of an escape; its backslash is read."""
        kind = self._peek()
        self._at += 1
        spaces = SPACES if self._ecma else PYTHON_SPACES
        sets = {"d": DIGITS, "w": WORDS, "s": spaces}
        if kind.lower() in sets:
            return sets[kind] if kind.islower() else complement(sets[kind.lower()])
        if kind in _CONTROLS:
            return ((_CONTROLS[kind],) * 2,)
        if kind == "0" and not self._peek().isdigit():
            return ((0, 0),)
        if kind == "c" and self._ecma and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._peek()) % 32
            self._at += 1
            return ((code, code),)
        if kind in "xuU":
            return self._code(kind)
        if kind and not (kind.isalnum() and kind.isascii()):
            return ((ord(kind),) * 2,)
        self._at -= 1
        hint = "; use ^ and $" if kind in "AZzG" else ""
        raise self._error(f"the escape \\{kind} is not known{hint}")

    def _code(self, kind: str) -> Ranges:
        digits = {"x": r"[0-9A-Fa-f]{2}", "u": r"[0-9A-Fa-f]{4}", "U": r"[0-9A-Fa-f]{8}"}[kind]
        match = re.compile(rf"({digits})|\{{([0-9A-Fa-f]{{1,8}})\}}").match(self._pattern, self._at)
        if match is None:
            raise self._error(f"\\{kind} needs its hexadecimal digits")
        self._at = match.end()
        code = int(match[1] or match[2], 16)
        if 0xD800 <= code < 0xDC00:  # the first half of a surrogate pair
            low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._pattern, self._at)
            if low is not None:
                self._at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._error(f"U+{code:X} is not a character")
        return ((code, code),)

    def _class(self) -> str:
        """Parse a class after ``[``, and print it."""
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        first = True
        while True:
            if self._at >= len(self._pattern):
                raise self._error("a '[' is not closed")
            if self._take("]") and not (first and not self._ecma):
                break
            if first and not self._ecma and self._pattern[self._at - 1] == "]":
                self._at -= 1
            first = False
            named = _PROPERTY.match(self._pattern, self._at + 1) if self._peek() == "\\" else None
            if named:
                properties.append("\\" + named[0])
                self._at = named.end()
                continue
            ranges += self._range()
        if properties:
            inner = character_class(merged(ranges))[1:-1] + "".join(properties)
            return f"[^{inner}]" if negated else f"[{inner}]"
        found = complement(ranges) if negated else merged(ranges)
        if not found:
            return "[^\\x{0}-\\x{10FFFF}]"  # matches nothing
        return character_class(found)

    def _range(self) -> Ranges:
        low = self._member()
        if self._peek() != "-" or self._peek(2) in ("-]", "-"):
            return low
        if len(low) > 1 or low[0][0] != low[0][1]:
            return low  # the - is a member of the class
        self._at += 1
        high = self._member()
        if len(high) > 1 or high[0][0] != high[0][1]:
            return (*low, (0x2D, 0x2D), *high)
        if high[0][0] < low[0][0]:
            raise self._error("a range of characters is the wrong way round")
        return ((low[0][0], high[0][0]),)

    def _member(self) -> Ranges:
        char = self._peek()
        if not char:
            raise self._error("a '[' is not closed")
        self._at += 1
        if char == "[" and self._peek() in (":", ".", "=") and not self._ecma:
            raise self._error("POSIX classes such as [:alpha:] are not supported")
        if char != "\\":
            return ((ord(char),) * 2,)
        if self._at >= len(self._pattern):
            raise self._error("an escape is not complete")
        if self._take("b"):
            return ((8, 8),)
        if self._peek() == "-":
            self._at += 1
            return ((0x2D, 0x2D),)
        return self._escaped()


def _literal(code: int) -> str:
    char = chr(code)
    if 0xD800 <= code < 0xE000:
        raise RegexError(f"U+{code:X} is not a character")
    return char if char.isascii() and (char.isalnum() or char in " _,;:=!<>\"'@%&`~") else f"\\x{{{code:X}}}"
