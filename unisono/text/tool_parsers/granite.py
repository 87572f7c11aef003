"""``<|tool_call|>[{"name": …, "arguments": {…}}, …]``: Granite 3. Granite 4 writes Hermes' form.

Source: the chat templates of ibm-granite/granite-3.0-8b-instruct and granite-3.3-8b-instruct.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono.text.tool_parsers.base import Format, FormatPart, JsonCall, SchemaPart, Tool, ToolCallParser
from unisono.text.tool_parsers.mistral import MistralCallParser

MARK, PLAIN_MARK = "<|tool_call|>", "<tool_call>"


class GraniteCallParser(MistralCallParser):
    """Some versions write the mark as plain text, and one call without a list."""

    marks = (MARK, PLAIN_MARK)
    _alone = False  # one call without a list

    def _begin(self) -> bool:
        if not self.skip():
            return False
        self._alone = False
        if self.takes("["):
            self.step = self._list
        elif self.held.startswith("{"):
            self._alone = True
            self._call, self._named, self.step = JsonCall(), False, self._object
        else:
            self.step = self._broken
        return True

    def _end_object(self) -> None:
        if self._alone:
            self.finish_call()
        else:
            self.step = self._list


class Granite(Format):
    """Granite 3."""

    name = "granite"
    marks = (MARK,)
    parser: type[ToolCallParser] = GraniteCallParser
    before, after, between = f"{MARK}[", "]", ", "
    trigger = f"{MARK}["

    def known_by(self, template: str) -> bool:
        return MARK in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f'{{"name": {json.dumps(tool.name)}, "arguments": ', SchemaPart(tool.parameters), "}"
