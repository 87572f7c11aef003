"""``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>``: InternLM 2 and 2.5.

Source: the chat format of internlm/internlm2_5-7b-chat.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from unisono.text.tool_parsers.base import Format, FormatPart, SchemaPart, Tool, ToolCallParser
from unisono.text.tool_parsers.hermes import HermesCallParser

START, PLUGIN, END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLMCallParser(HermesCallParser):
    """Hermes' calls between other marks."""

    opening, closing = START + PLUGIN, END


class InternLM(Format):
    """InternLM's plugins."""

    name = "internlm"
    marks = (START, PLUGIN, END)
    parser: type[ToolCallParser] = InternLMCallParser
    between = ""
    trigger = START + PLUGIN

    def known_by(self, template: str) -> bool:
        return PLUGIN in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        head = f'{START}{PLUGIN}\n{{"name": {json.dumps(tool.name)}, "parameters": '
        return head, SchemaPart(tool.parameters), f"}}\n{END}"
