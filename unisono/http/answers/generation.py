"""One sequence's deltas from the engine, converted to pieces of an answer.

Independent of HTTP and of the form of responses. ``serving`` makes a :class:`Generation` for each sequence of a
request; :func:`merge` reads several at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from unisono.cluster.engines import ANYWHERE, Placement
from unisono.cluster.token_stream import TokenStream
from unisono.frontend.sequence_output import SequenceOutput
from unisono.http.answers.beams import BeamStream, Source
from unisono.http.answers.drafts import by_token
from unisono.http.errors import ApiError
from unisono.http.observability.history import RequestRecord
from unisono.http.observability.metrics import RequestTimer
from unisono.http.openai.responses import HiddenStates, PromptLogprobs, TokenOrigin, TokenReport, Usage, finite
from unisono.http.security.auth import ApiClient
from unisono.text.answer_parser import AnswerParser, AnswerParts
from unisono.text.tool_parsers.base import ToolDelta
from unisono.text.tool_parsers.structure import tools_error
from unisono.types import BadRequest, FinishReason, TokenDelta, TokenLogprobs, UnisonoError, request_failure
from unisono.types.acceptance import DraftCount
from unisono.types.expert_ids import ExpertIds
from unisono.types.vectors import numbers


@dataclass(frozen=True)
class OutputPiece:
    """New text of one choice, and the tokens that came with it (text may come later than its tokens).

    reasoning, tool_calls: new reasoning and calls, if a parser separates them from ``text``. reports: log-probabilities
    of the tokens, if requested. draft: origin of the piece's one token, if requested. finish: OpenAI's reason, on the
    last piece. stop: the stop string that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: str | None = None
    stop: str | None = None
    reports: list[TokenReport] | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolDelta] = ()
    draft: TokenOrigin | None = None


@dataclass(frozen=True)
class Echo:
    """The prompt's text, with which the answer begins. alone: nothing follows it."""

    text: str
    alone: bool


@dataclass(frozen=True)
class Style:
    """The requested parts of an answer.

    scored: number of likely tokens per position in ``prompt_logprobs``, which are there when the sequence has ended;
    None: not requested. reports: log-probabilities; offsets: with the tokens' positions in the text. ids: name tokens
    by id.
    hides: leave out reasoning. drafts: one piece per token, with its origin.
    """

    scored: int | None = None
    reports: bool = False
    ids: bool = False
    hides: bool = False
    drafts: bool = False
    offsets: bool = False


class Generation:
    """One sequence of an answer.

    ``usage``, ``seed`` and ``drafts`` may be read at any time.

    scores: the prompt's log-probabilities, which its first sequence sets for all; None if not requested. answer_parser:
    separates reasoning and tool calls from content. Of a prompt's several sequences the first one's usage counts the
    prompt.
    cumulative_logprob: of the tokens so far, if log-probabilities are computed. prompt_text: the rendered chat
    template.
    """

    def __init__(
        self,
        client: Source,
        output: SequenceOutput,
        timer: RequestTimer,
        index: int,
        scores: asyncio.Future[list[TokenLogprobs] | None] | None,
        style: Style,
        echo: Echo | None,
        answer_parser: AnswerParser | None = None,
    ) -> None:
        self._client, self._output, self._timer = client, output, timer
        self._request = output.request
        assert self._request.params.seed is not None
        self.index, self.seed = index, self._request.params.seed
        self.prompt_logprobs: PromptLogprobs | None = None
        self.cumulative_logprob = 0.0
        self.prompt_text: str | None = None
        self._scores, self._style, self._echo = scores, style, echo
        self._answer_parser = answer_parser
        self._stream: TokenStream | BeamStream | None = None
        self._placement = ANYWHERE  # routing hints
        self.ended: str | None = None  # finish reason, once it has ended
        self._owner = ApiClient()
        self.drafts = DraftCount()
        self._reasoning_chars = self._written = 0  # characters of reasoning; of everything
        self._echoed = 0  # characters of the prompt at the beginning of the answer
        self._cancelled = False

    def hidden_states(self) -> tuple[HiddenStates, HiddenStates | None] | None:
        """The hidden states of generated tokens, and of prompt tokens (for a prompt's first sequence only), once it has
        ended, as JSON by tokens.

        None if not requested. The prompt's are forgotten here. Millions of numbers take seconds: call it in a thread.
        """
        if not self._request.params.return_hidden_states:
            return None
        own, prompt = numbers(self._output.hidden_states()), self.take_prompt_states()
        return _json_rows(own), _json_rows(prompt) if len(prompt) else None

    def take_prompt_states(self) -> np.ndarray:
        """The hidden states of the prompt's tokens, [tokens, hidden] in float32, once it has ended and if requested.

        They are forgotten here.
        """
        states = numbers(self._output.prompt_hidden_states())
        self._output.forget_prompt_hidden_states()
        return states

    @property
    def routed_experts(self) -> tuple[ExpertIds | None, ExpertIds | None]:
        """The experts of generated and of prompt tokens (of a prompt's first sequence), once it has ended; None if not
        requested."""
        prompt = self._output.prompt_routed_experts
        return self._output.routed_experts(), prompt if prompt is not None and prompt.data else None

    @property
    def usage(self) -> Usage:
        output, first = self._output, self._request.shares_with is None
        prompt, cached = (len(self._request.prompt_token_ids), output.cached_tokens) if first else (0, 0)
        thinking = math.ceil(output.num_tokens * self._reasoning_chars / self._written) if self._reasoning_chars else 0
        accepted, rejected = self.drafts.num_accepted, self.drafts.rejected
        return Usage.of(prompt, output.num_tokens, cached, accepted, rejected, thinking)

    def span(self) -> dict[str, Any] | None:
        """vLLM's attributes of a request's span, once it has ended; None if it never started."""
        params, times = self._request.params, self._timer.end
        if times is None:
            return None
        return {
            "gen_ai.request.id": self._request.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.response.finish_reason": self.ended,
            "gen_ai.usage.num_sequences": 1,
            "gen_ai.usage.prompt_tokens": len(self._request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": self._output.num_tokens,
            "gen_ai.usage.cached_tokens": self._output.cached_tokens,
            "gen_ai.latency.time_in_queue": times.queue,
            "gen_ai.latency.time_in_model_prefill": times.prefill,
            "gen_ai.latency.time_in_model_decode": times.decode,
            "gen_ai.latency.time_to_first_token": times.first_token,
            "gen_ai.latency.e2e": times.total,
        }

    def assign(self, arrival: float, placement: Placement, owner: ApiClient | None) -> None:
        """Assign the sequence to an HTTP request: its arrival (``time.monotonic()``), routing hints and client."""
        self._timer.start, self._placement = arrival, placement
        self._owner = owner or self._owner

    @property
    def key(self) -> str:
        """The name of the request's API key; empty without one."""
        return self._owner.name

    @property
    def streaming(self) -> bool:
        """True from the first token until the sequence has ended."""
        return self.ended is None and self._timer.begun

    async def start(self) -> None:
        """Submit the request to the engine. Raises BadRequest if it refuses, EngineDead if it is dead."""
        self._timer.submitted()
        try:
            request = replace(self._request, client=self._owner.label)
            self._stream = await self._client.submit(request, self._placement)
        except BadRequest as error:
            if error.param == "extra_args":
                raise BadRequest(str(error), "vllm_xargs", error.code) from None
            raise self._as_of_tools(error) from None
        if self._cancelled:  # possibly before the engine's client had the request
            self._client.cancel(self._request.request_id)

    def _as_of_tools(self, error: UnisonoError) -> UnisonoError:
        """The error, which names tools where it is about the grammar that they became."""
        constrained = self._answer_parser is not None and self._answer_parser.constrains
        if constrained and isinstance(error, BadRequest) and error.param == "structured_outputs":
            return tools_error(error)
        return error

    def cancel(self) -> None:
        """End the request early: its last piece has the finish reason ``abort``."""
        self._cancelled = True
        self._client.cancel(self._request.request_id)

    def close(self) -> None:
        """Abort the request if it is running."""
        if self._stream is not None:
            self._stream.close()

    async def pieces(self) -> AsyncGenerator[OutputPiece]:
        """Yield text as soon as later tokens cannot change it; the last piece has ``finish``.

        Raises UnisonoError: that of a failure.
        """
        assert self._stream is not None
        reason, failed = FinishReason.RUNNING, False
        try:
            while reason is FinishReason.RUNNING:
                delta = await self._stream.take()
                self._timer.placed(self._stream.engine)
                self._timer.queued(delta.queued_seconds)
                self._timer.tokens(len(delta.token_ids))
                self._output.record(delta)
                if delta.error is not None:
                    raise self._as_of_tools(request_failure(delta.error, delta.error_param))
                scores = None if self._scores is None else await self._prompt_scores(delta)
                if self._echo is not None:
                    echo, self._echo = self._echo, None
                    self._echoed = len(echo.text)
                    reason = FinishReason.LENGTH if echo.alone else reason
                    yield self._prompt_piece(echo, scores)
                    if echo.alone:
                        return
                for part, draft in by_token(delta) if self._style.drafts else [(delta, None)]:
                    reason, piece = self._read(part, draft)
                    yield piece
                    if piece.finish is not None:
                        break
        except Exception:
            failed = True
            raise
        finally:
            ended = FinishReason.ABORT if reason is FinishReason.RUNNING else reason
            self.ended = "error" if failed else ended.text
            self._timer.finished(self.ended, self._output.num_tokens, self._output.cached_tokens)
            self._timer.remember(self._record())
            self.close()

    def _read(self, delta: TokenDelta, draft: TokenOrigin | None) -> tuple[FinishReason, OutputPiece]:
        """(finish reason, piece) of a delta; RUNNING unless it ends the text."""
        new = self._output.detokenize(delta)
        self.drafts.add(delta.rounds, len(new.token_ids), delta.fewer_drafts)
        if new.logprobs is not None:
            self.cumulative_logprob += sum(one.logprob for one in new.logprobs)
        scores = new.logprobs if self._style.reports else None
        reports = None if scores is None else self._reports(new.token_ids, scores, self._offsets(new.token_ids))
        finish = None if new.finish is FinishReason.RUNNING else new.finish.text
        parts = AnswerParts(content=new.text)
        if self._answer_parser is not None:
            parts = self._answer_parser.feed(new.text, finish is not None)
            finish = finish and self._answer_parser.finish(finish)
            self._reasoning_chars += len(parts.reasoning)
            self._written += len(new.text)
        reasoning = "" if self._style.hides else parts.reasoning
        return new.finish, OutputPiece(
            self.index, parts.content, new.token_ids, finish, new.stop_string, reports, reasoning, parts.calls, draft
        )

    def _record(self) -> RequestRecord:
        """The history record of the ended sequence."""
        output, times, steps = self._output, self._timer.end, self.drafts.steps
        assert times is not None
        assert self.ended is not None
        return RequestRecord.of(
            times,
            id=self._request.request_id,
            key=self.key,
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=output.cached_tokens,
            completion_tokens=output.num_tokens,
            drafted_tokens=self.drafts.num_drafted,
            accepted_tokens=self.drafts.num_accepted,
            # The first token comes from the prompt's pass, all others from rounds.
            accept_length=round((output.num_tokens - 1) / (steps - 1), 3) if steps > 1 else None,
            finish_reason=self.ended,
        )

    @property
    def splits(self) -> bool:
        """True if reasoning is separated from content, and returned."""
        return self._answer_parser is not None and self._answer_parser.splits and not self._style.hides

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids

    async def _prompt_scores(self, delta: TokenDelta) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities, from the first delta; None if the sequence was aborted before it."""
        shared, self._scores = self._scores, None
        assert shared is not None
        if self._request.shares_with is None:
            shared.set_result(delta.prompt_logprobs)
        scores = await asyncio.shield(shared)  # cancelling one sequence must not cancel it for the others
        if scores is None and delta.finish is FinishReason.ABORT:  # /abort came before the first token
            return None
        if scores is None:
            raise ApiError(500, "The engine gave no log-probabilities of the prompt.", "server_error")
        if self._style.scored is not None:
            self.prompt_logprobs = finite(self._output.prompt_logprobs(scores, self._style.scored))
        return scores

    def _prompt_piece(self, echo: Echo, scores: list[TokenLogprobs] | None) -> OutputPiece:
        """The piece that echoes the prompt."""
        reports, most = None, self._request.params.logprobs if self._style.reports else None
        if scores is not None and most is not None:
            ids = self._request.prompt_token_ids
            first, *offsets = self._output.prompt_offsets(echo.text)
            reports = [TokenReport(self._text(ids[0]), None, first, [], data=self._output.token_bytes(ids[0]))]
            reports += self._reports(ids[1:], [replace(score, top=score.top[:most]) for score in scores], offsets)
        return OutputPiece(self.index, echo.text, [], FinishReason.LENGTH.text if echo.alone else None, None, reports)

    def _reports(self, token_ids: list[int], scores: list[TokenLogprobs], offsets: list[int]) -> list[TokenReport]:
        reports = []
        for token_id, one, offset in zip(token_ids, scores, offsets, strict=True):
            top = [(self._text(alternative), logprob) for alternative, logprob in one.top]
            ids = [token for token, _ in one.top]
            data, others = self._output.token_bytes(token_id), [self._output.token_bytes(token) for token in ids]
            reports.append(TokenReport(self._text(token_id), one.logprob, offset, top, ids, data, others))
        return reports

    def _offsets(self, token_ids: list[int]) -> list[int]:
        """Characters of the answer before each of the new tokens."""
        if not self._style.offsets:
            return [0] * len(token_ids)
        return [self._echoed + offset for offset in self._output.offsets(token_ids)]

    def _text(self, token_id: int) -> str:
        """The text of a token by itself, or its id in vLLM's form if requested or without a text."""
        text = None if self._style.ids else self._output.token_text(token_id)
        return f"token_id:{token_id}" if text is None else text


def _json_rows(rows: np.ndarray) -> HiddenStates:
    """Rows [tokens, hidden] as JSON, one at a time: the event loop runs between them."""
    return [msgspec.Raw(msgspec.json.encode(row.tolist())) for row in rows]


async def start_all(generations: Sequence[Generation]) -> None:
    """Start all or none. Raises the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            for generation in generations:
                group.create_task(generation.start())
    except ExceptionGroup as errors:
        for generation in generations:
            generation.close()
        raise errors.exceptions[0] from None


def merge(generations: Sequence[Generation]) -> AsyncGenerator[OutputPiece]:
    """The pieces of all generations in order of arrival. The first error ends all."""
    return generations[0].pieces() if len(generations) == 1 else _merged(generations)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[OutputPiece]:
    queue: asyncio.Queue[OutputPiece | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(generation, queue)) for generation in generations]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(generation: Generation, queue: asyncio.Queue[OutputPiece | Exception]) -> None:
    try:
        async for piece in generation.pieces():
            queue.put_nowait(piece)
    except Exception as error:
        queue.put_nowait(error)
