"""OpenAI's response objects and server-sent events.

A choice has more fields than OpenAI's: ``seed``, which reproduces it (in a stream, with the choice's first chunk);
``stop_reason`` (the stop string that ended it, or null); with return_token_ids ``token_ids`` and ``prompt_token_ids``
(of the answer if all choices have one prompt); ``reasoning_content`` and ``reasoning`` of its message if reasoning is
separated from content; in streams with return_drafts ``draft``; with return_hidden_states ``hidden_states``, and with
the first choice of each prompt ``prompt_hidden_states``; with return_routed_experts ``routed_experts`` and
``prompt_routed_experts`` in the same way, base64 of a NumPy file with ids [tokens, MoE layers, top_k].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from unisono.text.tool_parsers.base import ToolDelta
from unisono.types import Logprob
from unisono.types.acceptance import RequestAcceptance
from unisono.types.expert_ids import ExpertIds

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def encoded(ids: ExpertIds) -> str:
    """Expert ids as base64 of a NumPy file, as vLLM sends them."""
    file = io.BytesIO()
    np.save(file, ids.array(), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Accepted and rejected draft tokens, and reasoning tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts. ``completion_tokens`` ends with the text: a stop token counts, later tokens do not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(
        cls, prompt: int, completion: int, cached: int, accepted: int = 0, rejected: int = 0, reasoning: int = 0
    ) -> Usage:
        details = PromptDetails(cached), CompletionDetails(accepted, rejected, reasoning)
        return cls(prompt, completion, prompt + completion, *details)

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """The sum over an answer's choices."""
        parts = [
            (u.prompt_tokens, u.completion_tokens, u.prompt_tokens_details.cached_tokens,
             u.completion_tokens_details.accepted_prediction_tokens,
             u.completion_tokens_details.rejected_prediction_tokens, u.completion_tokens_details.reasoning_tokens)
            for u in usages
        ]  # fmt: skip
        return cls.of(*map(sum, zip(*parts, strict=True)))


@dataclass(frozen=True)
class TokenReport:
    """One token of an answer, with the likeliest tokens at its position.

    text: of the token by itself. logprob: None for a prompt's first token. offset: characters of the answer before the
    token. top, top_ids: the likeliest tokens' texts with log-probabilities, and ids. data, top_data: the bytes of the
    tokens; None if only their names are known.
    """

    text: str
    logprob: float | None
    offset: int
    top: list[tuple[str, float]]
    top_ids: Sequence[int] = ()
    data: bytes | None = None
    top_data: Sequence[bytes | None] = ()

    def alternatives(self) -> list[Alternative]:
        """The token's own entry, then those of the likeliest tokens."""
        assert self.logprob is not None
        own = Alternative.of(self.text, self.logprob, self.data)
        pairs = zip(self.top, self.top_data or [None] * len(self.top), strict=True)
        return [own, *(Alternative.of(text, logprob, data) for (text, logprob), data in pairs)]


LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; vLLM's number."""


Data = bytes  # the next class has a field of the same name


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, text: str, logprob: float, data: Data | None = None) -> Alternative:
        return cls(text, max(logprob, LEAST_LOGPROB), list(text.encode() if data is None else data))


class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


PromptLogprobs = list[dict[int, Logprob] | None]
"""vLLM's form: for each prompt token its own log-probability and the likeliest ones', by id; null for the first."""


def finite(values: PromptLogprobs) -> PromptLogprobs:
    """``values`` without minus infinity, which JSON lacks."""
    for entries in values:
        for entry in (entries or {}).values():
            entry.logprob = max(entry.logprob, LEAST_LOGPROB)
    return values


HiddenStates = list[Raw]
"""The final hidden state (the LM head's input) of each generated token but the last, or of each prompt token."""


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """``top_logprobs`` has each token's own beside the likeliest ones'."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenOrigin(msgspec.Struct):
    """The origin of the one token of a chunk.

    position: its index among the drafts of its round, from 0 on; null for a token that the model sampled itself.
    drafted, accepted: numbers of drafted and accepted tokens of the round.
    """

    position: int | None
    drafted: int
    accepted: int


class Function(msgspec.Struct):
    """The function of a call. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New text of a call. id, type and the function's name come with its first delta only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Message(msgspec.Struct, kw_only=True):
    """content: null if the answer has only tool calls. reasoning: equal to reasoning_content."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str
    stop_reason: str | None
    seed: int
    token_ids: list[int] | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    hidden_states: HiddenStates | UnsetType = UNSET
    prompt_hidden_states: HiddenStates | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    prompt_routed_experts: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: MessageDelta
    finish_reason: str | None = None
    stop_reason: str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    draft: TokenOrigin | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None


class TextChoice(msgspec.Struct):
    """A choice of ``/v1/completions``, complete or a chunk of it."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    draft: TokenOrigin | UnsetType = UNSET
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET
    prompt_hidden_states: HiddenStates | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    prompt_routed_experts: str | UnsetType = UNSET


class AnswerMetrics(msgspec.Struct):
    """vLLM's metrics of an answer."""

    speculative_decoding: RequestAcceptance | None


class Response(msgspec.Struct):
    """A complete answer or a chunk of a stream; ``object`` names the type.

    ``usage`` is null in the chunks of a stream with include_usage, and absent in other streams. ``metrics`` is in a
    whole answer and in the chunk with the usage, if the server reports acceptance.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # for completions it is in the choices
    prompt_token_ids: list[int] | UnsetType = UNSET  # likewise
    prompt_text: str | UnsetType | None = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


def joined(deltas: Iterable[ToolDelta]) -> list[ToolCall]:
    """Merge deltas into calls."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(id=delta.id, function=Function(delta.name, "")))
        calls[-1].function.arguments += delta.arguments
    return calls


class ResponseShape(Protocol):
    """The response objects of one endpoint: a finished choice, and the chunks of a stream of them.

    ``open`` makes the choices of the first token: it takes those with its text, reasoning or reports, which may be
    empty.
    """

    id_prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, text: str, finish: str, stop: str | None, seed: int) -> Any: ...
    def open(self, index: int, seed: int, first: list[Any]) -> list[Any]: ...
    def text(self, index: int, text: str) -> Any: ...
    def reasoning(self, index: int, text: str) -> Any: ...
    def tool_call(self, index: int, delta: ToolDelta) -> Any: ...
    def last(self, index: int, finish: str, stop: str | None) -> Any: ...
    def logprobs(self, reports: list[TokenReport]) -> Any: ...
    def add_prompt_logprobs(self, answer: Response, values: list[PromptLogprobs]) -> None: ...
    def add_prompts(self, answer: Response, values: list[list[int]]) -> None: ...


class ChatShape:
    """``/v1/chat/completions``."""

    id_prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str, stop: str | None, seed: int) -> ChatChoice:
        return ChatChoice(index, Message(content=text), finish, stop, seed)

    def open(self, index: int, seed: int, first: list[ChatChunkChoice]) -> list[ChatChunkChoice]:
        """Put the role before the first token's choices, in a chunk of its own as in OpenAI's streams."""
        return [ChatChunkChoice(index, MessageDelta(role="assistant", content=""), seed=seed), *first]

    def text(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, MessageDelta(content=text))

    def reasoning(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, MessageDelta(reasoning_content=text, reasoning=text))

    def tool_call(self, index: int, delta: ToolDelta) -> ChatChunkChoice:
        function = FunctionDelta(arguments=delta.arguments)
        call = ToolCallDelta(index=delta.index, function=function)
        if delta.name is not None and delta.id is not None:
            call.id, call.type, function.name = delta.id, "function", delta.name
        return ChatChunkChoice(index, MessageDelta(tool_calls=[call]))

    def last(self, index: int, finish: str, stop: str | None) -> ChatChunkChoice:
        return ChatChunkChoice(index, MessageDelta(), finish, stop)

    def logprobs(self, reports: list[TokenReport]) -> ChatLogprobs:
        content = []
        for report in reports:
            own, *top = report.alternatives()  # chat answers do not begin with the prompt
            content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
        return ChatLogprobs(content)

    def add_prompt_logprobs(self, answer: Response, values: list[PromptLogprobs]) -> None:
        """All choices have one prompt, so the answer has its log-probabilities."""
        answer.prompt_logprobs = values[0]

    def add_prompts(self, answer: Response, values: list[list[int]]) -> None:
        """All choices have one prompt, so the answer has its token ids."""
        answer.prompt_token_ids = values[0]


class TextShape:
    """``/v1/completions``."""

    id_prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, finish: str, stop: str | None, seed: int) -> TextChoice:
        return TextChoice(index, text, finish, stop, seed)

    def open(self, index: int, seed: int, first: list[TextChoice]) -> list[TextChoice]:
        """Add the seed to the first token's choice, even if its text is not certain yet."""
        first = first or [TextChoice(index, "")]
        first[0].seed = seed
        return first

    def text(self, index: int, text: str) -> TextChoice:
        return TextChoice(index, text)

    def reasoning(self, index: int, text: str) -> TextChoice:
        raise NotImplementedError("completions are not split")

    def tool_call(self, index: int, delta: ToolDelta) -> TextChoice:
        raise NotImplementedError("completions call no tools")

    def last(self, index: int, finish: str, stop: str | None) -> TextChoice:
        return TextChoice(index, "", finish, stop)

    def logprobs(self, reports: list[TokenReport]) -> TextLogprobs:
        names, offsets = [r.text for r in reports], [r.offset for r in reports]
        own = [None if r.logprob is None else max(r.logprob, LEAST_LOGPROB) for r in reports]
        tops: list[dict[str, float] | None] = []
        for r in reports:
            pairs = [] if r.logprob is None else [(r.text, r.logprob), *r.top]
            tops.append({text: max(logprob, LEAST_LOGPROB) for text, logprob in pairs} or None)
        return TextLogprobs(names, own, tops, offsets)

    def add_prompt_logprobs(self, answer: Response, values: list[PromptLogprobs]) -> None:
        """Each choice has the log-probabilities of its prompt."""
        for choice, one in zip(answer.choices, values, strict=True):
            assert isinstance(choice, TextChoice)
            choice.prompt_logprobs = one

    def add_prompts(self, answer: Response, values: list[list[int]]) -> None:
        """Each choice has the token ids of its prompt."""
        for choice, one in zip(answer.choices, values, strict=True):
            assert isinstance(choice, TextChoice)
            choice.prompt_token_ids = one


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "unisono"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
