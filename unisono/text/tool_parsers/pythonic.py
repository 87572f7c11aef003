"""``[name(key='value', …), …]`` as the whole answer: Llama 4, and Llama 3.2 with a template for it.

Values are Python literals; arguments are returned as JSON, one at a time. A ``<|python_start|>`` may come first.
Source: Meta's prompt formats of Llama 3.2 and Llama 4.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.text.tool_parsers.base import BLANK, Format, FormatPart, ParserContext, SchemaPart, Tool, ToolCallParser

START, END, TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"
NAME = re.compile(r"[A-Za-z_][\w.:/-]{0,127}")
KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
WORDS = {"true": True, "false": False, "null": None}


class PythonArgument:
    """Finds the end of an argument in pieces: a comma or bracket outside of quotes and brackets."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        """Number of characters of ``text`` that belong to the argument."""
        for place, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}" and self._depth:
                self._depth -= 1
            elif not self._depth and char in ",)":
                self.done = True
                return place
        return len(text)


class PythonicCallParser(ToolCallParser):
    """Text that begins like a list of calls and is none is content."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._body = self._raw = ""
        self._value = PythonArgument()
        self._given: list[str] = []
        self._tool: Tool | None = None

    def outside(self) -> bool:
        """Decide at the beginning whether the answer is a list of calls; text after it is content."""
        self._body += self._blanks_of()
        if (not self.held and not self.last) or any(self.awaits(mark) for mark in (START, TAG)):
            return False
        for mark in (START, TAG):
            if self.takes(mark):
                self._body += mark
                return True
        if self.takes("["):
            self._body, self.step = self._body + "[", self._name
        else:
            self.step = self._content
        return True

    def _blanks_of(self) -> str:
        """Take white space and return it."""
        held = self.held.lstrip(BLANK)
        blanks, self.held = self.held[: len(self.held) - len(held)], held
        return blanks

    def _name(self) -> bool:
        self._body += self._blanks_of()
        place = self.held.find("(")
        name = (self.held if place < 0 else self.held[:place]).rstrip()
        if place >= 0 and NAME.fullmatch(name):
            self.held, self._body, self._given = self.held[place + 1 :], "", []
            self._tool = next((tool for tool in self.context.tools if tool.name == name), None)
            self.begin_call(name)
            self.step = self._argument
            return True
        if place >= 0 or self.last or (name and not NAME.fullmatch(name)):
            self.step = self._content
            return True
        return False

    def _argument(self) -> bool:
        """Read an argument, or the end of the call."""
        if not self.skip(BLANK + ","):
            return False
        if self.takes(")"):
            self.argue("}" if self._given else "{}")
            self.step = self._between if self.context.parallel else self.nothing
        else:
            self._raw, self._value, self.step = "", PythonArgument(), self._read
        return True

    def _read(self) -> bool:
        taken = self._value.feed(self.held)
        self._raw, self.held = self._raw + self.held[:taken], self.held[taken:]
        if not self._value.done:
            return False  # the answer ends inside the value, which is left out
        match = KEY.match(self._raw)
        key = self._positional() if match is None else match[1]
        value = python_value(self._raw if match is None else self._raw[match.end() :])
        pair = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self.argue((", " if self._given else "{") + pair)
        self._given.append(key)
        self.step = self._argument
        return True

    def _positional(self) -> str:
        """The name of a positional argument: the next parameter's."""
        properties = {} if self._tool is None else self._tool.parameters.get("properties")
        left = [name for name in properties if name not in self._given] if isinstance(properties, Mapping) else []
        return left[0] if left else f"arg{len(self._given)}"

    def _between(self) -> bool:
        """Read another call, or the end of the list."""
        if not self.skip(BLANK):
            return False
        if self.takes(","):
            self.step = self._name
        else:
            self.takes("]")
            self.step = self._after
        return True

    def _after(self) -> bool:
        if not self.skip() or self.awaits(END):
            return False
        self.takes(END)
        self.step = self._content
        return True

    def _content(self) -> bool:
        text, self.held, self._body = self._body + self.held, "", ""
        self.say(text)
        return False


def python_value(text: str) -> Any:
    """The JSON value of a literal of Python or JSON; the text itself if it is neither."""
    text = text.strip()
    if text in WORDS:
        return WORDS[text]
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value
    return text


class Pythonic(Format):
    """Calls in Python syntax."""

    name = "pythonic"
    marks = (START, END, TAG)
    parser = PythonicCallParser
    before, after, between = "[", "]", ", "
    trigger = "["

    def known_by(self, template: str) -> bool:
        return START in template or "params_name1=params_value1" in template

    def triggers(self, tools: Sequence[Tool]) -> Mapping[str, Sequence[Tool]]:
        return {f"[{tool.name}(": [tool] for tool in tools}

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{tool.name}(", SchemaPart(tool.parameters, "python"), ")"
