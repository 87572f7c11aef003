"""``<|tool_call>call:name{key:<|"|>text<|"|>,other:2}<tool_call|>``: Gemma 4.

Keys are bare, strings stand between quote tokens and have no escapes, numbers, true, false and null are JSON's, lists
and objects nest. Calls follow each other without a separator. Arguments are returned as JSON, as they arrive.
Source: the chat template of google/gemma-4-26B-A4B-it (its macro ``format_argument``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from unisono.text.tool_parsers.base import BLANK, Format, FormatPart, ParserContext, SchemaPart, Tool, ToolCallParser

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
HEAD = re.compile(r"\s*call:\s*([\w.:/-]{1,128})\s*\{")
MAY_BE_HEAD = re.compile(r"\s*(?:c(?:a(?:l(?:l(?::\s*[\w.:/-]{0,128}\s*)?)?)?)?)?")
WORDS = {"True": "true", "False": "false", "None": "null", "nil": "null"}
"""Words that models write for JSON's."""
ENDS = {"{": "}", "[": "]"}


class Gemma4CallParser(ToolCallParser):
    """Translates one call's arguments to JSON while they arrive. Text that begins like a call and is none is content.

    A bare value is returned once its end is known; a string is returned in pieces. A closing mark outside of a string
    ends the call and closes the open lists and objects.
    """

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._open: list[str] = []  # the closing brackets of open lists and objects
        self._first = True  # no element of the innermost one was read
        self._key = ""

    def outside(self) -> bool:
        text, mark = self.until(OPEN)
        self.say(text)
        if mark:
            self.step = self._head
        return mark is not None

    def _head(self) -> bool:
        """Read the function's name; otherwise the mark is content."""
        if match := HEAD.match(self.held):
            self.held = self.held[match.end() :]
            self.begin_call(match[1])
            self._enter("{")
            return True
        if self.last or not MAY_BE_HEAD.fullmatch(self.held):
            self.step = self.outside
            self.say(OPEN)
            return bool(self.held)
        return False

    # ---- lists and objects ----------------------------------------------------------------------

    def _enter(self, bracket: str) -> None:
        """Begin a list or an object."""
        self.argue(bracket)
        self._open.append(ENDS[bracket])
        self._first, self.step = True, self._element

    def _leave(self) -> None:
        """End the innermost list or object. The end of the outermost is the end of the arguments."""
        self.argue(self._open.pop())
        self._first, self.step = False, self._element if self._open else self._after

    def _element(self) -> bool:
        """Read an element of the innermost list or object, or its end."""
        if not self.skip(BLANK + ",") or self.awaits(QUOTE) or self.awaits(CLOSE):
            return False
        if self.held[0] in "}]":
            self.held = self.held[1:]
            self._leave()
        elif self.held.startswith(CLOSE):
            while self._open:
                self._leave()
        elif self._open[-1] == "}":
            self._key, self.step = "", self._quoted_key if self.takes(QUOTE) else self._bare_key
        else:
            self._separate()
            self.step = self._value
        return True

    def _separate(self) -> None:
        self.argue("" if self._first else ", ")
        self._first = False

    def _after(self) -> bool:
        """Read the closing mark, which models sometimes omit."""
        if not self.skip() or self.awaits(CLOSE):
            return False
        self.takes(CLOSE)
        self.finish_call()
        return True

    # ---- keys -----------------------------------------------------------------------------------

    def _quoted_key(self) -> bool:
        text, mark = self.until(QUOTE)
        self._key += text
        if mark:
            self.step = self._colon
        return mark is not None

    def _bare_key(self) -> bool:
        text, mark = self.until(":", "}", CLOSE)
        self._key += text
        if mark == ":":
            self._begin_pair(self._key.strip())
        elif mark:  # a word without a value
            self.held, self.step = mark + self.held, self._element
        return mark is not None

    def _colon(self) -> bool:
        if not self.skip():
            return False
        self.takes(":")
        self._begin_pair(self._key)
        return True

    def _begin_pair(self, key: str) -> None:
        self._separate()
        self.argue(f"{json.dumps(key, ensure_ascii=False)}: ")
        self.step = self._value

    # ---- values ---------------------------------------------------------------------------------

    def _value(self) -> bool:
        if not self.skip() or self.awaits(QUOTE):
            return False
        if self.takes(QUOTE):
            self.argue('"')
            self.step = self._string
        elif self.held[0] in ENDS:
            bracket, self.held = self.held[0], self.held[1:]
            self._enter(bracket)
        else:
            self._key, self.step = "", self._bare
        return True

    def _string(self) -> bool:
        text, mark = self.until(QUOTE)
        self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        if mark:
            self.argue('"')
            self.step = self._element
        return bool(text) or mark is not None

    def _bare(self) -> bool:
        """Read a value without quotes up to a comma, a bracket or the closing mark."""
        text, mark = self.until(",", "}", "]", CLOSE)
        self._key += text
        if mark is None:
            return False  # the answer ends inside the value, which is left out
        self.argue(_json(self._key.strip()))
        self.held, self.step = mark + self.held, self._element
        return True


def _json(text: str) -> str:
    """A bare value as JSON: a number or word of JSON as it is, any other text as a string."""
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return WORDS.get(text) or json.dumps(text, ensure_ascii=False)
    return text if value not in ("NaN", "Infinity", "-Infinity") else json.dumps(text)


class Gemma4(Format):
    """Gemma 4."""

    name = "gemma4"
    marks = (OPEN, CLOSE, QUOTE)
    parser = Gemma4CallParser
    between = ""
    trigger = OPEN
    interrupts = (OPEN,)

    def known_by(self, template: str) -> bool:
        return OPEN in template and QUOTE in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{OPEN}call:{tool.name}", SchemaPart(tool.parameters, "gemma", QUOTE), CLOSE
