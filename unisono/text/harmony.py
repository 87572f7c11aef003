"""Messages of the harmony format, in which gpt-oss answers, parsed piece by piece.

An answer is a sequence of messages ``<|start|>HEADER<|message|>TEXT<|end|>``; the prompt has the first ``<|start|>``
and the role. A header is a role, an optional recipient, a channel and an optional content type:
``assistant to=functions.f<|channel|>commentary <|constrain|>json``, the recipient after the role or after the channel.
Channels: ``analysis`` is reasoning, ``final`` the answer, ``commentary`` a call, or words before one. ``<|call|>`` and
``<|return|>`` end a message and the answer. Source: OpenAI's harmony response format, and gpt-oss's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ENDS = (END, CALL, RETURN)

ANALYSIS, FINAL, COMMENTARY = "analysis", "final", "commentary"
FUNCTIONS = "functions."
"""Prefix of a call's recipient."""

RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([\w-]*)")
ROLE_GOES_ON = re.compile(r"\s*(t|to|to=[^\s<]*\s*)?")
"""Text between the role that ends the prompt and a channel."""


@dataclass(frozen=True)
class Header:
    """The header of a message. recipient: "" for a message to the user."""

    channel: str
    recipient: str = ""

    @classmethod
    def of(cls, text: str) -> Header:
        """Parse the text between the start mark and the message mark."""
        channel, recipient = CHANNEL_NAME.search(text), RECIPIENT.search(text)
        return cls(channel[1] if channel else "", recipient[1] if recipient else "")

    @property
    def text(self) -> str:
        """The beginning of a message with this header."""
        to = f" to={self.recipient}" if self.recipient else ""
        return f"{CHANNEL}{self.channel}{to}{MESSAGE}"


OUTSIDE = Header("")
"""The header of text outside messages."""


@dataclass(frozen=True)
class MessagePart:
    """New text of a message. begins, ends: it is the message's first or last part, which may be empty."""

    header: Header
    text: str = ""
    begins: bool = False
    ends: bool = False


class HarmonyMessages:
    """Parser of an answer in pieces, which may split marks anywhere.

    header: of the message in which the answer begins.

    Text outside messages is returned too, without marks; white space between messages is dropped.
    """

    def __init__(self, header: Header | None = None) -> None:
        self._held = self._head = ""
        self._state = "outside" if header is None else "body"
        self._header = header or OUTSIDE
        self._fresh, self._between = header is None, False

    def feed(self, text: str, last: bool = False) -> list[MessagePart]:
        """The parts of ``text``. last: no more text follows; held-back text is released."""
        self._held += text
        found: list[MessagePart] = []
        steps = {"outside": self._outside, "header": self._in_header, "body": self._in_body}
        while steps[self._state](found, last):
            pass
        return found

    def _until(self, marks: Sequence[str], last: bool) -> tuple[str, str]:
        """Take text up to the first of ``marks``, with the mark; without one, the text before any possible mark."""
        held = self._held
        place, mark = min(((held.find(mark), mark) for mark in marks if mark in held), default=(-1, ""))
        if mark:
            self._held = held[place + len(mark) :]
            return held[:place], mark
        cut = len(held) if last else len(held) - max(_overlap(held, mark) for mark in marks)
        self._held = held[cut:]
        return held[:cut], ""

    def _outside(self, found: list[MessagePart], last: bool) -> bool:
        """Read text outside messages. At the answer's beginning it may be the rest of the first header."""
        if self._fresh and not last and ROLE_GOES_ON.fullmatch(self._held.partition("<")[0]):
            if not any(mark in self._held for mark in MARKS) and _overlap(self._held, START, CHANNEL):
                return False
            if "<" not in self._held:
                return False
        text, mark = self._until(MARKS, last)
        if mark == CHANNEL and self._fresh and ROLE_GOES_ON.fullmatch(text):
            self._begin_header(text + mark)
            return True
        if self._between:
            text = text.lstrip()
        if text:
            found.append(MessagePart(OUTSIDE, text))
            self._fresh = self._between = False
        if mark in (START, CHANNEL):
            self._begin_header(mark if mark == CHANNEL else "")
        return bool(mark)

    def _begin_header(self, head: str) -> None:
        self._state, self._head, self._fresh, self._between = "header", head, False, False

    def _in_header(self, found: list[MessagePart], last: bool) -> bool:
        """Read up to a message's text. A truncated header is dropped."""
        text, mark = self._until((MESSAGE, START, *ENDS), last)
        self._head += text
        if mark == MESSAGE:
            self._state, self._header = "body", Header.of(self._head)
            found.append(MessagePart(self._header, begins=True))
        elif mark == START:
            self._head = ""
        elif mark:
            self._state, self._between = "outside", True
        return bool(mark)

    def _in_body(self, found: list[MessagePart], last: bool) -> bool:
        """Read a message's text. A new header ends it too, if the model omitted the end mark."""
        text, mark = self._until((START, CHANNEL, *ENDS), last)
        if text or mark:
            found.append(MessagePart(self._header, text, ends=bool(mark)))
        if mark in ENDS:
            self._state, self._between = "outside", True
        elif mark:
            self._begin_header(mark if mark == CHANNEL else "")
        return bool(mark)


def _overlap(text: str, *marks: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of one of ``marks``."""
    sizes = (n for mark in marks for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n]))
    return max(sizes, default=0)
