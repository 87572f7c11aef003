"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes 2 Pro, Qwen 2.5, Qwen 3 and many others.

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B and Qwen/Qwen3-8B.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono.text.tool_parsers.base import Format, FormatPart, JsonCall, ParserContext, SchemaPart, Tool, ToolCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCallParser(ToolCallParser):
    """Parser of calls between two marks. Text that opens like a call and is none stays text."""

    opening, closing = OPEN, CLOSE

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._call = JsonCall()
        self._body = ""  # text since the mark, until a name is known

    def outside(self) -> bool:
        text, mark = self.until(self.opening)
        self.say(text)
        if mark:
            self._call, self._body, self.step = JsonCall(), self.opening, self._inside
        return mark is not None

    def _inside(self) -> bool:
        if not self.held and not self.last:
            return False
        taken = self._call.feed(self.held)
        piece, self.held = self.held[:taken], self.held[taken:]
        if self._body:
            self._body += piece
            if self._call.name is not None:
                self.begin_call(self._call.name)
                self._body = ""
        self.argue(self._call.take())
        if self._call.done and not self._call.broken:
            self.step = self._close
        elif self._call.broken or self.last:
            self.step = self._rest
        return self.step != self._inside

    def _close(self) -> bool:
        """Read the closing mark after a complete object."""
        if self.skip() and not self.awaits(self.closing):
            self.takes(self.closing)
            self.finish_call()
            return True
        return False

    def _rest(self) -> bool:
        """Continue a malformed call: text before the mark is arguments; without a name, all of it is content."""
        if self._body:
            text, self._body, self.step = self._body, "", self.outside
            self.say(text)
            return True
        text, mark = self.until(self.closing)
        self.argue(text)
        if mark:
            self.finish_call()
        return mark is not None


class Hermes(Format):
    """Hermes."""

    name = "hermes"
    marks = (OPEN, CLOSE)
    parser = HermesCallParser
    trigger = OPEN
    interrupts = (OPEN,)

    def known_by(self, template: str) -> bool:
        return OPEN in template and "<arg_key>" not in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        head = f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return head, SchemaPart(tool.parameters), f"}}\n{CLOSE}"
