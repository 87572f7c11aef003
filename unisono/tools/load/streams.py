"""Parses the bodies of streamed completions: arrival times of text, token counts, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unisono.tools.load.wire import Exchange


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: Any = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _StreamUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class RequestResult:
    """The result of one request; times are seconds of one clock.

    sent: time of sending. queued: seconds of waiting under --max-concurrency. times: arrivals of events with text (of
    all events with a choice if none has text: a model without a tokenizer). ended: the end of the response.
    output_tokens: from ``usage`` if ``counted`` is "usage", else from "tokenizer" or "events". failure: (kind, text),
    None for a complete answer.
    """

    sent: float
    ended: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: str = "usage"
    times: list[float] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    queued: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the end of the response."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive texts."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


Count = Callable[[str], int]


def read(exchange: Exchange, prompt_len: int, count: Count | None) -> tuple[RequestResult, str]:
    """The answer and its text. prompt_len: used without ``usage``. count: counts the tokens of a text."""
    answer = RequestResult(exchange.sent, exchange.ended, prompt_len, failure=exchange.failure)
    if exchange.failure is None and exchange.status != 200:
        answer.failure = (f"HTTP {exchange.status}", exchange.body[:500].decode(errors="replace"))
    if answer.failure is not None:
        return answer, ""
    events = _Events()
    try:
        for at, piece in exchange.pieces:
            events.feed(at, piece)
        events.feed(exchange.ended, b"\n")
    except msgspec.MsgspecError as error:
        answer.failure = ("bad event", str(error))
        return answer, ""
    text = "".join(events.texts)
    answer.times = events.times or events.silent
    if events.error is not None:
        answer.failure = ("error in the stream", str(events.error)[:500])
    elif not answer.times:
        answer.failure = ("no text", "the response has no text" + ("" if events.done else ", and no [DONE]"))
    elif not events.done:
        answer.failure = ("cut off", "the stream ended without [DONE]")
    if events.usage is not None:
        answer.prompt_tokens, answer.output_tokens = events.usage.prompt_tokens, events.usage.completion_tokens or 0
    elif count is not None:
        answer.output_tokens, answer.counted = count(text), "tokenizer"
    else:
        answer.output_tokens, answer.counted = len(answer.times), "events"
    return answer, text


class _Events:
    """Server-sent events, assembled from pieces."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.times: list[float] = []
        self.silent: list[float] = []
        self.usage: _StreamUsage | None = None
        self.error: Any = None
        self.done = False
        self._rest = b""

    def feed(self, at: float, piece: bytes) -> None:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(at, line[5:].strip())

    def _event(self, at: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = _decode(data)
        self.error = event.error or self.error
        self.usage = event.usage or self.usage
        for choice in event.choices:
            if text := _text(choice):
                self.texts.append(text)
                self.times.append(at)
            else:
                self.silent.append(at)


def _text(choice: _Choice) -> str:
    """The text of a chunk: content, reasoning, or a marker for a part of a tool call."""
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    text = delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or ""
    return text or (str(delta.tool_calls) if delta.tool_calls else "")
