"""Sends conversations at their start times with limited concurrency, and collects the answers.

One event loop in one process; ``workers`` runs several.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.tools.load.mixes import Conversation, Turn
from unisono.tools.load.prompts import PromptSource
from unisono.tools.load.streams import RequestResult, read
from unisono.tools.load.wire import Exchange, Wire, now

HELD = 256 << 20
"""Most bytes of bodies that are kept to be parsed after the load; beyond it, they are parsed while it runs."""
LAG = 0.01
"""Interval of the probe of the client's own lag, seconds."""


@dataclass(frozen=True)
class LoadTarget:
    """The server, and the fields of requests beside the prompt.

    url: http(s)://host[:port]. endpoint: a path that ends in ``/chat/completions`` or ``/completions``. model: its name
    in requests. body: more fields. timeout: seconds of a request.
    """

    url: str
    endpoint: str
    model: str
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 21600.0
    insecure: bool = False

    @property
    def chats(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def wire(self) -> Wire:
        return Wire(self.url, self.headers, self.timeout, self.insecure)


@dataclass
class ClientOutcome:
    """The results of one client.

    answers: of all requests. lag: delay of its event loop in seconds, p99. busy: fraction of a processor that it used.
    """

    answers: list[RequestResult] = field(default_factory=list)
    lag: float = 0.0
    busy: float = 0.0


class LoadClient:
    """Client that sends conversations.

    source: counts tokens that the server does not. most: concurrency, None: no limit.
    """

    def __init__(self, target: LoadTarget, source: PromptSource, most: int | None) -> None:
        self.target, self.source = target, source
        self.wire = target.wire()
        self._turn = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._finished: list[tuple[Exchange, int, float]] = []
        self._held = 0
        self.answers: list[RequestResult] = []

    async def run(self, conversations: Sequence[Conversation], times: Sequence[float], start: float) -> ClientOutcome:
        """Begin each conversation at its time, in seconds after ``start``. Returns when all have ended."""
        tasks = []
        lags: list[float] = []
        probe = asyncio.create_task(_probe(lags))
        begun, used = now(), time.process_time()
        for one, at in zip(conversations, times, strict=True):
            if (left := start + at - now()) > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(self.converse(one)))
        await asyncio.gather(*tasks)
        busy = (time.process_time() - used) / max(1e-9, now() - begun)
        probe.cancel()
        self.wire.close()
        self._read_finished()
        return ClientOutcome(self.answers, sorted(lags)[int(0.99 * (len(lags) - 1))] if lags else 0.0, busy)

    async def converse(self, one: Conversation) -> None:
        """Send the turns of a conversation one after another; a failure ends it."""
        messages: list[Any] = list(one.messages) or ([{"role": "system", "content": one.system}] if one.system else [])
        before = one.system
        for place, turn in enumerate(one.turns):
            if turn.prompt:
                messages.append({"role": "user", "content": turn.prompt})
            prompt = _append(before, turn.prompt)
            body = self.body(messages if self.target.chats else prompt, turn)
            more = place + 1 < len(one.turns)
            text = await self._ask(body, turn, read_now=more)
            if text is None:
                return
            if more:
                messages.append({"role": "assistant", "content": text})
                before = f"{prompt}{text}\n"

    def body(self, prompt: Any, turn: Turn) -> bytes:
        """The JSON of a streamed request."""
        data = {"model": self.target.model, "stream": True, "stream_options": {"include_usage": True}}
        data["messages" if self.target.chats else "prompt"] = prompt
        if turn.output_len is not None:
            data["max_tokens"] = turn.output_len
        return json.dumps(data | self.target.body).encode()

    async def _ask(self, body: bytes, turn: Turn, read_now: bool) -> str | None:
        """The text of an answer if needed for the next turn, else an empty one; None after a failure that is known by
        now.
        """
        request, ready = self.wire.request("POST", self.target.endpoint, body), now()
        async with self._turn:
            exchange = await self.wire.exchange(request)
        queued = exchange.sent - ready
        if read_now:
            answer, text = self._read(exchange, turn.prompt_len, queued)
            return None if answer.failure else text
        self._finished.append((exchange, turn.prompt_len, queued))
        self._held += sum(len(piece) for _, piece in exchange.pieces)
        if self._held > HELD:
            self._read_finished()
        return ""

    def _read_finished(self) -> None:
        for exchange, length, queued in self._finished:
            self._read(exchange, length, queued)
        self._finished.clear()
        self._held = 0

    def _read(self, exchange: Exchange, prompt_len: int, queued: float) -> tuple[RequestResult, str]:
        count = self.source.count if self.source.tokenizer is not None else None
        answer, text = read(exchange, prompt_len, count)
        answer.queued = queued
        self.answers.append(answer)
        return answer, text


async def _probe(lags: list[float]) -> None:
    """Record the delays of this event loop."""
    while True:
        due = now() + LAG
        await asyncio.sleep(LAG)
        lags.append(max(0.0, now() - due))


def _append(before: str, prompt: Any) -> Any:
    return f"{before}\n{prompt}" if before else prompt
