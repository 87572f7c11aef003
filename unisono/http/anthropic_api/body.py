"""Bodies of ``/v1/messages``: blocks to messages, and the other fields to those of a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from unisono.http.errors import show
from unisono.http.limits.fields import Strings
from unisono.http.openai.hosted_tools import Ignored
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.translation import Renames, has_kind, passed_on, text_of
from unisono.types import BadRequest

Block = dict[str, Any]
ELSEWHERE = {
    "n": "an answer has one message", "best_of": "an answer has one message", "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens", "logprobs": "use /v1/chat/completions", "echo": "it is for completions",
    "top_logprobs": "use /v1/chat/completions", "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort", "return_hidden_states": "use /v1/chat/completions",
    "return_routed_experts": "use /v1/chat/completions",
    "prompt_logprobs": "use /v1/chat/completions", "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    "continue_final_message": "end messages with one of role assistant", "add_generation_prompt": "it is always true",
    "use_beam_search": "use /v1/chat/completions",
}  # fmt: skip
"""Refused fields of the chat body, and the alternative to each."""
RENAMED = {
    "stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "output_config.effort",
    "structured_outputs": "output_config.format", "response_format.json_schema.schema": "output_config.format.schema",
    "enable_thinking": "thinking.type", "thinking_token_budget": "thinking.budget_tokens",
}  # fmt: skip
BUDGETS = ("thinking_token_budget",)
"""The chat body's field for a reasoning budget."""
KEPT_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
"""The context edit that changes nothing."""


class CountRequest(BaseModel):
    """Body of ``/v1/messages/count_tokens``. Sampling fields of the chat body that are not listed are taken too."""

    model_config = ConfigDict(strict=True, extra="allow")

    messages: list[Any] = Field(description="a list of messages, each with a role and a content")
    model: str | None = Field(None, description="the name of a served model")
    system: str | list[Any] | None = Field(None, description="a string or a list of text blocks")
    tools: list[Any] | None = Field(None, description="a list of tools, each with a name and an input_schema")
    tool_choice: dict[str, Any] | None = Field(None, description="an object of type auto, any, tool or none")
    thinking: dict[str, Any] | None = Field(None, description="an object of type enabled, disabled or adaptive")
    output_config: dict[str, Any] | None = Field(None, description="an object with format and effort")
    output_format: dict[str, Any] | None = Field(None, description="an object of type json_schema")
    context_management: dict[str, Any] | None = Field(None, description="an object with edits")
    cache_control: dict[str, Any] | None = Field(None, description="an object")
    mcp_servers: list[Any] | None = Field(None, description="absent; --ignore-hosted-tools leaves them out")


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``. Sampling fields of the chat body that are not listed here are taken too."""

    max_tokens: int = Field(description="a whole number")
    stream: bool | None = Field(None, description="true or false")
    stop_sequences: Strings | None = Field(None, description="a list of strings")
    temperature: float | None = Field(None, description="a number")
    top_p: float | None = Field(None, description="a number")
    top_k: int | None = Field(None, description="a whole number")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    service_tier: str | None = Field(None, description="a string")
    container: None = Field(None, description="absent: there are no containers")


def chat_body(
    request: CountRequest, data: Mapping[str, Any], ignored: Ignored | None = None
) -> tuple[dict[str, Any], Renames]:
    """The chat body of a request, and the origins of its parts.

    ignored: records the hosted tools.

    Raises BadRequest and ApiError.
    """
    ignored = ignored or Ignored()
    if request.mcp_servers:
        ignored.other("mcp", "mcp_servers")
    body = passed_on(data, MessagesRequest.model_fields.keys(), ELSEWHERE)
    # Claude Code sends system messages between others; models follow them best in the system prompt (vLLM #44048).
    made = sorted(_messages(request, ignored), key=lambda one: one.message["role"] != "system")
    messages = [one.message for one in made]
    body |= {"messages": messages, "model": request.model}
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        body["stop"] = request.stop_sequences or None
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        body["continue_final_message"] = True  # the answer continues the caller's beginning
    body |= _thinking(request)
    _check_edits(request.context_management)
    config = request.output_config or {}
    body["reasoning_effort"] = config.get("effort")
    if (form := config.get("format") or request.output_format) is not None:
        body["response_format"] = _response_format(form)
    if tools := _functions(request.tools or [], ignored):
        body |= _tools(tools, request.tool_choice or {})
    elif (request.tool_choice or {}).get("type") in ("any", "tool"):
        raise ignored.no_tools(request.tool_choice)
    present = {name: value for name, value in body.items() if value is not None}
    return present, Renames({**RENAMED, **_sources(made)})


def _sources(made: Sequence[_TranslatedMessage]) -> dict[str, str]:
    """The origin of each message, and of each part of contents that are lists."""
    found = {f"messages[{i}]": one.source for i, one in enumerate(made)}
    for i, one in enumerate(made):
        found |= {f"messages[{i}].content[{j}]": place for j, place in enumerate(one.places)}
    return found


@dataclass
class _TranslatedMessage:
    """A message of the chat. source: its origin in the body. places: origins of its content's parts, if any."""

    message: dict[str, Any]
    source: str
    places: list[str] = field(default_factory=list)


def _messages(request: CountRequest, ignored: Ignored) -> list[_TranslatedMessage]:
    """The chat's messages."""
    made: list[_TranslatedMessage] = []
    if request.system:
        made.append(
            _TranslatedMessage({"role": "system", "content": text_of(request.system, "system", {"text"})}, "system")
        )
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where}={show(message)} is not valid: it must be an object.", where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role={show(role)} is not supported; use user or assistant.", f"{where}.role")
        if isinstance(content, str):
            made.append(_TranslatedMessage({"role": role, "content": content}, where))
        elif not isinstance(content, list) or not (content or role == "assistant"):  # an answer may have had no text
            raise BadRequest(
                f"{where}.content={show(content)} is not valid: it must be a string or a list of blocks.",
                f"{where}.content",
            )
        elif role == "assistant":
            made.append(_TranslatedMessage(_assistant(content, f"{where}.content", ignored), where))
        else:
            made += _user(role, content, where, ignored)
    return made


def _assistant(blocks: list[Any], where: str, ignored: Ignored) -> dict[str, Any]:
    """An assistant's blocks as one message."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reasoning, texts, calls = [], [], []
    for i, block in enumerate(blocks):
        if isinstance(block, dict) and ignored.part(block.get("type"), f"{where}[{i}].type"):
            continue
        kind = _kind(block, f"{where}[{i}]", ("text", "thinking", "redacted_thinking", "tool_use"))
        if kind == "text":
            texts.append(_text(block, "text", f"{where}[{i}]"))
        elif kind == "thinking":
            reasoning.append(_text(block, "thinking", f"{where}[{i}]"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    if texts or not calls:
        message["content"] = "".join(texts)
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[Any], source: str, ignored: Ignored) -> list[_TranslatedMessage]:
    """A user's blocks as messages: one per tool result, and one for the text and images between them."""
    made: list[_TranslatedMessage] = []
    for i, block in enumerate(blocks):
        place = f"{source}.content[{i}]"
        if isinstance(block, dict) and ignored.part(block.get("type"), f"{place}.type"):
            continue
        kind = _kind(block, place, ("text", "image", "tool_result"))
        if kind == "tool_result":
            parts, places = _result(block.get("content"), f"{place}.content")
            message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}
            made.append(_TranslatedMessage(message, source, places))
            continue
        if not made or made[-1].message["role"] != role:
            made.append(_TranslatedMessage({"role": role, "content": []}, source))
        made[-1].message["content"].append(_part(kind, block, place))
        made[-1].places.append(place)
    for one in made:
        parts = one.message["content"]
        if not any(part["type"] == "image_url" for part in parts):
            one.message["content"] = "\n".join(part["text"] for part in parts)
            one.places.clear()
    return made


def _result(content: Any, where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A tool's result as content parts, and their origins."""
    if not has_kind(content, "image"):
        text = "" if content is None else text_of(content, where, {"text"}, "image")
        return [{"type": "text", "text": text}], [where]
    places = [f"{where}[{i}]" for i in range(len(content))]
    kinds = [_kind(block, place, ("text", "image")) for block, place in zip(content, places, strict=True)]
    return [_part(*value) for value in zip(kinds, content, places, strict=True)], places


def _part(kind: str, block: Block, where: str) -> dict[str, Any]:
    """A content part of the chat."""
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", where)}
    source = block.get("source")
    if not isinstance(source, dict):
        raise BadRequest(f"{where}.source={show(source)} is not valid: it must be an object.", f"{where}.source")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{_text(source, 'data', f'{where}.source')}"
    elif source.get("type") == "url":
        url = _text(source, "url", f"{where}.source")
    else:
        raise BadRequest(
            f"{where}.source.type={show(source.get('type'))} is not supported; use base64 or url.",
            f"{where}.source.type",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _kind(block: Any, where: str, kinds: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in kinds:
        raise BadRequest(f"{where}={show(block)} is not supported; its type must be one of {', '.join(kinds)}.", where)
    return kind


def _text(block: Block, name: str, where: str) -> str:
    if not isinstance(text := block.get(name), str):
        raise BadRequest(f"{where}.{name}={show(text)} is not valid: it must be a string.", f"{where}.{name}")
    return text


def _thinking(request: CountRequest) -> dict[str, Any]:
    """Fields of the chat body for ``thinking``: reasoning on or off, and its budget."""
    value = request.thinking
    if value is None:
        return {}
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(f"thinking.type={show(kind)} is not supported; use enabled or disabled.", "thinking.type")
    made: dict[str, Any] = {"enable_thinking": kind != "disabled"}
    if kind == "enabled":
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise BadRequest(
                f"thinking.budget_tokens={show(budget)} is not valid: it must be a whole number ≥ 1.",
                "thinking.budget_tokens",
            )
        made |= {name: budget for name in BUDGETS if name in ChatRequest.model_fields}
    return made


def _check_edits(management: Mapping[str, Any] | None) -> None:
    edits = (management or {}).get("edits") or []
    if not isinstance(edits, list):
        where = "context_management.edits"
        raise BadRequest(f"{where}={show(edits)} is not valid: it must be a list of edits.", where)
    for i, edit in enumerate(edits):
        if edit != KEPT_THINKING:
            where = f"context_management.edits[{i}]"
            raise BadRequest(f"{where}={show(edit)} is not supported: prompts are not edited; remove it.", where)


def _response_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema" or "schema" not in form:
        raise BadRequest(
            f'output_config.format={show(form)} is not supported; give {{"type": "json_schema", "schema": …}}.',
            "output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}


def _functions(value: list[Any], ignored: Ignored) -> list[dict[str, Any]]:
    """The chat body's tools, without hosted ones. Raises BadRequest."""
    tools = []
    for i, tool in enumerate(value):
        kind = tool.get("type", "custom") if isinstance(tool, dict) else None
        if kind != "custom" and ignored.tool(kind, f"tools[{i}].type"):
            continue
        if kind not in ("custom", None) or not isinstance(tool, dict):
            raise BadRequest(
                f"tools[{i}].type={show(kind)} is not supported: this server calls no tools itself; give tools with "
                "name and input_schema.",
                f"tools[{i}].type",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _tools(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body's tools, tool_choice and parallel_tool_calls."""
    kind = choice.get("type", "auto")
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kinds["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in kinds:
        raise BadRequest(f"tool_choice.type={show(kind)} is not supported; use {', '.join(kinds)}.", "tool_choice.type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    return {"tools": tools, "tool_choice": kinds[kind], "parallel_tool_calls": parallel}
