"""Pieces of text to HTTP answers: one JSON object, or a stream of server-sent events.

``routes`` close the generations of an answer when it has finished, failed, or lost its client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from unisono.http.answers.drafts import AcceptanceReport
from unisono.http.answers.generation import Generation, OutputPiece, merge
from unisono.http.errors import ApiError, as_api_error
from unisono.http.observability.request_note import RequestNote
from unisono.http.openai.protocol import GenerationRequest
from unisono.http.openai.responses import (
    DONE,
    AnswerMetrics,
    Response,
    ResponseShape,
    TokenReport,
    Usage,
    encoded,
    event,
    joined,
)
from unisono.text.tool_parsers.base import ToolDelta

logger = logging.getLogger(__name__)

Choices = list[Any]


@dataclass(frozen=True)
class OpenAIReply:
    """The common part of all chunks of one answer, and its request, which determines their contents."""

    shape: ResponseShape
    id: str
    created: int
    model: str
    fingerprint: str
    request: GenerationRequest
    generations: Sequence[Generation]
    acceptance: AcceptanceReport

    async def whole(self) -> Response:
        """The complete answer. Raises the error that ended a generation early."""
        texts, reasonings = [""] * len(self.generations), [""] * len(self.generations)
        calls: list[list[ToolDelta]] = [[] for _ in self.generations]
        ids: list[list[int]] = [[] for _ in self.generations]
        reports: list[list[TokenReport]] = [[] for _ in self.generations]
        ends: dict[int, OutputPiece] = {}
        async with aclosing(merge(self.generations)) as pieces:
            async for piece in pieces:
                texts[piece.index] += piece.text
                reasonings[piece.index] += piece.reasoning
                calls[piece.index] += piece.tool_calls
                ids[piece.index] += piece.token_ids
                reports[piece.index] += piece.reports or []
                ends[piece.index] = piece
        choices: Choices = []
        chosen = self._chosen()
        for number, generation in enumerate(chosen):
            index = generation.index
            end = ends[index]
            assert end.finish is not None
            choice = self.shape.choice(number, texts[index], end.finish, end.stop, generation.seed)
            if generation.splits:
                choice.message.reasoning_content = choice.message.reasoning = reasonings[index] or None
            if calls[index]:
                choice.message.tool_calls = joined(calls[index])
                choice.message.content = texts[index] or None
            if (states := await asyncio.to_thread(generation.hidden_states)) is not None:
                choice.hidden_states, prompt_states = states
                if prompt_states is not None:
                    choice.prompt_hidden_states = prompt_states
            own, of_prompt = generation.routed_experts
            if own is not None:
                choice.routed_experts = encoded(own)
            if of_prompt is not None:
                choice.prompt_routed_experts = encoded(of_prompt)
            choices.append(self._with_tokens(choice, ids[index], reports[index]))
        answer = self._response(self.shape.whole, choices, self._usage())
        scores = [one for generation in chosen if (one := generation.prompt_logprobs) is not None]
        if self.request.prompt_logprobs is not None and len(scores) == len(chosen):  # otherwise some were aborted early
            self.shape.add_prompt_logprobs(answer, scores)
        self._add_prompts(answer, chosen)
        answer.metrics = self._metrics()
        return answer

    def _chosen(self) -> Sequence[Generation]:
        """The returned generations: of each prompt's ``best_of`` the n likeliest ones, best first."""
        n, best_of = self.request.n or 1, self.request.sequences()
        if best_of == n:
            return self.generations
        groups = (self.generations[at : at + best_of] for at in range(0, len(self.generations), best_of))
        return [one for group in groups for one in sorted(group, key=lambda one: -one.cumulative_logprob)[:n]]

    def _add_prompts(self, answer: Response, generations: Sequence[Generation]) -> None:
        """Add the prompts of the answer's choices, if requested."""
        if self.request.return_token_ids or self.request.return_prompt_token_ids:
            self.shape.add_prompts(answer, [generation.prompt_token_ids for generation in generations])
        if self.request.tells_prompt:
            answer.prompt_text = generations[0].prompt_text

    async def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]:
        """The stream, ending with ``[DONE]``. An error becomes an event, because the status line has been sent."""
        options = self.request.stream_options
        total = options is not None and bool(options.include_usage)
        continuous = total and options is not None and bool(options.continuous_usage_stats)

        def chunk(choices: Choices, opens: Generation | None = None) -> bytes:
            usage = self._usage() if continuous else None if total else UNSET
            response = self._response(self.shape.chunk, choices, usage)
            if opens is not None:
                self._add_prompts(response, [opens])
            return event(response)

        try:
            begun: set[int] = set()
            async with aclosing(merge(self.generations)) as pieces:
                async for piece in pieces:
                    opens = None if piece.index in begun else self.generations[piece.index]
                    begun.add(piece.index)
                    data = b""
                    # One choice per chunk: clients read only a chunk's first. One write per piece.
                    for choice in self._chunk_choices(piece, opens is not None):
                        data += chunk([choice], opens)
                        opens = None
                    if data:
                        yield data
            if total:
                last = self._response(self.shape.chunk, [], self._usage())
                last.metrics = self._metrics()
                yield event(last)
        except Exception as error:
            failed(error)
            yield error_event(error)
        yield DONE

    def _chunk_choices(self, piece: OutputPiece, first: bool) -> Choices:
        """Choices with the reasoning, text and calls of a piece, or the requested data of its tokens; then the closing
        one.

        first: the piece has its choice's first token. Its opening chunk is sent with it and never before, so that a
        client's time to the first chunk is the time to the first token.
        """
        choices: Choices = []
        if piece.reasoning:
            choices.append(self.shape.reasoning(piece.index, piece.reasoning))
        if piece.text or (
            not choices
            and not piece.tool_calls
            and (piece.reports or piece.draft or (self.request.return_token_ids and piece.token_ids))
        ):
            choices.append(self.shape.text(piece.index, piece.text))
        choices += [self.shape.tool_call(piece.index, delta) for delta in piece.tool_calls]
        if choices:
            self._with_tokens(choices[0], piece.token_ids, piece.reports or [])
            if piece.draft is not None:
                choices[0].draft = piece.draft
        if first:
            choices = self.shape.open(piece.index, self.generations[piece.index].seed, choices)
        if piece.finish is not None:
            choices.append(self.shape.last(piece.index, piece.finish, piece.stop))
        return choices

    def _with_tokens(self, choice: Any, token_ids: list[int], reports: list[TokenReport]) -> Any:
        if self.request.return_token_ids:
            choice.token_ids = token_ids
        if reports:
            choice.logprobs = self.shape.logprobs(reports)
        return choice

    def _usage(self) -> Usage:
        return Usage.total(generation.usage for generation in self.generations)

    def _metrics(self) -> AnswerMetrics | UnsetType:
        return self.acceptance.metrics([generation.drafts for generation in self.generations])

    def _response(self, kind: str, choices: Choices, usage: Usage | UnsetType | None) -> Response:
        return Response(self.id, kind, self.created, self.model, self.fingerprint, choices, usage)


def stream_error(error: Exception) -> ApiError:
    """The error that a stream's client receives; an internal error is logged."""
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        logger.exception("A request failed", exc_info=error)
    return api_error


def error_event(error: Exception) -> bytes:
    """The event that OpenAI's clients raise as an APIError."""
    return b"data: " + stream_error(error).body() + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``, or None after cancelling it because the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply(Protocol):
    """An answer in progress in the form of one API: whole, or as events.

    ``whole`` raises the error that ended it early; ``events`` passes it to ``failed`` and ends with an error event.
    """

    async def whole(self) -> Any: ...
    def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]: ...


def encode_event(event: dict[str, Any]) -> bytes:
    """The encoded form of a named event."""
    return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class EventReply:
    """A :class:`Reply` of an API whose streams are named events."""

    def batches(self) -> AsyncGenerator[list[dict[str, Any]]]:
        """Batches of events in order of arrival. Raises the error that ends the answer early."""
        raise NotImplementedError

    def failure(self, error: Exception) -> list[dict[str, Any]]:
        """The events of an error that ended the answer early."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """The complete answer."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self.batches()) as batches:
            async for _ in batches:
                pass
        return self.result()

    async def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self.batches()) as batches:
                async for new in batches:
                    yield b"".join(map(encode_event, new))
        except Exception as error:
            failed(error)
            yield b"".join(map(encode_event, self.failure(error)))


class EventStream(StreamingResponse):
    """A reply's events; stops when the client disconnects, even while no event comes.

    ``close`` is called at the end.
    """

    body_iterator: AsyncGenerator[bytes]

    def __init__(self, reply: Reply, note: RequestNote, close: Callable[[], None]) -> None:
        def failed(error: Exception) -> None:
            note.error = as_api_error(error)

        events = reply.events(failed)
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self.stream_response(send))
        finally:
            await self.body_iterator.aclose()
            self._close()
