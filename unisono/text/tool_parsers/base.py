"""What a form of tool calls is, and the parts that readers of several forms share.

A :class:`Reader` follows one answer. Its pieces may cut marks, names and arguments anywhere; joined, what it gives out
is the same, so that a stream says what a whole answer says. Arguments are given out as they come, byte for byte as the
model wrote them where the form has JSON.
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
class Schema:
    """In the parts of a form: arguments that a JSON schema allows. style: as a structural tag writes them."""

    schema: Mapping[str, Any]
    style: str = "json"


@dataclass(frozen=True)
class Written:
    """In the parts of a form: what a part of a structural tag allows; its strings hold no marks."""

    tag: Mapping[str, Any]


Part = str | Schema | Written
"""A form is a sequence of literal texts and arguments."""


@dataclass
class Found:
    """What a piece of an answer amounts to."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Context:
    """What a reader knows of the request. new_id: makes the id of a call's number. parallel: more than one call."""

    tools: Sequence[Tool]
    new_id: Callable[[int], str]
    parallel: bool = True


class Reader:
    """Reads an answer. Subclasses begin in :meth:`outside` and set ``step`` to what reads on.

    A step takes text from ``held`` and returns whether it took any; it is called until it takes none. ``last`` is true
    once no more text comes: then a step must not wait for more.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.held = ""
        self.last = False
        self.step: Callable[[], bool] = self.outside
        self.count = 0
        self._found = Found()
        self._blanks = ""  # white space that belongs to the content if more of it follows
        self._said = self._spoke = False  # since the last call; at all

    def feed(self, text: str, last: bool = False) -> Found:
        """What ``text`` adds."""
        self._found, self.last = Found(), last
        self.held += text
        while self.step():
            pass
        if last:
            self.end()
        return self._found

    def end(self) -> None:
        """No more text comes. White space at the end of an answer without calls is content."""
        if not self.count:
            self._found.content += self._blanks
        self._blanks = ""

    def outside(self) -> bool:
        """Read text that belongs to no call."""
        raise NotImplementedError

    # ---- what steps give out --------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Content. White space before and after calls is none; texts that calls part stand on lines of their own."""
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
        """A call of this function; its arguments follow. id: the model's own; by default one is made."""
        self._blanks, self._said = "", False
        self._found.calls.append(ToolDelta(self.count, "", id or self.context.new_id(self.count), name))
        self.count += 1

    def argue(self, text: str) -> None:
        """More of the last call's arguments."""
        if not text:
            return
        calls, index = self._found.calls, self.count - 1
        if calls and calls[-1].index == index:
            last = calls[-1]
            calls[-1] = ToolDelta(index, last.arguments + text, last.id, last.name)
        else:
            calls.append(ToolDelta(index, text))

    # ---- what steps read ------------------------------------------------------------------------

    def until(self, *marks: str) -> tuple[str, str | None]:
        """Take text up to the first of ``marks``, with the mark: (text, mark), or (what is certainly before, None)."""
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
        """Whether a longer mark may begin at the same place once more text comes."""
        rest = self.held[place:]
        return not self.last and any(m != mark and m.startswith(rest) for m in marks)

    def _partial(self, mark: str) -> int:
        """Where a beginning of ``mark`` stands at the end of what is held; its length where none does."""
        held = self.held
        longest = next((n for n in range(min(len(held), len(mark) - 1), 0, -1) if held.endswith(mark[:n])), 0)
        return len(held) - longest

    def skip(self, characters: str = BLANK) -> bool:
        """Take white space; returns whether something else is held."""
        self.held = self.held.lstrip(characters)
        return bool(self.held)

    def awaits(self, mark: str) -> bool:
        """Whether what is held may yet become ``mark``."""
        return not self.last and len(self.held) < len(mark) and mark.startswith(self.held)

    def takes(self, mark: str) -> bool:
        """Take ``mark`` if it comes next."""
        if self.held.startswith(mark):
            self.held = self.held[len(mark) :]
            return True
        return False

    def finish_call(self) -> None:
        """A call is complete. Reads on outside, or ignores the rest where one call is all that may come."""
        self.step = self.outside if self.context.parallel else self.nothing

    def nothing(self) -> bool:
        """Ignore what comes."""
        self.held = ""
        return False


class JsonValue:
    """Finds the end of a JSON value that comes in pieces. It checks nothing beyond quotes and brackets."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._kind = ""
        self._string = self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of ``text`` belong to the value. A number ends where something else begins."""
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
    """Reads ``{"name": "…", "arguments": {…}}`` that comes in pieces, whatever order its keys have.

    name: once it is read. ``take`` gives the arguments' text since the last call; nothing before the name is known.
    broken: it is not such an object.
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
        """How many characters of ``text`` were taken: all, or up to the object's end or what breaks it."""
        place = 0
        while place < len(text) and not (self.done or self.broken):
            if self._state in ("key", "value"):
                place += self._in_value(text[place:])
            else:
                place += self._between(text[place])
        return place

    def take(self) -> str:
        """The arguments' new text."""
        if self.name is None:
            return ""
        if self.done and not self._argued:
            self._argued, self._pending = True, self._pending + "{}"
        text, self._pending = self._pending, ""
        return text

    def _between(self, char: str) -> int:
        """Between keys and values. Returns the characters taken: 0 where a value begins."""
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
        elif self._key == "name" and self.name is None:  # a second one comes too late for a stream
            self.name, self.broken = (value, False) if isinstance(value, str) else (None, True)


class Format:
    """A form of tool calls. Subclasses are listed in ``formats.FORMATS``.

    name: as vLLM's ``--tool-call-parser`` has it. marks: texts of which a tokenizer may make special tokens.
    reader: the class that reads answers. before, between, after: literal text around and between calls.
    trigger: text that begins a call where one may come, but need not. excludes: text that a reader would take for the
    beginning of a call although it lacks the trigger. interrupts: marks that end a thought which the model forgot to
    close before a call. answer_head: literal text before an answer whose form a request asks for. heads: where every
    message has a head, the texts that begin one, and what follows them up to where a call's differs from the others';
    other_heads: how the others go on.
    """

    name: str
    marks: tuple[str, ...] = ()
    reader: type[Reader]
    before = after = ""
    between = "\n"
    trigger: str
    excludes: tuple[str, ...] = ()
    interrupts: tuple[str, ...] = ()
    answer_head = ""
    heads: Mapping[str, str] = {}
    other_heads: tuple[str, ...] = ()

    def known_by(self, template: str) -> bool:
        """Whether a chat template with this text asks for this form."""
        raise NotImplementedError

    def call(self, tool: Tool) -> Sequence[Part]:
        """The parts of a call of ``tool``."""
        raise NotImplementedError

    def triggers(self, tools: Sequence[Tool]) -> Mapping[str, Sequence[Tool]]:
        """Texts that begin a call where one may come, each with the tools that it may be a call of."""
        return {self.trigger: tools}

    def call_id(self, digest: str) -> str:
        """A call's id, from 24 hexadecimal digits."""
        return f"call_{digest}"
