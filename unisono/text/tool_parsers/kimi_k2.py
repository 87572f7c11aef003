"""Kimi K2's calls: a section of calls between special tokens, each with its id, ``functions.NAME:NUMBER``.

Source: the chat template and the tool call guide of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.text.tool_parsers.base import Format, FormatPart, JsonValue, SchemaPart, TagPart, Tool, ToolCallParser
from unisono.text.tool_parsers.deepseek import DeepSeekV31CallParser

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENT = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
NUMBER = {"type": "regex", "pattern": "[0-9]{1,4}"}


class KimiCallParser(DeepSeekV31CallParser):
    """The calls keep the model's ids: the template writes them into the next prompt, with the name in them."""

    section, section_end, call, call_end, separator = SECTION, SECTION_END, CALL, CALL_END, ARGUMENT

    def _begin(self, name: str) -> None:
        whole = name.strip()
        bare = re.sub(r":\d+$", "", whole).removeprefix("functions.")
        self.begin_call(bare, whole if whole != bare else f"functions.{bare}:{self.count}")
        self._body, self._value, self.step = "", JsonValue(), self._arguments


class KimiK2(Format):
    """Kimi K2."""

    name = "kimi_k2"
    marks = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENT)
    parser: type[ToolCallParser] = KimiCallParser
    before, after, between = SECTION, SECTION_END, ""
    trigger = SECTION
    interrupts = (SECTION,)

    def known_by(self, template: str) -> bool:
        return SECTION in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{CALL}functions.{tool.name}:", TagPart(NUMBER), ARGUMENT, SchemaPart(tool.parameters), CALL_END
