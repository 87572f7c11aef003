"""The interface of a tool-call format, and the parts that parsers of several formats share.

A parser follows one answer. Its pieces may split marks, names and arguments anywhere; the concatenated result is the
same, so a stream carries the same calls as a whole answer. Arguments are returned as they arrive, byte for byte as the
model wrote them if the format has JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLANK = " \t\r\n"


@dataclass(frozen=True)
class Tool:
    """A function that a request offers. parameters: the JSON schema of its arguments. strict: they must satisfy it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolDelta:
    """New text of a call. index: the call's number in the answer. id, name: with its first delta only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class SchemaPart:
    """A part of a format: arguments that a JSON schema allows.

    style: of the structural tag. quote: the mark around strings, where a special token may be one.
    """

    schema: Mapping[str, Any]
    style: str = "json"
    quote: str = ""


@dataclass(frozen=True)
class TagPart:
    """A part of a format: content of a structural tag; its strings hold no marks."""

    tag: Mapping[str, Any]


FormatPart = str | SchemaPart | TagPart
"""A part of a format: literal text, or arguments."""


@dataclass
class ParsedPiece:
    """The content and calls in a piece of an answer."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


@dataclass(frozen=True)
class ParserContext:
    """The request's side of a parser.

    new_id: makes the id of a call from its number. parallel: several calls are allowed.
    """

    tools: Sequence[Tool]
    new_id: Callable[[int], str]
    parallel: bool = True


class ToolCallParser:
    """Parser of one answer.

    A state machine: it begins in :meth:`outside`, and subclasses set ``step`` to the next state.

    A step takes text from ``held`` and returns True if it took any; it is called until it takes none. ``last`` is true
    once no more text follows: then a step must not wait for more.
    """

    def __init__(self, context: ParserContext) -> None:
        self.context = context
        self.held = ""
        self.last = False
        self.step: Callable[[], bool] = self.outside
        self.count = 0
        self._found = ParsedPiece()
        self._blanks = ""  # white space that belongs to the content if more of it follows
        self._said = self._spoke = False  # content since the last call; any content

    def feed(self, text: str, last: bool = False) -> ParsedPiece:
        """The content and calls in ``text``."""
        self._found, self.last = ParsedPiece(), last
        self.held += text
        while self.step():
            pass
        if last:
            self.end()
        return self._found

    def end(self) -> None:
        """End the answer. White space at the end of an answer without calls is content."""
        if not self.count:
            self._found.content += self._blanks
        self._blanks = ""

    def outside(self) -> bool:
        """Read text that belongs to no call."""
        raise NotImplementedError

    # ---- output of steps --------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Add content.

        White space around calls is dropped; texts on both sides of calls stand on lines of their own.
        """
        text = self._blanks + text
        if self.count and not self._said:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept and self.count and not self._said and self._spoke:
            kept = "\n" + kept
        self._said, self._spoke = self._said or bool(kept), self._spoke or bool(kept)
        self._found.content += kept

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Begin a call of this function; its arguments follow. id: the model's own; by default one is made."""
        self._blanks, self._said = "", False
        self._found.calls.append(ToolDelta(self.count, "", id or self.context.new_id(self.count), name))
        self.count += 1

    def argue(self, text: str) -> None:
        """Append to the last call's arguments."""
        if not text:
            return
        calls, index = self._found.calls, self.count - 1
        if calls and calls[-1].index == index:
            last = calls[-1]
            calls[-1] = ToolDelta(index, last.arguments + text, last.id, last.name)
        else:
            calls.append(ToolDelta(index, text))

    # ---- input of steps ------------------------------------------------------------------------

    def until(self, *marks: str) -> tuple[str, str | None]:
        """Take text up to the first of ``marks``, with the mark: (text, mark), or (text before any possible mark,
        None).
        """
        places = [(place, mark) for mark in marks if (place := self.held.find(mark)) >= 0]
        if places:
            place, mark = min(places, key=lambda found: (found[0], -len(found[1])))
            if not self._may_grow(place, mark, marks):
                text, self.held = self.held[:place], self.held[place + len(mark) :]
                return text, mark
        cut = len(self.held) if self.last else min([len(self.held), *(self._partial(mark) for mark in marks)])
        cut = min([cut, *(place for place, _ in places)])
        text, self.held = self.held[:cut], self.held[cut:]
        return text, None

    def _may_grow(self, place: int, mark: str, marks: Sequence[str]) -> bool:
        """True if a longer mark may begin at the same place once more text arrives."""
        rest = self.held[place:]
        return not self.last and any(m != mark and m.startswith(rest) for m in marks)

    def _partial(self, mark: str) -> int:
        """Start of a prefix of ``mark`` at the end of the held text; the held length if there is none."""
        held = self.held
        longest = next((n for n in range(min(len(held), len(mark) - 1), 0, -1) if held.endswith(mark[:n])), 0)
        return len(held) - longest

    def skip(self, characters: str = BLANK) -> bool:
        """Take white space; returns True if other text is held."""
        self.held = self.held.lstrip(characters)
        return bool(self.held)

    def awaits(self, mark: str) -> bool:
        """True if the held text may still become ``mark``."""
        return not self.last and len(self.held) < len(mark) and mark.startswith(self.held)

    def takes(self, mark: str) -> bool:
        """Take ``mark`` if it comes next; returns True then."""
        if self.held.startswith(mark):
            self.held = self.held[len(mark) :]
            return True
        return False

    def finish_call(self) -> None:
        """Complete a call. Continue outside, or ignore the rest if only one call is allowed."""
        self.step = self.outside if self.context.parallel else self.nothing

    def nothing(self) -> bool:
        """Ignore the text."""
        self.held = ""
        return False


class JsonValue:
    """Finds the end of a JSON value in pieces. It checks nothing beyond quotes and brackets."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._kind = ""
        self._string = self._escaped = False

    def feed(self, text: str) -> int:
        """Number of characters of ``text`` that belong to the value. A number ends at a character of another kind."""
        for place, char in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
                    self.done = not self._depth
            elif not self._depth and self._kind == "scalar" and (char in BLANK or char in ",]}"):
                self.done = True
                return place
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.done = self._depth <= 0
            elif not self._depth:
                self._kind = "scalar"
            if self.done:
                return place + 1
        return len(text)


class JsonCall:
    """Parser of ``{"name": "…", "arguments": {…}}`` in pieces, with its keys in any order.

    name: once it is read. ``take`` returns the arguments' text since the last call; nothing before the name is known.
    broken: the text is not such an object.
    """

    ARGUMENTS = ("arguments", "parameters")

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._state = "open"
        self._key = self._raw = self._pending = ""
        self._value = JsonValue()
        self._argued = False

    def feed(self, text: str) -> int:
        """Number of characters of ``text`` that were taken: all, or up to the object's end or the first error."""
        place = 0
        while place < len(text) and not (self.done or self.broken):
            if self._state in ("key", "value"):
                place += self._in_value(text[place:])
            else:
                place += self._between(text[place])
        return place

    def take(self) -> str:
        """The new text of the arguments."""
        if self.name is None:
            return ""
        if self.done and not self._argued:
            self._argued, self._pending = True, self._pending + "{}"
        text, self._pending = self._pending, ""
        return text

    def _between(self, char: str) -> int:
        """Read between keys and values. Returns the characters taken: 0 at the start of a value."""
        if char in BLANK:
            return 1
        begins = {"open": "{", "first": '"}', "next": '"', "colon": ":", "after": ",}"}
        if self._state == "begin":
            self._state, self._raw, self._value = "value", "", JsonValue()
            return 0
        if char not in begins[self._state]:
            self.broken = True
            return 0
        if char == '"':
            self._state, self._raw, self._value = "key", "", JsonValue()
            return 0
        if char == "}":
            self.done = True
            self.broken = self.name is None
        self._state = {"{": "first", ":": "begin", ",": "next", "}": "end"}[char]
        return 1

    def _in_value(self, text: str) -> int:
        taken = self._value.feed(text)
        piece, streams = text[:taken], self._state == "value" and self._key in self.ARGUMENTS
        self._raw += piece
        if streams and not self._raw.startswith(('"', "n")):
            self._argued, self._pending = True, self._pending + piece
        if self._value.done:
            self._end_value(streams)
        return taken

    def _end_value(self, streams: bool) -> None:
        state, self._state = self._state, "colon" if self._state == "key" else "after"
        try:
            value: Any = json.loads(self._raw) if not streams or self._raw.startswith(('"', "n")) else None
        except (ValueError, RecursionError):
            self.broken = True
            return
        if state == "key":
            self._key = value
        elif streams and self._raw.startswith('"'):  # some models write arguments as a string of JSON
            self._argued, self._pending = True, self._pending + value
        elif self._key == "name" and self.name is None:  # a second name would be too late for a stream
            self.name, self.broken = (value, False) if isinstance(value, str) else (None, True)


class Format:
    """A format of tool calls.

    Subclasses are listed in ``formats.FORMATS``.

    name: the value of vLLM's ``--tool-call-parser``. marks: texts that may be special tokens of a tokenizer. parser:
    the parser class. before, between, after: literal text around and between calls. trigger: text that begins an
    optional call. excludes: texts that a parser would take for the beginning of a call although they lack the trigger.
    interrupts: marks that end unclosed reasoning before a call. answer_head: literal text before an answer with a
    requested form.
    heads: for formats with message heads: texts that begin a head -> the text up to the point where a call's head
    differs from the others; other_heads: how the others continue.
    """

    name: str
    marks: tuple[str, ...] = ()
    parser: type[ToolCallParser]
    before = after = ""
    between = "\n"
    trigger: str
    excludes: tuple[str, ...] = ()
    interrupts: tuple[str, ...] = ()
    answer_head = ""
    heads: Mapping[str, str] = {}
    other_heads: tuple[str, ...] = ()

    def known_by(self, template: str) -> bool:
        """True if a chat template with this text uses this format."""
        raise NotImplementedError

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        """The parts of a call of ``tool``."""
        raise NotImplementedError

    def triggers(self, tools: Sequence[Tool]) -> Mapping[str, Sequence[Tool]]:
        """Texts that begin an optional call -> the tools that it may call."""
        return {self.trigger: tools}

    def call_id(self, digest: str) -> str:
        """A call's id, from 24 hexadecimal digits."""
        return f"call_{digest}"
