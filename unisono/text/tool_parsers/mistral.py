"""``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and ``[TOOL_CALLS]name[ARGS]{…}`` of tokenizers from v11 on.

Ids have nine letters and digits: Mistral's templates refuse others. Source: mistral-common, and the chat templates of
Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono.text.tool_parsers.base import (
    Format,
    FormatPart,
    JsonCall,
    JsonValue,
    ParserContext,
    SchemaPart,
    Tool,
    ToolCallParser,
)

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralCallParser(ToolCallParser):
    """Parser of both forms. marks: the beginning of the calls."""

    marks: tuple[str, ...] = (MARK,)

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._call, self._value = JsonCall(), JsonValue()
        self._body, self._named = "", False

    def outside(self) -> bool:
        text, mark = self.until(*self.marks)
        self.say(text)
        if mark:
            self._body, self.step = mark, self._begin
        return mark is not None

    def _begin(self) -> bool:
        if not self.skip():
            return False
        self.step = self._list if self.takes("[") else self._name
        return True

    def _list(self) -> bool:
        """Read within the list, before a call or the end."""
        if not self.skip(" \t\r\n,"):
            return False
        if self.takes("]"):
            self.step = self.outside
        elif self.count and not self.context.parallel:
            self.step = self.nothing
        else:
            self._call, self._named, self.step = JsonCall(), False, self._object
        return True

    def _object(self) -> bool:
        taken = self._call.feed(self.held)
        piece, self.held = self.held[:taken], self.held[taken:]
        if not self._named:
            self._body += piece
            if self._call.name is not None:
                self._body, self._named = "", True
                self.begin_call(self._call.name)
        self.argue(self._call.take())
        if self._call.done and not self._call.broken:
            self._end_object()
        elif self._call.broken or (self.last and not self._named):
            self.step = self._broken
        return self.step != self._object

    def _end_object(self) -> None:
        self.step = self._list

    def _broken(self) -> bool:
        if self._named:
            self.argue(self.held)
            self.held = ""
            return False
        text, self._body = self._body, ""
        self.step = self.outside
        self.say(text)
        return True

    def _name(self) -> bool:
        """Read ``name[ARGS]`` or ``name{``, with a call's id between them in some versions."""
        text, mark = self.until(ARGS, "{", CALL_ID)
        self._body += text
        if mark is None:
            if self.last:
                self.step = self._broken
            return self.last
        if mark == CALL_ID:
            self.held, self.step = self.held, self._identified
        else:
            self._open_arguments(mark)
        return True

    def _identified(self) -> bool:
        _, mark = self.until(ARGS, "{")
        if mark:
            self._open_arguments(mark)
        return mark is not None

    def _open_arguments(self, mark: str) -> None:
        self.held = mark + self.held if mark == "{" else self.held
        name = self._body.removeprefix(MARK).strip()
        self.begin_call(name)
        self._value, self._named, self.step = JsonValue(), True, self._arguments

    def _arguments(self) -> bool:
        taken = self._value.feed(self.held)
        piece, self.held = self.held[:taken], self.held[taken:]
        self.argue(piece)
        if self._value.done:
            self.finish_call()
        return self._value.done


class Mistral(Format):
    """Mistral's list."""

    name = "mistral"
    marks = (MARK, ARGS, CALL_ID)
    parser = MistralCallParser
    before, after, between = f"{MARK}[", "]", ", "
    trigger = f"{MARK}["

    def known_by(self, template: str) -> bool:
        return MARK in template and ARGS not in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f'{{"name": {json.dumps(tool.name)}, "arguments": ', SchemaPart(tool.parameters), "}"

    def call_id(self, digest: str) -> str:
        return digest[:9]


class MistralArgs(Mistral):
    """The form of tokenizers from v11 on."""

    name = "mistral_v11"
    before = after = between = ""
    trigger = MARK

    def known_by(self, template: str) -> bool:
        return MARK in template and ARGS in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{MARK}{tool.name}{ARGS}", SchemaPart(tool.parameters)
