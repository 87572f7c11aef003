"""Limits of every field of request bodies and of every parameter of paths and queries, and the check of a body.

``BODIES`` has a limit for each field of a body that is a number, a text, a list or an object. They are checked before
the body's model, so that no code processes a value beyond its limit. ``PARAMETERS`` has the limits of paths and
queries, which routes name by the types below it. docs/reference/limits.md has the same tables (scripts/reference.py
writes them). ``routes/common.py`` checks the bytes of a body, ``request_body.py`` counts its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationError

from unisono.http.errors import ApiError, show
from unisono.types import BadRequest
from unisono.types.limits import (
    MAX_INT32,
    MAX_SEED,
    MAX_TOKEN_IDS,
    SAMPLING,
    Both,
    Chars,
    Data,
    Entries,
    Fields,
    Items,
    Limit,
    Real,
    Whole,
)
from unisono.types.structured_outputs import MAX_CHARS

MAX_BODY_BYTES = 64 * 2**20
"""Largest body of a request that generates or tokenizes, in bytes."""

SMALL_BODY_BYTES = 2**20
"""Largest body of operators' routes, in bytes."""

MAX_PROMPTS = 1024
"""Prompts of one request, and sequences of it."""

MAX_MESSAGES = 8192
"""Messages of a conversation, or its items."""

MAX_FIELD_CHARS = 256
"""Characters of a field's name."""


class FirstError(FailFast):
    """Annotation of a list whose check ends with its first wrong entry.

    An error for each entry takes 0.65 GiB per MiB of body. pydantic's own class has no hash, which unions need.
    """

    __hash__ = object.__hash__


class FirstWrongValue(BeforeValidator):
    """Annotation of an object whose values are of a model: its check ends with the first wrong value.

    kind: the model. pydantic's FailFast covers lists only before version 2.14.
    """

    def __init__(self, kind: type[BaseModel]) -> None:
        def read(values: Any) -> Any:
            if not isinstance(values, dict):
                return values
            return {name: kind.model_validate(value) for name, value in values.items()}

        super().__init__(read)


Strings = Annotated[list[str], FirstError()]
TokenIds = Annotated[list[int], FirstError()]
TokenIdLists = Annotated[list[TokenIds], FirstError()]
Shapes = TokenIdLists
Documents = Annotated[list[dict[str, str]], FirstError()]
AdapterNames = Annotated[list[str | None], FirstError()]


@dataclass(frozen=True)
class Prompts:
    """A text, token ids, or a list of at most ``most`` of these."""

    most: int = MAX_PROMPTS

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, list) or (value and isinstance(value[0], int)) or len(value) <= self.most:
            return None
        return f"it has {len(value)} entries, at most {self.most} are taken; split it"

    def __str__(self) -> str:
        return f"{self.most} prompts"


TEXT = Chars(1 << 26)
"""Text that only the size of the body limits."""
ID = Chars(1024)
PATH_NAME = Chars(4096)
SCHEMA = Data(MAX_CHARS)
SMALL = Both((Entries(64), Data(1 << 16)))
VARIABLES = Both((Entries(64), Data(1 << 20)))
TOOLS = Both((Items(128), Data(1 << 20)))
CONVERSATION = Items(MAX_MESSAGES)
LISTED = Items(MAX_PROMPTS)
BIGINT = Whole(-MAX_SEED - 1, MAX_SEED)

_SAMPLING = {name: limit for name, limit in SAMPLING.items() if name not in ("max_drafts", "extra_args", "top_k")}
GENERATION: Mapping[str, Limit] = {
    **_SAMPLING,
    "top_k": Whole(-1, note="0 or -1 keeps all"),
    "model": ID,
    "stream_options": Fields({}),
    "max_tokens": Whole(0),
    "routed_experts_start_len": SAMPLING["routed_experts_prompt_start"],
    "length_penalty": Real(-10, 10),
    "priority": BIGINT,
    **dict.fromkeys(("cache_salt", "extra_key", "request_id", "rid"), ID),
    "vllm_xargs": SAMPLING["extra_args"],
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "json_schema"), SCHEMA),
    **dict.fromkeys(("guided_regex", "guided_grammar", "regex", "ebnf"), Chars(MAX_CHARS)),
    "guided_choice": Both((Items(4096), SCHEMA)),
    "speculative": Fields({"num_speculative_tokens": SAMPLING["max_drafts"]}),
}
CHAT: Mapping[str, Limit] = {
    **{name: limit for name, limit in GENERATION.items() if name != "logprobs"},
    "messages": CONVERSATION,
    "max_completion_tokens": Whole(1),
    "chat_template_kwargs": VARIABLES,
    "top_logprobs": Whole(-1),
    "tools": TOOLS,
    "tool_choice": Data(1 << 16),
    "thinking_token_budget": Whole(0),
    "documents": Items(1024, Entries(64)),
    "chat_template": Chars(1 << 18),
    "mm_processor_kwargs": SMALL,
    "media_io_kwargs": SMALL,
}
COMPLETION: Mapping[str, Limit] = {
    **GENERATION,
    "prompt": Prompts(),
    "prompt_embeds": LISTED,
    "embedding_overrides": Fields({"positions": Items(MAX_TOKEN_IDS), "embeddings": TEXT}),
    "best_of": Whole(1),
    "suffix": Chars(1 << 20),
}
COUNT: Mapping[str, Limit] = {
    "messages": CONVERSATION,
    "model": ID,
    "system": CONVERSATION,
    "tools": TOOLS,
    "tool_choice": Data(1 << 16),
    **dict.fromkeys(("thinking", "context_management", "cache_control"), SMALL),
    **dict.fromkeys(("output_config", "output_format"), SCHEMA),
    "mcp_servers": Items(128),
}
MESSAGES: Mapping[str, Limit] = {
    **COUNT,
    "max_tokens": Whole(1),
    "stop_sequences": SAMPLING["stop"],
    **{name: GENERATION[name] for name in ("temperature", "top_p", "top_k")},
    "metadata": SMALL,
    "service_tier": ID,
}
RESPONSES: Mapping[str, Limit] = {
    "input": CONVERSATION,
    "model": ID,
    "instructions": TEXT,
    **dict.fromkeys(
        ("previous_response_id", "truncation", "user", "safety_identifier", "service_tier", "prompt_cache_key",
         "prompt_cache_retention"),
        ID,
    ),
    "stream_options": SMALL,
    "max_output_tokens": Whole(1),
    **{name: GENERATION[name] for name in ("temperature", "top_p")},
    "top_logprobs": Whole(-1),
    "include": Items(16, ID),
    "tools": TOOLS,
    "tool_choice": Data(1 << 16),
    "reasoning": SMALL,
    "text": SCHEMA,
    "metadata": SMALL,
    "max_tool_calls": Whole(0),
    "conversation": SMALL,
    "context_management": Items(128),
}  # fmt: skip
GENERATE: Mapping[str, Limit] = {
    "text": Prompts(),
    "input_ids": Prompts(),
    "sampling_params": Entries(128),
    "top_logprobs_num": Whole(0),
    "logprob_start_len": Whole(-1),
    "rid": ID,
    "image_data": LISTED,
    "video_data": LISTED,
    "mm_processor_kwargs": SMALL,
    "lora_path": Items(MAX_PROMPTS, ID),
}
POOLED: Mapping[str, Limit] = {
    "model": ID,
    "truncate_prompt_tokens": SAMPLING["truncate_prompt_tokens"],
    "user": ID,
}
BODIES: Mapping[str, Mapping[str, Limit]] = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "MessagesRequest": MESSAGES,
    "CountRequest": COUNT,
    "ResponsesRequest": RESPONSES,
    "GenerateRequest": GENERATE,
    "EmbeddingRequest": {
        "input": Prompts(),
        "model": ID,
        "dimensions": Whole(1),
        "truncate_prompt_tokens": SAMPLING["truncate_prompt_tokens"],
        "prompt_name": ID,
        "user": ID,
    },
    "PooledRequest": {
        "input": Prompts(),
        "dimensions": Whole(1),
        "step_tag_id": Whole(0),
        "returned_token_ids": Items(MAX_PROMPTS),
        "prompt_name": ID,
        **POOLED,
    },
    "ClassificationRequest": {"input": Prompts(), **POOLED},
    "ScoreRequest": {"text_1": Prompts(), "text_2": Prompts(), **POOLED},
    "RerankRequest": {"query": TEXT, "documents": Items(MAX_PROMPTS), "top_n": Whole(0), **POOLED},
    "TokenizeRequest": {"prompt": Chars(1 << 22), "messages": CONVERSATION, "model": ID},
    "DetokenizeRequest": {"tokens": Items(MAX_TOKEN_IDS), "model": ID},
    "ConversationBody": {"items": Items(20), "metadata": SMALL},
    "MetadataBody": {"metadata": SMALL},
    "ItemsBody": {"items": Items(20)},
    "UpdateWeightsRequest": {"model_path": PATH_NAME, "draft_path": PATH_NAME, "weight_version": ID},
    "UpdateTensorsRequest": {
        "files": Items(4096, PATH_NAME),
        "handles": Both((Entries(1 << 17, name_chars=4096), Data(1 << 26))),
        "weight_version": ID,
    },
    "WeightGroupRequest": {
        "master_address": ID,
        "master_port": Whole(1, 65535),
        "rank_offset": Whole(1, 4096),
        "world_size": Whole(2, 4096),
        "group_name": ID,
        "backend": ID,
    },
    "LeaveGroupRequest": {"group_name": ID},
    "ReceiveWeightsRequest": {
        "names": Items(4096, ID),
        "dtypes": Items(4096, ID),
        "shapes": Items(4096, Items(8)),
        "group_name": ID,
        "weight_version": ID,
    },
    "PauseRequest": {},
    "MemoryRequest": {"tags": Items(2)},
    "AbortRequest": {"request_ids": Items(4096, ID), "request_id": ID, "rid": ID},
    "LoadAdapter": {"lora_name": ID, "lora_path": Chars(4096), "base_model_name": ID},
    "UnloadAdapter": {"lora_name": ID, "lora_int_id": Whole(-MAX_INT32)},
}
"""Limits of each body's fields, by the name of its model."""

PARAMETERS: Mapping[str, Whole | Chars] = {
    **dict.fromkeys(("response_id", "conversation_id", "item_id", "model_id", "name", "after"), ID),
    "level": Whole(0, 2),
    "limit": Whole(1, 100),
}
"""Limits of the parameters of paths and queries, by name; the others are true or false, or one of a few words."""


def _limited(name: str) -> Any:
    """The limit of a parameter as pydantic checks it and /openapi.json states it."""
    limit = PARAMETERS[name]
    return Field(max_length=limit.most) if isinstance(limit, Chars) else Field(ge=limit.least, le=limit.most)


ResponseId = Annotated[str, _limited("response_id")]
ConversationId = Annotated[str, _limited("conversation_id")]
ItemId = Annotated[str, _limited("item_id")]
ModelId = Annotated[str, _limited("model_id")]
FileName = Annotated[str, _limited("name")]
After = Annotated[str | None, _limited("after")]
SleepLevel = Annotated[int, _limited("level")]
PageSize = Annotated[int, _limited("limit")]


def parameter_rule(name: str, value: Any) -> str | None:
    """The rule that a parameter's text breaks; None where it is of the wrong type, or has no limit."""
    limit = PARAMETERS.get(name)
    if isinstance(limit, Chars):
        return limit.problem(value)
    return limit.rule if limit is not None and str(value).strip().lstrip("+-").isdecimal() else None


Body = TypeVar("Body", bound=BaseModel)


def validated(data: Mapping[str, Any], kind: type[Body]) -> Body:
    """The fields of ``kind`` in ``data``, which may have others.

    Raises ApiError and BadRequest (400) with the first wrong field, its value and the rule.
    """
    limits = BODIES[kind.__name__]
    for name, value in data.items():
        if name in limits and (problem := limits[name].problem(value)) is not None:
            raise BadRequest(f"{name}={show(value)} is out of range: {problem}.", name)
    known = {field.alias or name: field for name, field in kind.model_fields.items()}
    try:
        return kind.model_validate({name: data[name] for name in data.keys() & known.keys()})
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors(include_url=False, include_context=False)}
    name = next(one for one in known if one in wrong)
    rule = known[name].description
    if name not in data:
        raise ApiError(400, f"{name} is missing; it must be {rule}.", param=name, code="missing_field")
    message = f"{name}={show(data[name])} is not valid: it must be {rule}."
    raise ApiError(400, message, param=name, code="invalid_type")


def check_name(name: str) -> None:
    """Raise ApiError (400) for a field name that is too long."""
    if len(name) > MAX_FIELD_CHARS:
        message = f"{show(name)} is not a known field: it has {len(name)} characters; remove it."
        raise ApiError(400, message, code="unknown_field")


TABLE_HEAD = "| field | limit | body |\n|---|---|---|\n"


def table() -> str:
    """The table of docs/reference/limits.md: each field and limit, and the bodies with it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for body, limits in BODIES.items():
        for name, limit in limits.items():
            rows.setdefault((name, str(limit)), []).append(body)
    lines = [
        f"| `{name}` | {limit} | {'all' if len(bodies) == len(BODIES) else ', '.join(bodies)} |"
        for (name, limit), bodies in sorted(rows.items())
    ]
    return TABLE_HEAD + "\n".join(lines) + "\n"


def parameter_table() -> str:
    """The table of docs/reference/limits.md of parameters of paths and queries."""
    lines = [f"| `{name}` | {limit} |\n" for name, limit in sorted(PARAMETERS.items())]
    return "| Parameter | Limit |\n|---|---|\n" + "".join(lines)
