"""The deltas of one request on their way from the engine to its reader, across a restart of the engine.

A request whose client has got nothing yet runs again on the new engine. Its seed is part of it, so it brings the same
tokens: those that the reader has already are checked and left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from unisono.types import EngineRequest, FinishReason, TokenDelta, UnisonoError


@dataclass
class _Received:
    """What a reader has got: tokens, bytes of hidden states, values of other features."""

    tokens: list[int] = field(default_factory=list)
    state_bytes: int = 0
    extra: dict[str, int] = field(default_factory=dict)

    def count(self, delta: TokenDelta) -> None:
        self.tokens += delta.token_ids
        self.state_bytes += len(delta.hidden_states.data) if delta.hidden_states is not None else 0
        for name, values in (delta.extra or {}).items():
            self.extra[name] = self.extra.get(name, 0) + len(values)

    def cut(self, whole: TokenDelta) -> TokenDelta:
        """What ``whole``, a run from its beginning, has beyond this. Raises UnisonoError if it began differently."""
        count = len(self.tokens)
        if whole.error is None and whole.token_ids[:count] != self.tokens:
            raise UnisonoError("The engine was restarted and the request, run again, brought other tokens than before.")
        states = whole.hidden_states
        if states is not None:
            states = replace(states, data=states.data[self.state_bytes :])
        extra = whole.extra and {name: values[self.extra.get(name, 0) :] for name, values in whole.extra.items()}
        return TokenDelta(
            whole.request_id,
            whole.token_ids[count:],
            whole.finish,
            error=whole.error,
            logprobs=whole.logprobs and whole.logprobs[count:],
            hidden_states=states,
            extra=extra,
        )


class _Replay:
    """The deltas of a second run, until there is more than what was received of the first."""

    def __init__(self, received: _Received) -> None:
        self._received = received
        self._whole: TokenDelta | None = None

    def feed(self, delta: TokenDelta) -> TokenDelta | None:
        """What is new, once something is. Raises UnisonoError if the runs differ."""
        if self._whole is None:
            self._whole = delta
        else:
            self._whole.absorb(delta)
        ended = self._whole.finish is not FinishReason.RUNNING
        more = len(self._whole.token_ids) > len(self._received.tokens)
        return self._received.cut(self._whole) if ended or more else None


class TokenStream:
    """Deltas of one request. ``take`` waits for the next; deltas that pile up come as one.

    streamed: whether the client gets tokens as they come. abort: called with the request's id to end it.
    ``accepted`` is done when the engine has the request; ``begun``: its first delta has been counted;
    ``retried``: this is its second run. ``engine``: the number of the one that runs it.
    """

    def __init__(self, request: EngineRequest, streamed: bool, abort: Callable[[str], None], engine: int = 0) -> None:
        self.request, self._streamed, self._abort, self.engine = request, streamed, abort, engine
        self.prompt_tokens, self.begun = len(request.prompt_token_ids), False
        self._pending: TokenDelta | None = None
        self._error: UnisonoError | None = None
        self._news = asyncio.Event()
        self._received = _Received()
        self._replay: _Replay | None = None
        self.retried = False
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(self) -> TokenDelta:
        """The tokens since the last call. Raises EngineDead if the engine died."""
        await self._news.wait()
        self._news.clear()
        delta, self._pending = self._pending, None
        if delta is not None:
            if self._error is not None:
                self._news.set()
            return delta
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Abort the request unless it has finished. May be called at any time, more than once."""
        self._abort(self.request.request_id)

    @property
    def tokens(self) -> list[int]:
        """What has come so far."""
        return self._received.tokens

    @property
    def may_retry(self) -> bool:
        """Whether it may run a second time: its client has no tokens, and this is the first run."""
        return not self.retried and not (self._streamed and self._received.tokens)

    def retry(self) -> bool:
        """Get ready for a second run; False where there is none."""
        if not self.may_retry:
            return False
        self.retried = True
        self._replay = _Replay(self._received) if self._received.tokens else None
        return True

    def moved(self, abort: Callable[[str], None], engine: int) -> None:
        """Another engine runs the request."""
        self._abort, self.engine = abort, engine

    def push(self, delta: TokenDelta) -> None:
        """The engine has brought ``delta``."""
        if self._replay is not None:
            try:
                rest = self._replay.feed(delta)
            except UnisonoError as error:
                self.fail(error)
                self.close()
                return
            if rest is None:
                return
            self._replay, delta = None, rest
        self._received.count(delta)
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.absorb(delta)
        self._news.set()

    def fail(self, error: UnisonoError) -> None:
        """End the stream with ``error``, after the tokens that it has."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # a caller that is gone leaves it unread
        self._error = error
        self._news.set()
