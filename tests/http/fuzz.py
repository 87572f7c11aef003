"""Bodies for a fuzz: valid ones, with values in any place that somebody might send by mistake or malice."""

from __future__ import annotations

import base64
import copy
import io
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [7],
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "allowed_token_ids": [5, 6],
    "bad_words": ["no"],
    "min_tokens": 1,
    "ignore_eos": True,
    "skip_special_tokens": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "text"},
    "speculative": {"enabled": True, "num_speculative_tokens": 1},
    "user": "me",
    "metadata": {"a": "b"},
    "prompt_logprobs": 1,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "return_token_ids": True,
}  # fmt: skip

TEXT: dict[str, Any] = {
    **{k: v for k, v in CHAT.items() if k not in ("messages", "top_logprobs", "logprobs", "chat_template_kwargs",
                                                 "continue_final_message", "add_generation_prompt")},
    "prompt": ["Hello", "there"],
    "logprobs": 2,
    "echo": True,
}  # fmt: skip


FUNCTION: dict[str, Any] = {
    "name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        ]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "yes", "refusal": None},
        {"role": "user", "content": "and?", "name": "me"},
    ],
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "thinking_token_budget": 5,
    "mm_processor_kwargs": {"max_pixels": 1000},
    "structured_outputs": {"regex": "a*"},
    "stream_options": {"include_usage": True},
}  # fmt: skip

RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
        ]},
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
        {"role": "user", "content": "and?"},
    ],
    "instructions": "Be short.",
    "max_output_tokens": 3,
    "tools": [{"type": "function", **FUNCTION, "strict": False}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "auto",
    "previous_response_id": None,
    "conversation": None,
    "metadata": {"a": "b"},
    "store": True,
}  # fmt: skip

MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "Hi"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "yes"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}], "is_error": False},
        ]},
    ],
    "max_tokens": 3,
    "tools": [{"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low"},
    "context_management": {"edits": []},
    "metadata": {"user_id": "me"},
}  # fmt: skip

GENERATE: dict[str, Any] = {
    "text": ["Hi", "there"],
    "sampling_params": {"max_new_tokens": 3, "temperature": 0.5, "stop": ["x"], "regex": "a*", "stop_token_ids": [7]},
    "image_data": [None, None],
    "return_logprob": True,
    "top_logprobs_num": 2,
    "rid": ["a", "b"],
    "stream": False,
}

OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["Hi", "there"], "encoding_format": "float", "dimensions": None, "user": "me"},
    "/tokenize": {"messages": TALK["messages"], "tools": TALK["tools"], "add_generation_prompt": True,
                  "chat_template_kwargs": {"a": 1}},
    "/detokenize": {"tokens": [5, 6], "skip_special_tokens": True},
    "/v1/messages/count_tokens": {k: MESSAGES[k] for k in ("system", "messages", "tools", "tool_choice", "thinking")},
    "/v1/conversations": {"items": RESPONSES["input"], "metadata": {"a": "b"}},
}  # fmt: skip

BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", CHAT, 4), ("/v1/completions", TEXT, 4), ("/v1/chat/completions", TALK, 4),
    ("/v1/responses", RESPONSES, 3), ("/v1/messages", MESSAGES, 3), ("/generate", GENERATE, 2),
    *((path, body, 1) for path, body in OTHERS.items()),
]  # fmt: skip
"""(path of the API, a body of it that is valid, how often it is sent compared with the others)."""

ODD_NAMES = (
    "self", "messages", "conversation", "conversations", "add_generation_prompt", "tools", "documents", "chat_template",
    "kwargs", "args", "cls", "request", "params", "data", "body", "__class__", "__init__", "", " ", "a b", "a.b",
    "a[0]",
    "\x00", "é💥", "$ref", "None", "max_drafts", "prompt", "stream", "n", "text", "x" * 300, "x" * 100_000,
)  # fmt: skip
"""Names that are somebody's argument, field or syntax."""

MAX_CHARS = 4 << 20
"""Characters of a body that is sent."""

PICTURES = ("image_url", "input_image", "image")

NEEDED = (
    "messages",
    "prompt",
    "max_tokens",
    "input",
    "max_output_tokens",
    "text",
    "sampling_params",
    "items",
    "tokens",
)
"""Fields that each body keeps, so that others are looked at."""


def encoded(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


class Raw(str):
    """Written into a body as it is."""


def odd_values() -> list[Any]:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    return [
        None, True, False, 0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63),
        -(2**63) - 1, 10**30, Raw("9" * 5000), Raw("-" + "9" * 5000), Raw("1e400"), Raw("-1e400"), Raw("1e-400"),
        Raw("NaN"), Raw("Infinity"), Raw("1.0"), Raw('"\\ud800"'), Raw('"a\\udc00b"'), Raw('"\\ud83d\\ude00"'),
        Raw('"\\u0000"'), Raw('{"\\ud800": 1}'), Raw('["\\udfff"]'), 0.5, -0.0, "", "x", "5", "\x00", "é" * 300,
        "x" * 10_000, "💥" * 50, "\u202e", [], [[]], {}, {"a": {}}, [None], [1, "a"],
        ["a", "b"], [1.5], [True], [-1], [2**70], [10**9],
        {"1": 2}, {"-1": 1}, {"99999999999999999999": 1}, {"1": 2**70}, {"type": "json_object"}, {"type": "object"},
        deep, {"role": "user"}, [{"role": "user", "content": "x"}], [{"role": "user", "content": None}], [{}],
        [[1, 2], [3]], {"regex": "("}, {"json": {}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "wibble"}}},
        list(range(600)), ["x"] * 2000, {str(i): 1 for i in range(400)},
    ]  # fmt: skip


def odd_lists(chance: random.Random) -> list[Any]:
    """Numbers at powers of two ± 1, and lists whose elements, number or size is wrong."""
    powers = [sign * (2**power + off) for power in range(1, 66) for off in (-1, 0, 1) for sign in (1, -1)]
    numbers = chance.sample(powers, 60)
    elements: list[Any] = [1, "a", None, {}, [], 1.5, True, Raw("NaN"), 2**63, "x" * 2000, [1, "a"], {"a": []}]
    mixed = [[chance.choice(elements) for _ in range(chance.choice([1, 2, 17, 300, 5000]))] for _ in range(20)]
    alike = [[element] * count for element in elements[:7] for count in (1, 257, 20_000)]
    objects = [{f"{name}{i}": 1 for i in range(count)} for name in ("a", "x" * 300) for count in (1, 65, 5000)]
    return [
        *numbers,
        *([one] for one in numbers[:20]),
        *mixed,
        *alike,
        *objects,
        "x" * 200_000,
        Raw('"' + "\\n" * 99_999 + '"'),
    ]


def renamed(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """``body`` with a field of an odd name in some object, or an odd name in place of one."""
    changed = copy.deepcopy(body)
    found: list[dict[str, Any]] = [changed]
    for path in places(changed):
        inner: Any = changed
        for key in path:
            inner = inner[key]
        found += [inner] if isinstance(inner, dict) else []
    inner, name = chance.choice(found), chance.choice(ODD_NAMES)
    if inner is changed and name in NEEDED:
        return changed
    value = inner.pop(chance.choice(list(inner))) if inner and inner is not changed and chance.random() < 0.5 else "x"
    inner[name] = value
    return changed


def odd_tensors() -> list[Any]:
    plain = torch.zeros(2, 6)
    return [
        torch.zeros(2, 6, dtype=torch.complex64), torch.zeros(2, 6, dtype=torch.complex64).conj(), torch.Size([2, 6]),
        {"a": plain}, [plain], (plain,), None, 5, "x", plain.to_sparse(), plain.bool(), plain.to(torch.int64),
        plain.to(torch.float8_e4m3fn), plain.double(), torch.full((2, 6), torch.nan), torch.full((2, 6), torch.inf),
        torch.zeros(0, 6), torch.zeros(2, 0), torch.tensor(1.0), torch.zeros(2, 5), torch.zeros(1, 2, 6),
        torch.zeros(600, 6), torch.zeros(1, 6).expand(400, 6), torch.zeros(2, 6, device="meta"), torch.zeros(6, 2).t(),
        torch.float32, torch.device("cpu"), torch.nn.Parameter(plain), plain.half(),
        torch.nested.nested_tensor([plain]),
    ]  # fmt: skip


def write(value: Any) -> str:
    """``value`` as JSON, with each Raw as it stands."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)}: {write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(write, value)) + "]"
    return json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in ``value``."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def without_pictures(value: Any) -> Any:
    """A body without those of its parts that only some models take."""
    if isinstance(value, dict):
        return {key: without_pictures(inner) for key, inner in value.items()}
    if isinstance(value, list):
        parts = [part for part in value if not isinstance(part, dict) or part.get("type") not in PICTURES]
        return [without_pictures(part) for part in parts]
    return value


def bodies(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(path of the API, body): each odd value in some place of a body, some bodies with several, cut or garbled."""
    chance = random.Random(seed)
    values, lists = odd_values(), odd_lists(chance)
    for tensor in odd_tensors():
        if count > len(values):
            yield "/v1/completions", json.dumps({"prompt_embeds": encoded(tensor), "max_tokens": 2})
    for i in range(count):
        ((path, body, _),) = chance.choices(BODIES, [weight for _, _, weight in BODIES])
        kept = {k: v for k, v in body.items() if chance.random() < 0.4 or k in NEEDED}
        if chance.random() < 0.8:
            kept = without_pictures(kept)
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            where = chance.choice(list(places(kept)))
            odd = values[i % len(values)] if chance.random() < 0.7 else chance.choice(values + lists)
            kept = replaced(kept, where, odd)
        if chance.random() < 0.05:
            kept[
                chance.choice(["tools", "wibble", "suffix", "guided_json", "guided_regex", "\x00", "response_format"])
            ] = chance.choice(values)
        if chance.random() < 0.1:
            kept = renamed(kept, chance)
        text = write(kept)
        if len(text) > MAX_CHARS:  # an odd list in every place of another
            continue
        if chance.random() < 0.05:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", "\x00", "]", '"', "\\ud800"]) + text[at + chance.randrange(3) :]
        yield path, text
