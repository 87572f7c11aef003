"""Beam search behind the interface of an engine client: the generation of each beam reads one delta, with all its
tokens.

:class:`BeamClient` replaces ``EngineClient`` in the generations of one prompt. The first one to start begins the
search; it ends when all have closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from unisono.cluster.engines import ANYWHERE, Engines, Placement
from unisono.cluster.token_stream import TokenStream
from unisono.frontend.beam_search import Beam, BeamSearch
from unisono.types import EngineRequest, FinishReason, TokenDelta, TokenLogprobs, part_id, request_failure


class BeamStream:
    """The single delta of a beam."""

    def __init__(self, owner: BeamClient, request: EngineRequest, index: int) -> None:
        self._owner, self._request, self._index = owner, request, index
        self.engine = 0
        self._open = True

    async def take(self) -> TokenDelta:
        """The whole beam, when the search is over. Raises the error that ended the search."""
        try:
            beam = (await self._owner.beams())[self._index]
        except asyncio.CancelledError:
            if self._owner.cancelled:
                return TokenDelta(self._request.request_id, [], FinishReason.ABORT)
            raise
        count, self.engine = self._request.params.logprobs, self._owner.engine
        delta = TokenDelta(self._request.request_id, list(beam.tokens), beam.finish, self._owner.cached_tokens)
        if count is not None:
            delta.logprobs = [TokenLogprobs(one.logprob, one.rank, one.top[:count]) for one in beam.logprobs]
        return delta

    def close(self) -> None:
        """Leave the search; may be called more than once."""
        if self._open:
            self._open = False
            self._owner.leave()


class BeamClient:
    """One search for ``readers`` generations.

    cached_tokens: prompt tokens from the prefix cache. cancelled: the search was cancelled. engine: number of the
    engine that runs it.
    """

    def __init__(self, client: Engines, search: BeamSearch, readers: int) -> None:
        self._client, self._search, self._readers = client, search, readers
        self._submitted, self._label, self._placement = 0, "", ANYWHERE
        self._streams: list[TokenStream] = []
        self._started: asyncio.Future[None] | None = None
        self._task: asyncio.Task[list[Beam]] | None = None
        self.cached_tokens = self.engine = 0
        self.cancelled = False

    async def submit(self, request: EngineRequest, placement: Placement = ANYWHERE) -> BeamStream:
        """Begin the search, once.

        Raises BadRequest if the engine refuses its first step, EngineDead.

        placement: routing hints; all steps run on one engine.
        """
        stream = BeamStream(self, request, self._submitted)
        if not self._submitted:
            self._label, self._placement = (
                request.client,
                replace(placement, group=part_id(request.request_id, "beams")),
            )
        self._submitted += 1
        if self._started is None:
            self._started = asyncio.ensure_future(self._step())
        try:
            await asyncio.shield(self._started)
        except BaseException:
            stream.close()
            raise
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return stream

    async def beams(self) -> list[Beam]:
        assert self._task is not None
        return await asyncio.shield(self._task)

    def cancel(self, request_id: str) -> None:
        """End the search early, for all its beams: they end with the finish reason ``abort``."""
        self.cancelled = True
        if self._task is not None:
            self._task.cancel()
        for stream in self._streams:
            stream.close()

    def leave(self) -> None:
        """Remove a closed generation."""
        self._readers -= 1
        if self._readers == 0:
            for future in (self._started, self._task):
                if future is not None:
                    future.cancel()
            for stream in self._streams:
                stream.close()

    async def _step(self) -> None:
        """Submit the next step's requests to the engine."""
        requests = [replace(one, client=self._label) for one in self._search.requests()]
        begun = (self._client.submit(one, placement=self._placement) for one in requests)
        results = await asyncio.gather(*begun, return_exceptions=True)
        self._streams = [one for one in results if isinstance(one, TokenStream)]
        for one in results:
            if isinstance(one, BaseException):
                raise one

    async def _run(self) -> list[Beam]:
        first = True
        while self._streams:
            reports = [await self._report(stream, first) for stream in self._streams]
            first = False
            self._search.take(reports)
            await self._step()
        return self._search.best()

    async def _report(self, stream: TokenStream, first: bool) -> TokenLogprobs:
        found: list[TokenLogprobs] = []
        finish = FinishReason.RUNNING
        while finish is FinishReason.RUNNING:
            delta = await stream.take()
            self.engine = stream.engine
            if delta.error is not None:
                raise request_failure(delta.error, delta.error_param)
            finish = delta.finish
            found += delta.logprobs or []
            if first:
                self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        return found[0]


Source = Engines | BeamClient
"""The client that generations submit their requests to."""
