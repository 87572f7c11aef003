"""Splits new text of a chat answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.text.reasoning import Splitter
from unisono.text.tool_parsers.base import ToolCallParser, ToolDelta


@dataclass(frozen=True)
class AnswerParts:
    """The parts of new text: reasoning, content, tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[ToolDelta] = ()


class AnswerParser:
    """Parser of one sequence of a chat answer. constrains: a grammar constrains its calls."""

    def __init__(self, splitter: Splitter | None, calls: ToolCallParser | None, constrains: bool = False) -> None:
        self._splitter, self._calls, self.constrains = splitter, calls, constrains

    @property
    def splits(self) -> bool:
        """True if reasoning is separated from content."""
        return self._splitter is not None

    def feed(self, text: str, last: bool) -> AnswerParts:
        """The parts of ``text``. last: no more text follows."""
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text, last)
        if self._calls is None:
            return AnswerParts(reasoning, text)
        found = self._calls.feed(text, last)
        return AnswerParts(reasoning, found.content, found.calls)

    def finish(self, reason: str) -> str:
        """OpenAI's finish_reason for an answer that ended for ``reason``."""
        called = self._calls is not None and self._calls.count
        return "tool_calls" if called and reason == "stop" else reason
