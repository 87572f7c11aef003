"""Calls in gpt-oss's harmony format: ``<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{…}<|call|>``.

Source: see ``text/harmony.py``, which parses the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.text.harmony import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MARKS,
    MESSAGE,
    START,
    HarmonyMessages,
    Header,
    MessagePart,
)
from unisono.text.tool_parsers import base
from unisono.text.tool_parsers.base import Format, ParsedPiece, ParserContext, SchemaPart, Tool, ToolCallParser


class HarmonyCallParser(ToolCallParser):
    """A message to a function is a call; all other text is content, in any channel."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._messages = HarmonyMessages()
        self._names = {tool.name for tool in context.tools}
        self._argued = self._ended = False

    def feed(self, text: str, last: bool = False) -> ParsedPiece:
        self._found, self.last = ParsedPiece(), last
        for part in self._messages.feed(text, last):
            if self.context.parallel or self._goes_on(part):
                self._read(part)
        if last:
            self.end()
        return self._found

    def outside(self) -> bool:
        return False

    def _goes_on(self, part: MessagePart) -> bool:
        """True if a part belongs to the only call allowed, or precedes it."""
        return not self.count or (not part.begins and not self._ended)

    def _read(self, part: MessagePart) -> None:
        name = self._function(part.header)
        if name is None:
            self._say(part)
            return
        if part.begins:
            self.begin_call(name)
            self._argued = self._ended = False
        self._argued = self._argued or bool(part.text.strip())
        self.argue(part.text if not part.ends or self._argued else "{}")
        self._ended = part.ends

    def _say(self, part: MessagePart) -> None:
        """Add content; messages begin on lines of their own."""
        if part.begins and self._spoke and self._said:
            self.say("\n")
        self.say(part.text)

    def _function(self, header: Header) -> str | None:
        """The function that a message calls; None for other messages."""
        recipient = header.recipient
        if recipient.startswith(FUNCTIONS):
            return recipient.removeprefix(FUNCTIONS)
        return recipient if recipient in self._names else None


class Harmony(Format):
    """gpt-oss."""

    name = "openai"
    marks = MARKS
    parser: type[ToolCallParser] = HarmonyCallParser
    before, between = f"{START}assistant", f"{END}{START}assistant"
    trigger = CHANNEL
    answer_head = f"{START}assistant{CHANNEL}{FINAL}{MESSAGE}"
    heads: Mapping[str, str] = {START: f"assistant{CHANNEL}", CHANNEL: ""}
    other_heads = tuple(f"{channel}{MESSAGE}" for channel in (FINAL, COMMENTARY, ANALYSIS))

    def known_by(self, template: str) -> bool:
        return f"{CHANNEL}{COMMENTARY}" in template

    def call(self, tool: Tool) -> Sequence[base.FormatPart]:
        head = f"{CHANNEL}{COMMENTARY} to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"
        return head, SchemaPart(tool.parameters)
