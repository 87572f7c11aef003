"""OpenAI's request bodies, checked field by field, with vLLM's extra sampling fields.

Every field is honoured, a label, or refused, see ``compatibility.py``. An unknown field is an error with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from unisono.http.errors import show
from unisono.http.limits.fields import MAX_PROMPTS, Documents, Strings, TokenIdLists, TokenIds, validated
from unisono.http.openai.compatibility import CHAT, TEXT, check_fields
from unisono.http.openai.messages import Message, conversation
from unisono.http.openai.structured_outputs import GUIDED, structured_outputs
from unisono.http.request_body import load_object
from unisono.media.fetching.sources import MediaSource
from unisono.media.parts import with_request
from unisono.types import MAX_SEQUENCES, BadRequest, SamplingParams
from unisono.types.unknown_fields import known_part

_WHOLE = "a whole number"
_NUMBER = "a number"
_BOOL = "true or false"
_TEXT = "a string"


SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "logprob_start_len",
    "logprob_token_ids", "return_hidden_states", "return_routed_experts", "routed_experts_prompt_start",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "n", "stop_regex", "truncate_prompt_tokens", "truncation_side",
)  # fmt: skip
"""Fields of a body that are those of SamplingParams."""
STRUCTURED_FIELDS = ("response_format", "structured_outputs", *GUIDED)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculative(BaseModel):
    """Speculation settings of one request. They change when tokens come, never which."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = None
    num_speculative_tokens: int | None = None

    def max_drafts(self) -> int | None:
        return 0 if self.enabled is False else self.num_speculative_tokens


class EmbeddingOverrides(BaseModel):
    """Embeddings in place of those of some of the prompt's tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    positions: TokenIds
    embeddings: str


class GenerationRequest(BaseModel):
    """The common fields of both endpoints. A description is the rule in errors."""

    model_config = ConfigDict(strict=True, extra="forbid")
    body: ClassVar[str]
    """Name of the body in ``compatibility.py``."""

    model: str | None = Field(None, description="the name of a served model")
    stream: bool | None = Field(None, description=_BOOL)
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage and continuous_usage_stats (true or false)"
    )
    max_tokens: int | None = Field(None, description=_WHOLE)
    temperature: float | None = Field(None, description=_NUMBER)
    top_p: float | None = Field(None, description=_NUMBER)
    top_k: int | None = Field(None, description=_WHOLE)
    min_p: float | None = Field(None, description=_NUMBER)
    n: int | None = Field(None, description=_WHOLE)
    seed: int | None = Field(None, description=_WHOLE)
    stop: str | Strings | None = Field(None, description="a string or a list of strings")
    stop_token_ids: TokenIds | None = Field(None, description="a list of token ids")
    include_stop_str_in_output: bool | None = Field(None, description=_BOOL)
    ignore_eos: bool | None = Field(None, description=_BOOL)
    min_tokens: int | None = Field(None, description=_WHOLE)
    presence_penalty: float | None = Field(None, description=_NUMBER)
    frequency_penalty: float | None = Field(None, description=_NUMBER)
    repetition_penalty: float | None = Field(None, description=_NUMBER)
    logit_bias: dict[str, float] | None = Field(None, description="an object from token ids to numbers")
    allowed_token_ids: TokenIds | None = Field(None, description="a list of token ids")
    bad_words: Strings | None = Field(None, description="a list of strings")
    stop_regex: str | Strings | None = Field(None, description="an expression or a list of expressions")
    no_stop_trim: bool | None = Field(None, description=_BOOL)
    use_beam_search: bool | None = Field(None, description=_BOOL)
    length_penalty: float | None = Field(None, description=_NUMBER)
    add_special_tokens: bool | None = Field(None, description=_BOOL)
    truncate_prompt_tokens: int | None = Field(None, description=_WHOLE)
    truncation_side: Literal["left", "right"] | None = Field(None, description='"left" or "right"')
    priority: int | None = Field(None, description=_WHOLE)
    cache_salt: str | None = Field(None, description=_TEXT)
    extra_key: str | None = Field(None, description=_TEXT)
    request_id: str | None = Field(None, description=_TEXT)
    rid: str | None = Field(None, description=_TEXT)
    vllm_xargs: dict[str, Any] | None = Field(None, description="an object of parameters of installed features")
    skip_special_tokens: bool | None = Field(None, description=_BOOL)
    spaces_between_special_tokens: bool | None = Field(None, description=_BOOL)
    detokenize: bool | None = Field(None, description=_BOOL)
    return_tokens_as_token_ids: bool | None = Field(None, description=_BOOL)
    return_prompt_token_ids: bool | None = Field(None, description=_BOOL)
    logprob_token_ids: TokenIds | None = Field(None, description="a list of token ids")
    echo: bool | None = Field(None, description=_BOOL)
    prompt_logprobs: int | None = Field(None, description=_WHOLE)
    logprob_start_len: int | None = Field(None, description=_WHOLE)
    return_hidden_states: bool | None = Field(None, description=_BOOL)
    return_routed_experts: bool | None = Field(None, description=_BOOL)
    routed_experts_prompt_start: int | None = Field(None, description=_WHOLE)
    routed_experts_start_len: int | None = Field(None, description=_WHOLE)
    return_token_ids: bool | None = Field(None, description=_BOOL)
    return_drafts: bool | None = Field(None, description=_BOOL)
    response_format: dict[str, Any] | None = Field(
        None, description="an object whose type is text, json_object, json_schema or structural_tag"
    )
    structured_outputs: dict[str, Any] | None = Field(None, description="an object that says what the answer must be")
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, description="a regular expression")
    guided_choice: Strings | None = Field(None, description="a list of strings")
    guided_grammar: str | None = Field(None, description="a grammar in EBNF or in Lark's notation")
    json_schema: dict[str, Any] | str | None = Field(None, description="a JSON schema")
    regex: str | None = Field(None, description="a regular expression")
    ebnf: str | None = Field(None, description="a grammar in EBNF or in Lark's notation")
    speculative: Speculative | None = Field(
        None, description="an object with enabled (true or false) and num_speculative_tokens (a whole number)"
    )

    def sampling_params(self, defaults: Mapping[str, float], max_tokens: int | None) -> SamplingParams:
        """The request's parameters; ``defaults`` (the checkpoint's) replace absent ones. Raises BadRequest."""
        fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        trimmed = fields.setdefault("include_stop_str_in_output", bool(self.no_stop_trim))
        if self.no_stop_trim is not None and trimmed != self.no_stop_trim:
            raise BadRequest("include_stop_str_in_output and no_stop_trim differ; give one of them.", "no_stop_trim")
        if self.routed_experts_start_len is not None:
            start = fields.setdefault("routed_experts_prompt_start", self.routed_experts_start_len)
            if start != self.routed_experts_start_len:
                raise BadRequest(
                    "routed_experts_prompt_start and routed_experts_start_len differ; give one of them.",
                    "routed_experts_start_len",
                )
        fields["extra_args"] = self.vllm_xargs or {}
        fields["logit_bias"] = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        fields |= {"seed": self.seed, "stop": stop, "max_tokens": max_tokens, "logprobs": self.alternatives()}
        fields["prompt_logprobs"] = self.prompt_logprobs
        fields["structured_outputs"] = structured_outputs({name: getattr(self, name) for name in STRUCTURED_FIELDS})
        fields["max_drafts"] = self.speculative.max_drafts() if self.speculative else None
        if self.logprob_token_ids is not None and fields["logprobs"] is None:
            raise BadRequest("logprob_token_ids needs logprobs; set it too.", "logprob_token_ids")
        return SamplingParams(**{**defaults, **fields})

    def sequences(self) -> int:
        """Number of generated sequences per prompt; the answer has n of them. Raises BadRequest."""
        return self.n or 1

    @property
    def tells_prompt(self) -> bool:
        """True if the answer has the prompt's text."""
        return False

    def alternatives(self) -> int | None:
        """Number of likely tokens to report per position; None for no log-probabilities. Raises BadRequest."""
        raise NotImplementedError

    def check_stream(self) -> None:
        """Raise BadRequest for stream_options without a stream, and for fields that streams do not support."""
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs come with whole answers only; leave out stream or prompt_logprobs.", "prompt_logprobs"
            )
        for name in ("return_hidden_states", "return_routed_experts"):
            if self.stream and getattr(self, name):
                raise BadRequest(
                    f"{name} is for whole answers only; leave out stream or {name}.",
                    name,
                )
        if self.return_drafts and not self.stream:
            raise BadRequest(
                "return_drafts marks the chunks of streams; set stream=true, or leave out return_drafts.",
                "return_drafts",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is set but stream is not; set stream=true or remove it.", "stream_options")


def _token_id(key: str) -> int:
    """A key of logit_bias, which JSON makes a string."""
    if not (key.isascii() and key.isdecimal() and len(key) < 20):
        raise BadRequest(
            f"logit_bias has the key {show(key)}; keys must be token ids, whole numbers ≥ 0.", "logit_bias"
        )
    return int(key)


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: str | Strings | TokenIds | TokenIdLists | None = Field(
        None, description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    prompt_embeds: str | Strings | None = Field(
        None, description="base64 of a tensor [tokens, hidden] that torch.save wrote, or a list of such strings"
    )
    embedding_overrides: EmbeddingOverrides | None = Field(
        None, description="an object with positions (a list) and embeddings (base64 of a tensor [positions, hidden])"
    )
    logprobs: int | None = Field(None, description=_WHOLE)

    best_of: int | None = Field(None, description=_WHOLE)
    suffix: str | None = Field(None, description=_TEXT)
    body: ClassVar[str] = TEXT

    def alternatives(self) -> int | None:
        return self.logprobs

    def sequences(self) -> int:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and not n <= best_of <= MAX_SEQUENCES:
            raise BadRequest(f"best_of={best_of} is out of range: it must be from n={n} to {MAX_SEQUENCES}.", "best_of")
        if best_of is not None and best_of > n and self.stream:
            raise BadRequest(
                f"best_of={best_of} above n={n} knows its answers at the end only; leave out stream or best_of.",
                "best_of",
            )
        for name in ("return_hidden_states", "return_routed_experts", "use_beam_search"):
            if best_of is not None and best_of > n and getattr(self, name):
                raise BadRequest(f"best_of={best_of} above n={n} does not go with {name}; leave out one of them.", name)
        return n if best_of is None else best_of

    def check_suffix(self) -> None:
        """Raise BadRequest for a suffix in an unsupported combination."""
        for name in ("prompt_embeds", "embedding_overrides", "echo"):
            if self.suffix and getattr(self, name):
                raise BadRequest(
                    f"suffix goes with prompts of text or token ids, not with {name}; leave out one.", name
                )

    def check_embeds(self, enabled: bool) -> None:
        """Raise BadRequest for embeddings if this server takes none, and for fields that need the prompt's text."""
        for name in ("prompt_embeds", "embedding_overrides"):
            if getattr(self, name) is not None and not enabled:
                raise BadRequest(
                    f"{name} are not taken by this server; start it with --enable-prompt-embeds, or leave them out.",
                    name,
                )
        if self.embeds() and self.echo:
            raise BadRequest("echo repeats the prompt, and prompt_embeds have no text; leave out echo.", "echo")
        if self.embedding_overrides is not None and (self.embeds() or len(self.prompts()) > 1):
            raise BadRequest(
                "embedding_overrides belong to one prompt, of text or token ids; send each in a request of its own.",
                "embedding_overrides",
            )

    def count(self) -> int:
        """Number of prompts. Raises BadRequest for none at all, too many, or an empty one."""
        return len(self.prompts()) + len(self.embeds())

    def embeds(self) -> Sequence[str]:
        """The prompts that are embeddings, encoded; they come before the others."""
        value = self.prompt_embeds
        return [value] if isinstance(value, str) else value or []

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts that are text or token ids. Raises BadRequest for none at all, too many, or an empty one."""
        if self.prompt_embeds and not self.prompt:  # OpenAI's clients must send some prompt
            prompts: list[str | list[int]] = []
        elif self.prompt is None:
            raise BadRequest(
                f"prompt is missing or null; it must be {self._rule('prompt')}.", "prompt", "missing_field"
            )
        else:
            prompts = self._written()
        count = len(prompts) + len(self.embeds())
        if count > MAX_PROMPTS:
            raise BadRequest(f"prompt has {count} entries, at most {MAX_PROMPTS} are taken; split it.", "prompt")
        each, name = self.sequences(), "n" if self.best_of is None else "best_of"
        if count * each > MAX_PROMPTS:
            raise BadRequest(
                f"{name}={each} for {count} prompts are {count * each} sequences; at most "
                f"{MAX_PROMPTS} are taken. Lower {name} or split the prompts.",
                name,
            )
        return prompts

    def _rule(self, name: str) -> str | None:
        return type(self).model_fields[name].description

    def _written(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            prompts: list[str | list[int]] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        else:
            prompts = list(self.prompt or ())  # type: ignore[arg-type]
        if not prompts or not all(prompts):
            raise BadRequest(f"prompt={show(self.prompt)} is empty; give at least one character or token.", "prompt")
        return prompts


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[Any] = Field(description="a list of messages, each with a role and a content")
    max_completion_tokens: int | None = Field(None, description=_WHOLE)
    add_generation_prompt: bool | None = Field(None, description=_BOOL)
    continue_final_message: bool | None = Field(None, description=_BOOL)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object of template variables")
    logprobs: bool | None = Field(None, description=_BOOL)
    top_logprobs: int | None = Field(None, description=_WHOLE)
    tools: list[Any] | None = Field(None, description="a list of tools, each an object with type and function")
    tool_choice: Any = Field(None, description="auto, none, required or an object that names a function")
    parallel_tool_calls: bool | None = Field(None, description=_BOOL)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="none, minimal, low, medium, high, xhigh or max"
    )
    enable_thinking: bool | None = Field(None, description=_BOOL)
    thinking_token_budget: int | None = Field(None, description=_WHOLE)
    documents: Documents | None = Field(None, description="a list of objects of strings")
    chat_template: str | None = Field(None, description=_TEXT)
    include_reasoning: bool | None = Field(None, description=_BOOL)
    separate_reasoning: bool | None = Field(None, description=_BOOL)
    return_prompt_text: bool | None = Field(None, description=_BOOL)
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="an object of settings for pictures")
    media_io_kwargs: dict[str, Any] | None = Field(None, description="an object with image and video, objects too")
    body: ClassVar[str] = CHAT

    @property
    def tells_prompt(self) -> bool:
        return bool(self.return_prompt_text)

    def alternatives(self) -> int | None:
        top = self.top_logprobs
        if top and not self.logprobs:
            raise BadRequest(f"top_logprobs={top} needs logprobs=true; set it, or remove top_logprobs.", "top_logprobs")
        if top is not None and top < -1:
            raise BadRequest(f"top_logprobs={top} is out of range: give a whole number ≥ -1.", "top_logprobs")
        return (top or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages in the form of chat templates. Raises BadRequest with the first bad one."""
        return self.read_conversation[0]

    def media(self) -> list[MediaSource]:
        """The conversation's images and videos, in order. Raises BadRequest with the first bad one."""
        return with_request(self.read_conversation[1], self.mm_processor_kwargs, self.media_io_kwargs)

    @cached_property
    def read_conversation(self) -> tuple[list[Message], list[MediaSource]]:
        """Messages and media of :meth:`conversation` and :meth:`media`, read once."""
        return conversation(self.messages)

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of ``Tokenizer.apply_chat_template``. Raises BadRequest for a contradiction."""
        proceed = bool(self.continue_final_message)
        if proceed and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them.",
                "continue_final_message",
            )
        generate = not proceed if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": generate,
            "continue_final_message": proceed,
            "template_kwargs": {**self._thinking_variables(), **(self.chat_template_kwargs or {})},
            "documents": self.documents,
            "chat_template": self.chat_template,
        }

    def _thinking_variables(self) -> dict[str, Any]:
        """Template variables that turn reasoning on or off and set its effort."""
        effort, enabled = self.reasoning_effort, self.enable_thinking
        if enabled is None and effort == "none":
            enabled = False
        fields = {"reasoning_effort": effort, "enable_thinking": enabled, "thinking": enabled}
        return {name: value for name, value in fields.items() if value is not None}

    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name. Raises BadRequest if they differ."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest(f"max_tokens={old} and max_completion_tokens={new} differ; give one.", "max_tokens")
        return old if new is None else new


NESTED: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "speculative": Speculative,
    "embedding_overrides": EmbeddingOverrides,
}
"""Fields whose objects have models of their own."""


def _known(name: str, value: Any) -> Any:
    """A field's value, without the unknown fields of its objects if these are dropped."""
    if (model := NESTED.get(name)) is None:
        return value
    if isinstance(value, list):
        return [_known(name, each) for each in value]
    return known_part(value, model.model_fields, name) if isinstance(value, dict) else value


Body = TypeVar("Body", bound=GenerationRequest)


def parse(body: bytes | bytearray, kind: type[Body]) -> Body:
    """A request body as ``kind``. Raises ApiError and BadRequest (400) naming the field, its value and the rule."""
    return parse_fields(load_object(body), kind)


def parse_fields(data: Mapping[str, Any], kind: type[Body]) -> Body:
    """The fields of a request body as ``kind``, its conversation read. Raises ApiError and BadRequest (400)."""
    check_fields(data, kind.body, kind.model_fields)
    request = validated({name: _known(name, value) for name, value in data.items()}, kind)
    if isinstance(request, ChatRequest):
        request.conversation()  # here, because a long one is read in a thread
    return request
