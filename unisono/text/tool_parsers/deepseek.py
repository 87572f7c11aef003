"""DeepSeek's calls: a section of calls between special tokens; V3 and R1 write arguments in a code block, V3.1 bare.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.text.tool_parsers.base import (
    Format,
    FormatPart,
    JsonValue,
    ParserContext,
    SchemaPart,
    Tool,
    ToolCallParser,
)

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"


class DeepSeekCallParser(ToolCallParser):
    """V3 and R1: ``function<sep>name``, and the arguments in a code block."""

    section, section_end, call, call_end, separator = SECTION, SECTION_END, CALL, CALL_END, SEPARATOR

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._value = JsonValue()
        self._body = ""

    def outside(self) -> bool:
        text, mark = self.until(self.section)
        self.say(text)
        if mark:
            self._body, self.step = self.section, self._between
        return mark is not None

    def _between(self) -> bool:
        """Read within the section, between calls."""
        _, mark = self.until(self.call, self.section_end)
        if mark == self.call:
            stop = self.count and not self.context.parallel
            self._body, self.step = self._body + self.call, self.nothing if stop else self._name
        elif mark:
            self.step = self.outside
        return mark is not None

    def _name(self) -> bool:
        text, mark = self.until(FENCE, self.call_end)
        self._body += text + (mark or "")
        if mark == FENCE:
            name = self._body.removesuffix(FENCE).rpartition(self.separator)[2]
            self._begin(name)
        elif mark or (self.last and self._body):
            self._give_up()
            return mark is not None
        return mark is not None

    def _begin(self, name: str) -> None:
        self.begin_call(name.strip())
        self._body, self._value, self.step = "", JsonValue(), self._arguments

    def _give_up(self) -> None:
        """Return text that is not a call as content."""
        text, self._body, self.step = self._body, "", self.outside
        self.say(text)

    def _arguments(self) -> bool:
        if not self.held:
            return False
        if self._value.done:
            _, mark = self.until(self.call_end)
            if mark:
                self.step = self._between
            return mark is not None
        taken = self._value.feed(self.held)
        self.argue(self.held[:taken])
        self.held = self.held[taken:]
        return self._value.done


class DeepSeekV31CallParser(DeepSeekCallParser):
    """V3.1: ``name<sep>arguments``."""

    def _name(self) -> bool:
        text, mark = self.until(self.separator, self.call_end)
        self._body += text
        if mark == self.separator:
            self._begin(self._body.rpartition(self.call)[2])
        elif mark or (self.last and self._body):
            self._body += mark or ""
            self._give_up()
        return mark is not None


class DeepSeekV3(Format):
    """V3 and R1."""

    name = "deepseek_v3"
    marks = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    parser: type[ToolCallParser] = DeepSeekCallParser
    before, after = SECTION, SECTION_END
    trigger = SECTION

    def known_by(self, template: str) -> bool:
        return SECTION in template and "```json" in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        head = f"{CALL}function{SEPARATOR}{tool.name}{FENCE}"
        return head, SchemaPart(tool.parameters), f"{FENCE_END}{CALL_END}"


class DeepSeekV31(DeepSeekV3):
    """V3.1."""

    name = "deepseek_v31"
    parser = DeepSeekV31CallParser
    between = ""

    def known_by(self, template: str) -> bool:
        return SECTION in template and "```json" not in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        return f"{CALL}{tool.name}{SEPARATOR}", SchemaPart(tool.parameters), CALL_END
