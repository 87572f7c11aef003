"""Request bodies to generations: reads the API's fields and has ``frontend`` prepare the engine's requests.

:class:`Serving` is made once. Chat templates, long prompts and embeddings are prepared in threads (``preparation``), so
that none delays other requests' tokens; chat templates of requests have threads and processes of their own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from unisono.cluster.engines import Engines
from unisono.frontend.beam_search import BeamSearch, check_beams, check_length_penalty, check_ranking
from unisono.frontend.input_processor import InputProcessor, PreparedPrompt, combined_salt
from unisono.frontend.sequence_output import SequenceOutput
from unisono.http.answers.beams import BeamClient, Source
from unisono.http.answers.generation import Echo, Generation, Style
from unisono.http.limits.overload import Ticket
from unisono.http.media_queue import MediaQueue
from unisono.http.observability.metrics import ServerMetrics
from unisono.http.openai.chat import ChatFormat, ChatPlan
from unisono.http.openai.embeds import get_ready, load_embeds
from unisono.http.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from unisono.http.preparation import Preparers
from unisono.media.fetching.sources import LoadedMedia, MediaSource
from unisono.text.answer_parser import AnswerParser
from unisono.types import MAX_LOGPROBS, BadRequest, EngineRequest, SamplingParams, part_id
from unisono.types.errors import FieldPath

T = TypeVar("T")

MAX_TOKENS = FieldPath("max_tokens")
COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of ``/v1/completions``: OpenAI's."""
LONG = 1024
"""Characters of a prompt from which on a thread prepares it; shorter ones take the event loop less than half a
millisecond.
"""
SWITCH_SECONDS = 0.001
"""Python's switch interval, seconds: longest time that the event loop keeps the GIL while a thread waits for it.

Python's default is 5 ms, which a short chat's thread would wait for several times.
"""
WAITING = 4096
"""Requests that may wait for a thread; their bodies count towards ``max_waiting_bytes``."""
TEMPLATE_THREADS, TEMPLATES_WAITING = 2, 32
"""Chat templates of requests that are rendered at once, and that may wait."""
MAX_REPORTED_NUMBERS = 1 << 24
"""Numbers of hidden states, or expert ids, in an answer to one prompt: hidden states are about 200 MB of JSON."""


class Serving:
    """Makes generations of parsed request bodies."""

    def __init__(
        self,
        client: Engines,
        inputs: InputProcessor,
        metrics: ServerMetrics,
        chat: ChatFormat | None = None,
        trust_templates: bool = False,
        adapters: Collection[str] = (),
    ) -> None:
        """trust_templates: bodies may have a chat template. adapters: names of the loaded ones."""
        self.inputs, self._format, self._trust_templates = inputs, chat or ChatFormat(), trust_templates
        self._client, self._adapters = client, adapters
        if inputs.model.prompt_embeds:
            get_ready()
        self._metrics = metrics
        sys.setswitchinterval(SWITCH_SECONDS)
        self._long, self._short = Preparers("long prompts", 1, WAITING), Preparers("chats", 2, WAITING)
        self._templates = Preparers("chat templates of requests", TEMPLATE_THREADS, TEMPLATES_WAITING)
        self._media = MediaQueue(inputs.media)

    async def completion(
        self,
        request: CompletionRequest,
        request_id: str,
        media: Sequence[list[MediaSource]] = (),
        ticket: Ticket | None = None,
        pooled: bool = False,
    ) -> list[Generation]:
        """Make a generation for each sequence of each prompt.

        Raises BadRequest.

        media: the images and videos of each prompt, or empty. ticket: of the HTTP request. pooled: the answer is made
        from the hidden states and does not contain them.
        """
        limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        prompt_only = bool(request.echo) and limit == 0  # the engine generates a token all the same
        params = request.sampling_params(self.inputs.model.generation_defaults, 1 if prompt_only else limit)
        if request.echo and params.logprobs is not None:
            params = _scoring_echo(params)
        params = _choosing(params, request.sequences())
        generations: list[Generation] = []
        items = [await self._media.load(self.inputs.with_settings(sources), ticket) for sources in media]
        for number, prompt in enumerate(await self._prompts(request, items)):
            prompt = self.inputs.truncated(prompt, params, pooled or prompt_only)
            own, only = part_id(request_id, number), pooled or prompt_only
            one = self._request(own, prompt, params, request, pooled, only)
            echo = self._echo(prompt, params, prompt_only) if request.echo else None
            generations += self._generations(one, request, len(generations), echo)
        return generations

    async def chat(self, request: ChatRequest, request_id: str, ticket: Ticket | None = None) -> list[Generation]:
        """Make a generation for each answer to a conversation. ticket: of the HTTP request. Raises BadRequest."""
        params = request.sampling_params(self.inputs.model.generation_defaults, request.token_limit())
        plan, written = await self._planned(request, params, ticket)
        prompt = self.inputs.truncated(written, params)
        one = self._request(request_id, prompt, plan.sampling(written), request)
        generations = self._generations(
            one, request, echo=_begun(request), answer_parser=lambda sequence: plan.answer_parser(sequence, written)
        )
        for generation in generations:
            generation.prompt_text = written.text
        return generations

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text. Raises BadRequest for one that is too long, and where there is no tokenizer."""
        return await self._prepared(len(text), self.inputs.encode_any, text, "prompt", add_special_tokens)

    async def chat_prompt(self, request: ChatRequest, ticket: Ticket | None = None) -> PreparedPrompt:
        """The prompt of a conversation. ticket: of the HTTP request. Raises BadRequest."""
        params = request.sampling_params(self.inputs.model.generation_defaults, request.token_limit())
        return (await self._planned(request, params, ticket))[1]

    async def _planned(
        self, request: ChatRequest, params: SamplingParams, ticket: Ticket | None
    ) -> tuple[ChatPlan, PreparedPrompt]:
        """The plan of the answer, and the prompt."""
        conversation, options = request.conversation(), request.template_options()
        if request.chat_template is not None and not self._trust_templates:
            raise BadRequest(
                "chat_template is not taken by this server; start it with --trust-request-chat-template, or leave it "
                "out. chat_template_kwargs sets variables of the model's own template.",
                "chat_template",
            )
        options["add_special_tokens"] = bool(request.add_special_tokens)
        options["truncates"] = params.truncate_prompt_tokens is not None
        options["template_kwargs"] = {**self._format.variables, **options["template_kwargs"]}
        plan = self._format.plan(request, params)
        options["media"] = await self._media.load(self.inputs.with_settings(request.media()), ticket)
        size = LONG if plan.tools or options["media"] else sum(len(str(one.get("content"))) for one in conversation)

        def write() -> PreparedPrompt:
            return self.inputs.chat(conversation, plan.tools, **options)

        label, threads = "" if ticket is None else ticket.client.label, self._short if size < LONG else self._long
        if request.chat_template is not None:
            threads = self._templates
            if ticket is not None:
                ticket.step_aside()  # other requests are prepared meanwhile
        return plan, await threads.run(label, write)

    def _request(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        body: GenerationRequest,
        pooled: bool = False,
        prompt_only: bool = False,
    ) -> EngineRequest:
        """Prepare the engine's request for a prompt. Raises BadRequest."""
        prompt = replace(prompt, cache_salt=combined_salt(body.cache_salt, body.extra_key))
        if body.use_beam_search:
            check_beams(params, self.inputs.model.max_logprobs, self.inputs.model.logprobs_mode)
            check_length_penalty(1.0 if body.length_penalty is None else body.length_penalty)
        elif body.length_penalty not in (None, 1):
            raise BadRequest(
                f"length_penalty={body.length_penalty} weighs beams; set use_beam_search, or leave it out.",
                "length_penalty",
            )
        if body.sequences() > (body.n or 1):
            check_ranking("best_of", self.inputs.model.logprobs_mode)
        logprobs_field = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        params = self._within_limits(prompt, params, pooled)
        request = self.inputs.request(request_id, prompt, params, body.priority or 0, logprobs_field, prompt_only)
        return replace(request, adapter=body.model if body.model in self._adapters else None)

    async def _prompts(
        self, request: CompletionRequest, media: Sequence[list[LoadedMedia]] = ()
    ) -> list[PreparedPrompt]:
        """The prompts in the order of their choices: embeddings first, as in vLLM.

        Raises BadRequest.

        media: the items of each prompt, or empty.
        """
        request.check_embeds(self.inputs.model.prompt_embeds)
        request.check_suffix()
        written = request.prompts()
        mapping: list[dict[str, Any]] = [{"prompt_embeds": text} for text in request.embeds()]
        mapping += [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in written]
        if request.embedding_overrides is not None:  # then there is one prompt
            mapping[0]["embedding_overrides"] = request.embedding_overrides
        items = media or [[] for _ in mapping]
        return [
            self.inputs.prompt(one)
            if one.keys() == {"prompt_token_ids"} and not request.suffix and not loaded
            else await self._prepared(
                LONG if loaded or one.keys() != {"prompt"} else len(one["prompt"]), self._load, one, request, loaded
            )
            for one, loaded in zip(mapping, items, strict=True)
        ]

    def _load(
        self, mapping: dict[str, Any], request: CompletionRequest, media: Sequence[LoadedMedia]
    ) -> PreparedPrompt:
        """Prepare a prompt, with the body's encoded embeddings decoded to tensors."""
        sizes = self.inputs.model.max_model_len, self.inputs.model.hidden_size
        if (whole := mapping.get("prompt_embeds")) is not None:
            mapping["prompt_embeds"] = load_embeds(whole, *sizes, "prompt_embeds")
        if (some := mapping.get("embedding_overrides")) is not None:
            mapping["embedding_overrides"] = some.positions, load_embeds(some.embeddings, *sizes, "embedding_overrides")
        return self.inputs.prompt(
            mapping,
            add_special_tokens=request.add_special_tokens is not False,
            suffix=request.suffix,
            truncates=request.truncate_prompt_tokens is not None,
            media=media,
        )

    async def _prepared(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` on a prompt of ``size`` characters: a short one directly, a long one in a thread.

        ``work`` must not wait for a process, as chat templates do.
        """
        return work(*args) if size < LONG else await self._long.run("", work, *args)

    def _echo(self, prompt: PreparedPrompt, params: SamplingParams, alone: bool) -> Echo:
        if prompt.overrides is not None:
            raise BadRequest("echo repeats the prompt, and overridden tokens have no text; leave out echo.", "echo")
        if prompt.text is not None:
            return Echo(prompt.text, alone)
        tokenizer = self.inputs.require_tokenizer("echo")
        spaces = params.spaces_between_special_tokens
        return Echo(tokenizer.decode(prompt.token_ids, params.skip_special_tokens, spaces), alone)

    def _within_limits(self, prompt: PreparedPrompt, params: SamplingParams, pooled: bool) -> SamplingParams:
        """``params`` with max_tokens set. Raises BadRequest beyond this server's limits."""
        model, length = self.inputs.model, len(prompt.token_ids)
        params = with_max_tokens(params, length, model.max_model_len)
        for name, enabled, size in (
            ("return_hidden_states", pooled or model.return_hidden_states, model.hidden_size),
            ("return_routed_experts", model.return_routed_experts, model.routed_experts),
        ):
            if getattr(params, name):
                unreported = params.routed_experts_prompt_start if name == "return_routed_experts" else 0
                check_reported(name, enabled, size, length - min(unreported, length), params)
        return params

    def _generations(
        self,
        request: EngineRequest,
        body: GenerationRequest,
        first: int = 0,
        echo: Echo | None = None,
        answer_parser: Callable[[EngineRequest], AnswerParser | None] = lambda sequence: None,
    ) -> list[Generation]:
        """Make a generation of each sequence of a prepared request.

        first: number of the first one's choice. echo: the text at the beginning of the answers. answer_parser: makes
        the parser of an answer.
        """
        logprobs_field = request.params.prompt_logprobs is not None
        scores = asyncio.get_running_loop().create_future() if logprobs_field else None
        outputs = [SequenceOutput(sequence, self.inputs.tokenizer) for sequence in request.sequences()]
        client: Source = self._client
        if body.use_beam_search:
            penalty = 1.0 if body.length_penalty is None else body.length_penalty
            client = BeamClient(self._client, BeamSearch(request, penalty), len(outputs))
        style = Style(
            scored=body.prompt_logprobs,
            reports=body.alternatives() is not None,
            ids=bool(body.return_tokens_as_token_ids),
            drafts=bool(body.return_drafts),
            offsets=not isinstance(body, ChatRequest),
            hides=isinstance(body, ChatRequest) and body.include_reasoning is False,
        )
        return [
            Generation(
                client,
                output,
                self._metrics.timer(output.request, request.params.n),
                index,
                scores,
                style,
                echo,
                answer_parser(output.request),
            )
            for index, output in enumerate(outputs, first)
        ]


def _begun(request: ChatRequest) -> Echo | None:
    """The assistant's message that an answer continues, if it is to be repeated."""
    options, last = request.template_options(), request.conversation()[-1]
    if not request.echo or options["add_generation_prompt"] or last.get("role") != "assistant":
        return None
    return Echo(last.get("content") or "", False)


def _scoring_echo(params: SamplingParams) -> SamplingParams:
    """``params`` with the log-probabilities of an echoed prompt. Raises BadRequest."""
    assert params.logprobs is not None
    if params.logprob_start_len > 1:
        raise BadRequest(
            f"logprob_start_len={params.logprob_start_len} leaves out what echo with logprobs reports; leave "
            "out one of them.",
            "logprob_start_len",
        )
    if not 0 <= params.logprobs <= MAX_LOGPROBS or params.logprob_token_ids is not None:
        raise BadRequest(
            f"echo with logprobs reports {MAX_LOGPROBS} of each prompt token's likeliest alternatives at most; leave "
            "out echo, or ask for fewer.",
            "logprobs",
        )
    return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))


def _choosing(params: SamplingParams, sequences: int) -> SamplingParams:
    """``params`` for the sequences that an answer is chosen from, by their log-probabilities."""
    if sequences == params.n:
        return params
    return replace(params, n=sequences, logprobs=params.logprobs or 0)


def with_max_tokens(params: SamplingParams, prompt: int, context: int) -> SamplingParams:
    """``params`` with max_tokens: by default the context's rest after ``prompt`` tokens.

    Raises BadRequest for more than that. :meth:`InputProcessor.request` refuses a prompt that leaves nothing.
    """
    room, max_tokens = context - prompt, params.max_tokens
    if max_tokens is None and room > 0:
        return replace(params, max_tokens=room)
    if max_tokens is not None and max_tokens > room > 0:
        raise BadRequest(
            (
                f"The prompt has {prompt} tokens and ",
                MAX_TOKENS,
                f" is {max_tokens}, together {prompt + max_tokens}; the model's context is {context} tokens. Ask for "
                f"at most {room} tokens or shorten the prompt.",
            ),
            MAX_TOKENS,
            "context_length_exceeded",
        )
    return params


def check_reported(name: str, enabled: bool, size: int, prompt: int, params: SamplingParams) -> None:
    """Raise BadRequest if this server does not honour field ``name``, or only for fewer than ``prompt`` tokens.

    size: numbers that it reports of a token.
    """
    tokens = prompt + params.n * (params.max_tokens or 0)
    if not enabled:
        raise BadRequest(
            f"{name} is not honoured by this server; start it with --enable-{name.replace('_', '-')}, or leave it out.",
            name,
        )
    if tokens * size > MAX_REPORTED_NUMBERS:
        raise BadRequest(
            (
                FieldPath(name),
                f": {prompt} prompt tokens with ",
                MAX_TOKENS,
                f"={params.max_tokens} and n={params.n} may have {tokens * size} numbers; at most "
                f"{MAX_REPORTED_NUMBERS} are sent. Lower ",
                MAX_TOKENS,
                " or n, shorten the prompt, or report less of it.",
            ),
            name,
        )
