"""``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5, 4.6 and 4.7.

Values of strings are bare text, others JSON. GLM 4.5 and 4.6 write a line for each mark, 4.7 none.
Source: the chat templates of zai-org/GLM-4.5 and GLM-4.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.text.tool_parsers.base import Format, FormatPart, ParserContext, SchemaPart, Tool, ToolCallParser
from unisono.text.tool_parsers.qwen3_coder import typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[\w.:/-]{1,128}")


class GlmCallParser(ToolCallParser):
    """Returns one parameter at a time. Text that opens like a call and has no name is content."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._body = self._key = self._value = ""
        self._parameters: Mapping[str, Any] = {}
        self._any = False

    def outside(self) -> bool:
        text, mark = self.until(OPEN)
        self.say(text)
        if mark:
            self._body, self.step = OPEN, self._name
        return mark is not None

    def _name(self) -> bool:
        held = self.held.lstrip()
        blanks = self.held[: len(self.held) - len(held)]
        self._body, self.held = self._body + blanks, held
        match = re.match(r"([^\s<]+)\s*(?=<|\n)", held)
        if match is not None and NAME.fullmatch(match[1]) and self._goes_on(held[match.end() :]):
            self.held = held[match.end() :]
            tool = next((tool for tool in self.context.tools if tool.name == match[1]), None)
            self._parameters = {} if tool is None else tool.parameters
            self.begin_call(match[1])
            self._body, self._any, self.step = "", False, self._between
            return True
        if self.last or not self._may_begin(held):
            text, self._body, self.step = self._body, "", self.outside
            self.say(text)
            return bool(self.held)
        return False

    @staticmethod
    def _goes_on(rest: str) -> bool:
        return rest.startswith((KEY, CLOSE))

    @staticmethod
    def _may_begin(held: str) -> bool:
        """True if more text may make a call of it."""
        name, rest = re.match(r"([^\s<]*)\s*(.*)", held, re.DOTALL).groups()  # type: ignore[union-attr]
        fits = not name or NAME.fullmatch(name) is not None
        return fits and (KEY.startswith(rest) or CLOSE.startswith(rest))

    def _between(self) -> bool:
        _, mark = self.until(KEY, CLOSE)
        if mark == KEY:
            self._key, self._value, self.step = "", "", self._read_key
        elif mark:
            self.argue("}" if self._any else "{}")
            self.finish_call()
        return mark is not None

    def _read_key(self) -> bool:
        text, mark = self.until(KEY_END)
        self._key += text
        if mark:
            self.step = self._before_value
        return mark is not None

    def _before_value(self) -> bool:
        _, mark = self.until(VALUE)
        if mark:
            self.step = self._read_value
        return mark is not None

    def _read_value(self) -> bool:
        text, mark = self.until(VALUE_END)
        self._value += text
        if mark is None:
            return False  # the answer ends inside the value, which is left out
        value = typed(self._value, self._parameters, self._key.strip())
        pair = f"{json.dumps(self._key.strip(), ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self.argue((", " if self._any else "{") + pair)
        self._any, self.step = True, self._between
        return True


class Glm45(Format):
    """GLM 4.5 and later."""

    name = "glm45"
    marks = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    parser: type[ToolCallParser] = GlmCallParser
    trigger = OPEN
    interrupts = (OPEN,)

    def known_by(self, template: str) -> bool:
        return OPEN in template and KEY in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{OPEN}{tool.name}\n", SchemaPart(tool.parameters, "glm_xml"), CLOSE
