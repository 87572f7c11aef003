"""A request between its body and its answer: prompts to token ids, token ids to the engine, deltas to text.

Knows neither HTTP nor the wording of responses. :class:`Frontend` is made once; it makes a
:class:`Generation` of each prompt, and :func:`merge` reads several at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from unisono.server.client import EngineClient, TokenStream
from unisono.server.embeds import Prompt, embedded_prompt, overridden
from unisono.server.errors import ApiError
from unisono.server.hidden import check_hidden_states, lists
from unisono.server.metrics import RequestTimer, ServerMetrics
from unisono.server.protocol import ChatRequest, CompletionRequest
from unisono.server.responses import HiddenStates, PromptLogprobs, TokenReport, Usage, finite
from unisono.tokenizer import Detokenizer, Tokenizer
from unisono.types import (
    MAX_STOP_IDS,
    BadRequest,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from unisono.vectors import Returned

T = TypeVar("T")

COMPLETION_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` where the request has none: OpenAI's default."""
SEED_BITS = 53
"""Of a seed the server chooses: JavaScript reads it back exactly."""


@dataclass(frozen=True)
class ModelFacts:
    """What the server needs to know of the model, out of the engine's ``info()``.

    generation_defaults: sampling parameters that the checkpoint's generation_config sets. prompt_embeds,
    return_hidden_states: whether the server was started with the flags that allow them.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    prompt_embeds: bool
    return_hidden_states: bool

    @classmethod
    def of(cls, info: dict[str, Any]) -> ModelFacts:
        return cls(
            max_model_len=info["settings"]["max_model_len"],
            vocab_size=info["vocab_size"],
            hidden_size=info["hidden_size"],
            eos_token_ids=tuple(info["eos_token_ids"]),
            generation_defaults=dict(info["generation_defaults"]),
            prompt_embeds=info["settings"]["enable_prompt_embeds"],
            return_hidden_states=info["settings"]["enable_return_hidden_states"],
        )

    def with_eos(self, token_ids: Sequence[int]) -> ModelFacts:
        """These facts, and the tokenizer's EOS ids beside the configs'."""
        return replace(self, eos_token_ids=tuple(dict.fromkeys((*self.eos_token_ids, *token_ids))))


@dataclass(frozen=True)
class Piece:
    """New text of one choice, and the tokens that came with it (text may come later than its tokens).

    ``reports`` has their log-probabilities, if the request asked for them.
    ``finish`` is OpenAI's reason on the last piece; ``stop`` the stop string that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: str | None = None
    stop: str | None = None
    reports: list[TokenReport] | None = None


@dataclass(frozen=True)
class Echo:
    """The prompt's text, which begins the answer; ``alone``: it is all of it."""

    text: str
    alone: bool


class Frontend:
    """Turns checked request bodies into generations. ``tokenizer`` is None for a checkpoint without one."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, facts: ModelFacts, metrics: ServerMetrics
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.facts = facts
        self.metrics = metrics
        self._threads = ThreadPoolExecutor(1, "tokenizer")  # a long prompt must not hold up everyone's tokens

    async def completion(self, request: CompletionRequest, request_id: str) -> list[Generation]:
        """A generation for each prompt's each sequence. Raises BadRequest."""
        limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        prompt_only = bool(request.echo) and limit == 0  # the engine makes a token all the same
        params = request.sampling_params(self.facts.generation_defaults, 1 if prompt_only else limit)
        if request.echo and params.logprobs is not None:
            if params.logprob_start_len > 1:
                raise BadRequest(
                    f"logprob_start_len={params.logprob_start_len} leaves out what echo with logprobs reports; leave "
                    "out one of them.",
                    "logprob_start_len",
                )
            params = replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
        generations = []
        for i, prompt in enumerate(await self._prompts(request)):
            echo = self._echo(prompt, params, prompt_only) if request.echo else None
            asked = request.prompt_logprobs
            generations += self._generations(f"{request_id}-{i}", i, prompt, params, "prompt", asked, echo)
        return generations

    async def _prompts(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts in the order of their choices: embeddings first, as in vLLM. Raises BadRequest."""
        request.check_embeds(self.facts.prompt_embeds)
        written = request.prompts()
        sizes = self.facts.max_model_len, self.facts.hidden_size
        prompts = [await self._in_thread(embedded_prompt, text, *sizes) for text in request.embeds()]
        for given in written:
            ids = await self._encode(given, True) if isinstance(given, str) else given
            check_token_ids(ids, self.facts.vocab_size, "prompt")
            prompt = Prompt(ids, given if isinstance(given, str) else None)
            if request.embedding_overrides is not None:
                prompt = await self._in_thread(overridden, prompt, request.embedding_overrides, *sizes)
            prompts.append(prompt)
        return prompts

    async def chat(self, request: ChatRequest, request_id: str) -> list[Generation]:
        """A generation for each answer to a conversation. Raises BadRequest."""
        params = request.sampling_params(self.facts.generation_defaults, request.token_limit())
        conversation, options = request.conversation(), request.template_options()
        text = self._require_tokenizer("messages").apply_chat_template(conversation, **options)
        ids = await self._encode(text, False)
        check_token_ids(ids, self.facts.vocab_size, "messages")
        return self._generations(request_id, 0, Prompt(ids), params, "messages", request.prompt_logprobs)

    def _echo(self, prompt: Prompt, params: SamplingParams, alone: bool) -> Echo:
        if prompt.overrides is not None:
            raise BadRequest("echo repeats the prompt, and overridden tokens have no text; leave out echo.", "echo")
        if prompt.text is not None:
            return Echo(prompt.text, alone)
        return Echo(self._require_tokenizer("echo").decode(prompt.token_ids, params.skip_special_tokens), alone)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._require_tokenizer("prompt")
        least = -(-len(text) // tokenizer.longest_token)
        if least > self.facts.max_model_len:  # megabytes: refuse them before minutes of tokenizing
            raise BadRequest(
                f"The prompt has {len(text)} characters, at least {least} tokens; the model's context is "
                f"{self.facts.max_model_len} tokens. Shorten the prompt.",
                code="context_length_exceeded",
            )
        return await self._in_thread(tokenizer.encode, text, add_special_tokens)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise BadRequest(
                f"The checkpoint has no tokenizer, so {param} cannot be text; send token ids as prompt to "
                "/v1/completions, with return_token_ids=true to read the answer.",
                param,
            )
        return self.tokenizer

    def _generations(
        self,
        request_id: str,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        param: str,
        scored: int | None,
        echo: Echo | None = None,
    ) -> list[Generation]:
        """The ``params.n`` generations of prompt ``number``; ``scored`` is the request's own prompt_logprobs."""
        facts = self.facts
        check_token_ids(params.stop_token_ids, facts.vocab_size, "stop_token_ids")
        check_token_ids(tuple(params.logit_bias), facts.vocab_size, "logit_bias")
        check_token_ids(params.allowed_token_ids or (), facts.vocab_size, "allowed_token_ids")
        if params.stop:
            self._require_tokenizer("stop")
        bad_words = self._require_tokenizer("bad_words").bad_words(params.bad_words) if params.bad_words else ()
        room = check_length(len(prompt.token_ids), params.max_tokens, facts.max_model_len, param)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_tokens=room if params.max_tokens is None else params.max_tokens)
        check_hidden_states(facts.return_hidden_states, facts.hidden_size, len(prompt.token_ids), params)
        stops = stop_ids(params, facts.eos_token_ids)
        request = EngineRequest(
            request_id, prompt.token_ids, params, stops, time.time(), bad_words, overrides=prompt.overrides
        )
        scores = None if params.prompt_logprobs is None else PromptScores(scored)
        sequences = enumerate(request.sequences())
        return [Generation(self, one, number * params.n + i, echo, scores) for i, one in sequences]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises BadRequest naming the first id outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise BadRequest(f"{param} has token id {bad}; the vocabulary's ids are 0 to {vocab_size - 1}.", param)


def check_length(prompt: int, max_tokens: int | None, context: int, param: str) -> int:
    """How many tokens fit behind a prompt of ``prompt`` tokens. Raises BadRequest if ``max_tokens`` (or 1) do not."""
    room = context - prompt
    code = "context_length_exceeded"
    if prompt == 0:
        raise BadRequest(f"{param} has no tokens; give at least one.", param)
    if room < 1:
        raise BadRequest(
            f"The prompt has {prompt} tokens; the model's context is {context} tokens, one of them for the "
            f"answer. Shorten the prompt to at most {context - 1} tokens.",
            param,
            code,
        )
    if max_tokens is not None and max_tokens > room:
        raise BadRequest(
            f"The prompt has {prompt} tokens and max_tokens is {max_tokens}, together {prompt + max_tokens}; the "
            f"model's context is {context} tokens. Ask for at most {room} tokens or shorten the prompt.",
            "max_tokens",
            code,
        )
    return room


def stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a request on the device. Raises BadRequest if there are more than a slot holds."""
    eos = () if params.ignore_eos else tuple(eos_token_ids)
    ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(ids) > MAX_STOP_IDS:
        raise BadRequest(
            f"stop_token_ids has {len(params.stop_token_ids)} ids; beside the model's {len(eos)} EOS ids "
            f"{MAX_STOP_IDS - len(eos)} fit. Give fewer.",
            "stop_token_ids",
        )
    return ids


class PromptScores:
    """A prompt's log-probabilities: its first sequence brings them, all its sequences report them.

    wanted: likely tokens that the answer's prompt_logprobs have at each position; None for no prompt_logprobs.
    """

    def __init__(self, wanted: int | None) -> None:
        self.wanted = wanted
        self._given: list[TokenLogprobs] | None = None
        self._known = asyncio.Event()

    def put(self, given: list[TokenLogprobs] | None) -> None:
        """What the first sequence's first delta has."""
        self._given = given
        self._known.set()

    async def get(self) -> list[TokenLogprobs]:
        """Wait for them: a first sequence that fails ends the others too. Raises ApiError if the engine gave none."""
        await self._known.wait()
        if self._given is None:
            raise ApiError(500, "The engine gave no log-probabilities of the prompt.", "server_error")
        return self._given


class Generation:
    """One sequence's way through the engine. ``usage`` and ``seed`` may be read at any time.

    ``prompt_logprobs`` are there when it has ended, None where the request asked for none. Of a prompt's several
    sequences the first one's usage counts the prompt.
    """

    def __init__(
        self,
        frontend: Frontend,
        request: EngineRequest,
        index: int,
        echo: Echo | None = None,
        scores: PromptScores | None = None,
    ) -> None:
        assert request.params.seed is not None
        self.index = index
        self.seed: int = request.params.seed
        self._frontend = frontend
        self._request = request
        self._timer: RequestTimer = frontend.metrics.timer()
        self._stream: TokenStream | None = None
        self._cached = 0
        self._num_tokens = 0
        self._drafted = self._accepted = 0
        self._offset = 0
        self._echo = echo
        self._scores = scores
        self.prompt_logprobs: PromptLogprobs | None = None
        self._returned = Returned()

    def hidden_states(self) -> tuple[HiddenStates, HiddenStates | None] | None:
        """Once it has ended, what :func:`unisono.server.hidden.lists` has; None where the request asked for none."""
        return lists(self._returned, self._num_tokens) if self._request.params.return_hidden_states else None

    @property
    def usage(self) -> Usage:
        counts = self._num_tokens, self._cached, self._accepted, self._drafted - self._accepted
        first = self._request.shares_with is None
        return Usage.of(len(self._request.prompt_token_ids) if first else 0, *counts)

    async def start(self) -> None:
        """Hand the request to the engine. Raises BadRequest if it refuses, EngineDead if it is dead."""
        self._stream = await self._frontend.client.submit(self._request)

    def close(self) -> None:
        """Abort it if it runs."""
        if self._stream is not None:
            self._stream.close()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Text as it becomes certain; the last piece has ``finish``. Raises EngineDead, or ApiError if it failed."""
        assert self._stream is not None
        detokenizer = self._detokenizer()
        reason = FinishReason.ABORT
        try:
            finish: str | None = None
            while finish is None:
                delta = await self._stream.take()
                self._timer.tokens(len(delta.token_ids))
                if self._request.shares_with is None:
                    self._cached = max(self._cached, delta.cached_tokens)
                self._returned.take(delta)
                if delta.error is not None:
                    raise ApiError(500, f"The engine failed on this request: {delta.error}", "server_error")
                scores = await self._prompt_scores(delta)
                if self._echo is not None:
                    piece = self._prompt_piece(self._echo, scores)
                    self._echo = None
                    reason = FinishReason.RUNNING if piece.finish is None else FinishReason.LENGTH
                    yield piece
                    if piece.finish is not None:
                        return
                text, stop, ids = "", None, delta.token_ids
                if detokenizer is not None:
                    text, stop = detokenizer.feed(ids, delta.finish), detokenizer.stop_string
                    ids = ids[: detokenizer.num_tokens - self._num_tokens]  # none behind a stop string
                self._num_tokens += len(ids)
                self._drafted += delta.drafted_tokens
                self._accepted += min(delta.accepted_tokens, len(ids))
                reports = None if delta.logprobs is None else self._reports(ids, delta.logprobs)
                reason = FinishReason.STOP if stop is not None else delta.finish
                finish = None if reason is FinishReason.RUNNING else reason.text
                yield Piece(self.index, text, ids, finish, stop, reports)
        finally:
            self._timer.finished((FinishReason.ABORT if reason is FinishReason.RUNNING else reason).text)
            self.close()

    async def _prompt_scores(self, delta: TokenDelta) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities with the first delta that comes; None with others, and if none are wanted."""
        shared = self._scores
        if shared is None:
            return None
        self._scores = None
        if self._request.shares_with is None:
            shared.put(delta.prompt_logprobs)
        scores = await shared.get()
        if shared.wanted is not None:
            ids, first = self._request.prompt_token_ids, self._request.first_scored
            pairs = zip(ids[first:], scores, strict=True)
            named = [score.named(token, self._decoded, shared.wanted) for token, score in pairs]
            self.prompt_logprobs = finite([*[None] * len(ids[:first]), *named])
        return scores

    def _prompt_piece(self, echo: Echo, scores: list[TokenLogprobs] | None) -> Piece:
        """The piece before the first token's."""
        reports, most = None, self._request.params.logprobs
        if scores is not None and most is not None:
            ids = self._request.prompt_token_ids
            reports = [TokenReport(self._text(ids[0]), None, 0, [])]
            self._offset = len(reports[0].text)
            reports += self._reports(ids[1:], [replace(score, top=score.top[:most]) for score in scores])
        return Piece(self.index, echo.text, [], FinishReason.LENGTH.text if echo.alone else None, None, reports)

    def _reports(self, token_ids: list[int], given: list[TokenLogprobs]) -> list[TokenReport]:
        reports = []
        for token_id, one in zip(token_ids, given, strict=False):  # there may be more behind a stop string
            text = self._text(token_id)
            top = [(self._text(alternative), logprob) for alternative, logprob in one.top]
            reports.append(TokenReport(text, one.logprob, self._offset, top))
            self._offset += len(text)
        return reports

    def _text(self, token_id: int) -> str:
        """A token by itself; its id where there is no tokenizer to name it, in vLLM's form."""
        text = self._decoded(token_id)
        return f"token_id:{token_id}" if text is None else text

    def _decoded(self, token_id: int) -> str | None:
        tokenizer = self._frontend.tokenizer
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    def _detokenizer(self) -> Detokenizer | None:
        tokenizer = self._frontend.tokenizer
        if tokenizer is None:
            return None
        return Detokenizer.of(tokenizer, self._request)


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


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[Piece]:
    """Pieces of all generations as they come. The first error ends all."""
    if len(generations) == 1:
        async with aclosing(generations[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
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


async def _pump(generation: Generation, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async for piece in generation.pieces():
            queue.put_nowait(piece)
    except Exception as error:
        queue.put_nowait(error)
