"""Deltas of one request on their way from the engine to its consumer, across a restart of the engine.

A request that was waiting when its engine died runs on the next one. One that had run may have caused the death: it
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from unisono.types import EngineRequest, TokenDelta, UnisonoError


class TokenStream:
    """Deltas of one request. ``take`` waits for the next; accumulated deltas are merged into one.

    abort: called with the request's id to end it. ``accepted`` is done when the engine has the request; ``started``: it
    has or had a slot; ``begun``: its first delta has been counted; ``retried``: it waits for its second engine.
    ``engine``: number of its engine. ``tokens``: all tokens so far.
    """

    def __init__(self, request: EngineRequest, abort: Callable[[str], None], engine: int = 0) -> None:
        self.request, self._abort, self.engine = request, abort, engine
        self.prompt_tokens, self.begun = len(request.prompt_token_ids), False
        self._pending: TokenDelta | None = None
        self._error: UnisonoError | None = None
        self._news = asyncio.Event()
        self.tokens: list[int] = []
        self.started = self.retried = False
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(self) -> TokenDelta:
        """Return the tokens since the last call. Raises EngineDead if the engine died."""
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
    def may_retry(self) -> bool:
        """True if another engine may run it: it has not run, and its engine is the first that died."""
        return not self.retried and not self.started

    def retry(self) -> None:
        """Wait for another engine."""
        self.retried = True

    def moved(self, abort: Callable[[str], None], engine: int) -> None:
        """Record that another engine runs the request."""
        self._abort, self.engine = abort, engine

    def push(self, delta: TokenDelta) -> None:
        """Add a delta of the engine."""
        self.started = True
        self.tokens += delta.token_ids
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.absorb(delta)
        self._news.set()

    def fail(self, error: UnisonoError) -> None:
        """End the stream with ``error``, after its tokens."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # nobody reads it if the caller is gone
        self._error = error
        self._news.set()
