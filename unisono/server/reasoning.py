"""Splits a chat answer into the model's thinking and what it says: ``--reasoning-parser``.

Thinking stands between two marks at the beginning of an answer. Chat templates often write the opening mark into the
prompt, or an empty thought where thinking is turned off; so the prompt's end says how an answer begins. ``serving``
gives every sequence of a chat answer a :class:`Splitter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.types import ConfigError


@dataclass(frozen=True)
class Parser:
    """The marks around a thought. opens: whether an answer begins inside one where the prompt shows neither mark."""

    start: str = "<think>"
    end: str = "</think>"
    opens: bool = False

    def splitter(self, prompt: str, prefix: str | None = None) -> Splitter:
        """For one answer. prefix: the beginning of the answer, where the request gave one to be continued."""
        before = prompt.rstrip() if prefix is None else prefix
        opened = before.endswith(self.start) if prefix is None else prefix.rfind(self.start) > prefix.rfind(self.end)
        if opened:
            return Splitter(self, "thinking")
        closed = before.endswith(self.end) if prefix is None else bool(prefix)
        return Splitter(self, "content" if closed else "begin")


PARSERS: Mapping[str, Parser] = {"qwen3": Parser(), "deepseek_r1": Parser(opens=True)}
"""By the names that vLLM and SGLang give them."""


def parser_named(name: str | None) -> Parser | None:
    """The parser of a name; None for None. Raises ConfigError that lists the names."""
    if name is not None and name not in PARSERS:
        raise ConfigError(f"--reasoning-parser {name!r} is unknown; choose one of {', '.join(PARSERS)}.")
    return None if name is None else PARSERS[name]


@dataclass
class Splitter:
    """Reads one answer piece by piece; the pieces may cut a mark anywhere.

    state: ``begin`` (an opening mark may come first), ``thinking`` or ``content``. White space around marks belongs to
    neither part. Text that may yet turn out to be a mark, or white space before one, is held back.
    """

    parser: Parser
    state: str
    _held: str = ""
    _started: bool = False

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """(new thinking, new content). last: no more text comes; what is held back is given out."""
        self._held += text
        if self.state == "begin" and not self._begin(last):
            return "", ""
        thinking = self._think(last) if self.state == "thinking" else ""
        return thinking, self._content() if self.state == "content" else ""

    def _begin(self, last: bool) -> bool:
        """Look for the opening mark. Returns whether it is known how the answer begins."""
        mark, text = self.parser.start, self._held.lstrip()
        if text.startswith(mark):
            self.state, self._held = "thinking", text[len(mark) :]
        elif mark.startswith(text) and not last:
            return False
        else:
            self.state, self._started = ("thinking", False) if self.parser.opens else ("content", True)
        return True

    def _think(self, last: bool) -> str:
        """New thinking up to the closing mark, without the white space at both ends."""
        if not self._started:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(self.parser.end)
        if mark:
            self.state, self._held, self._started = "content", rest, False
            return thought.rstrip()
        kept = thought if last else thought[: len(thought) - _overlap(thought, self.parser.end)]
        new = kept if last else kept.rstrip()
        self._held = thought[len(new) :]
        self._started |= bool(new)
        return new

    def _content(self) -> str:
        text = self._held if self._started else self._held.lstrip("\r\n")
        self._held, self._started = "", self._started or bool(text)
        return text


def _overlap(text: str, mark: str) -> int:
    """The number of characters at the end of ``text`` with which ``mark`` may begin."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
