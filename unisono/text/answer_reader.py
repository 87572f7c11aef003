"""New text of a chat answer told apart: what the model thinks, what it says, and which tools it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.text.reasoning import Splitter
from unisono.text.tool_parsers.base import Reader, ToolDelta


@dataclass(frozen=True)
class Said:
    """What new text of an answer amounts to: thinking, content, tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[ToolDelta] = ()


class AnswerReader:
    """Reads one sequence of a chat answer. constrains: whether its calls are a grammar's."""

    def __init__(self, splitter: Splitter | None, reader: Reader | None, constrains: bool = False) -> None:
        self._splitter, self._reader, self.constrains = splitter, reader, constrains

    @property
    def splits(self) -> bool:
        """Whether thinking is told from what is said."""
        return self._splitter is not None

    def feed(self, text: str, last: bool) -> Said:
        """What ``text`` adds. last: no more text comes."""
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text, last)
        if self._reader is None:
            return Said(reasoning, text)
        found = self._reader.feed(text, last)
        return Said(reasoning, found.content, found.calls)

    def finish(self, reason: str) -> str:
        """OpenAI's finish_reason for an answer that ended for ``reason``."""
        called = self._reader is not None and self._reader.count
        return "tool_calls" if called and reason == "stop" else reason
