"""Bodies of ``/v1/responses``: items to messages, and the other fields to those of a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from unisono.http.errors import show
from unisono.http.limits.fields import Strings
from unisono.http.openai.hosted_tools import ITEMS, Ignored, hosted_type
from unisono.http.openai.translation import Renames, has_kind, passed_on, text_of
from unisono.types import BadRequest

Item = dict[str, Any]
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
IMAGE_PART = "input_image"
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""Values of ``include``. Encrypted reasoning is never needed: reasoning items carry their text."""
ELSEWHERE = {
    "messages": "use input", "prompt_token_ids": "use input", "n": "a response has one answer",
    "best_of": "a response has one answer", "logprobs": f'use include=["{LOGPROBS}"]',
    "max_tokens": "use max_output_tokens", "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format", "reasoning_effort": "use reasoning.effort", "echo": "it is for completions",
    "return_hidden_states": "use /v1/chat/completions",
    "return_routed_experts": "use /v1/chat/completions", "prompt_logprobs": "use /v1/chat/completions",
    "use_beam_search": "use /v1/chat/completions",
}  # fmt: skip
"""Refused fields of the chat body, and the alternative to each."""
RENAMED = {
    "max_completion_tokens": "max_output_tokens", "response_format.json_schema": "text.format",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "logprobs": "include",
    "structured_outputs": "text.format", "messages": "input", "max_tokens": "max_output_tokens",
}  # fmt: skip


class ResponsesRequest(BaseModel):
    """Body of ``/v1/responses``. Sampling fields of the chat body that are not listed here are taken too."""

    model_config = ConfigDict(strict=True, extra="allow")

    input: str | list[Any] = Field(description="a string or a list of items")
    model: str | None = Field(None, description="the name of a served model")
    instructions: str | None = Field(None, description="a string")
    previous_response_id: str | None = Field(None, description="the id of a stored response")
    store: bool | None = Field(None, description="true or false")
    background: bool | None = Field(None, description="true or false")
    stream: bool | None = Field(None, description="true or false")
    stream_options: dict[str, Any] | None = Field(None, description="an object; include_obfuscation must be false")
    max_output_tokens: int | None = Field(None, description="a whole number")
    temperature: float | None = Field(None, description="a number")
    top_p: float | None = Field(None, description="a number")
    top_logprobs: int | None = Field(None, description="a whole number")
    include: Strings | None = Field(None, description=f"a list of {', '.join(sorted(INCLUDABLE))}")
    tools: list[Any] | None = Field(
        None, description="a list of tools of type function; with --ignore-hosted-tools also others, which are left out"
    )
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required, or an object")
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    reasoning: dict[str, Any] | None = Field(None, description="an object with effort")
    text: dict[str, Any] | None = Field(None, description="an object with format")
    truncation: str | None = Field(None, description='"auto" or "disabled"')
    metadata: dict[str, Any] | None = Field(None, description="an object of strings")
    max_tool_calls: int | None = Field(None, description="a whole number (of built-in tools, which are none)")
    user: str | None = Field(None, description="a string")
    safety_identifier: str | None = Field(None, description="a string")
    service_tier: str | None = Field(None, description="a string")
    prompt_cache_key: str | None = Field(None, description="a string")
    prompt_cache_retention: str | None = Field(None, description="a string")
    conversation: str | dict[str, Any] | None = Field(
        None, description="the id of a conversation, or an object with id"
    )
    prompt: None = Field(None, description="absent; use instructions")
    context_management: list[Any] | None = Field(None, max_length=0, description="absent: inputs are not compacted")


@dataclass
class MessageBuilder:
    """Messages made of items.

    sources: the origin of each message in the body. contents: by the message's number, the origin of its content if
    that is not the item's ``content``.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    contents: dict[int, str] = field(default_factory=dict)

    def add(self, message: dict[str, Any], source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)

    def assistant(self, source: str, *taken: str) -> dict[str, Any]:
        """The open assistant's message, or a new one if one of its fields ``taken`` is in use."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            self.add({"role": "assistant", "content": None}, source)
        return self.messages[-1]

    def renames(self) -> dict[str, str]:
        contents = {f"messages[{i}].content": source for i, source in self.contents.items()}
        return {f"messages[{i}]": source for i, source in enumerate(self.sources)} | contents


def to_items(
    value: str | list[Any], new_id: Callable[[str], str], find: Callable[[str], Item | None], name: str = "input"
) -> list[Item]:
    """The input as items with ids.

    find: returns an item of an earlier response by its id. name: the field's.

    Raises BadRequest.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise BadRequest(f"{name} is empty; give at least one item.", name)
    items = []
    for i, item in enumerate(value):
        where = f"{name}[{i}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where}={show(item)} is not valid: it must be an object.", where)
        if item.get("type") == "item_reference":
            found = find(str(item.get("id")))
            if found is None:
                raise BadRequest(
                    f"{where}.id={show(item.get('id'))} names no stored item; send the item itself.", f"{where}.id"
                )
            item = found
        items.append({"type": "message", **item, "id": item.get("id") or new_id("msg_")})
    return items


def to_messages(
    items: list[Item],
    instructions: str | None,
    earlier: int,
    before: str = "previous_response_id",
    name: str = "input",
    ignored: Ignored | None = None,
) -> MessageBuilder:
    """The messages of a conversation.

    earlier: number of items from the field ``before``; the others are from ``name``.

    ignored: records the items of hosted tools. Raises BadRequest.
    """
    made, ignored = MessageBuilder(), ignored or Ignored()
    if instructions:
        made.add({"role": "system", "content": instructions}, "instructions")
    for i, item in enumerate(items):
        where = before if i < earlier else f"{name}[{i - earlier}]"
        if ignored.part(item["type"], f"{where}.type"):
            continue
        read_item = READERS.get(item["type"]) if isinstance(item["type"], str) else None
        if read_item is None:
            raise BadRequest(
                f"{where}.type={show(item['type'])} is not supported; use one of {', '.join(READERS)}.", f"{where}.type"
            )
        read_item(made, item, where)
    return made


def _message(made: MessageBuilder, item: Item, where: str) -> None:
    role = item.get("role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        made.assistant(where, "content")["content"] = content
    else:
        made.add({"role": role, "content": content}, where)


def _content(content: Any, where: str) -> Any:
    """Text, or the chat's content parts if images are among it. Raises BadRequest."""
    if not has_kind(content, IMAGE_PART):
        return text_of(content, where, TEXT_PARTS)
    return [
        part
        if has_kind([part], IMAGE_PART)
        else {"type": "text", "text": text_of([part], where, TEXT_PARTS, IMAGE_PART, first=i)}
        for i, part in enumerate(content)
    ]


def _reasoning(made: MessageBuilder, item: Item, where: str) -> None:
    parts = item.get("content") or item.get("summary") or []
    text = text_of(parts, f"{where}.content", {"reasoning_text", "summary_text"})
    if text:
        message = made.assistant(where, "content", "tool_calls")
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text


def _call(made: MessageBuilder, item: Item, where: str) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    made.assistant(where).setdefault("tool_calls", []).append(call)


def _custom_call(made: MessageBuilder, item: Item, where: str) -> None:
    """A call of a tool with a text argument, made elsewhere."""
    _call(made, {**item, "arguments": {"input": item.get("input")}}, where)


def _output(made: MessageBuilder, item: Item, where: str) -> None:
    content = _content(item.get("output"), f"{where}.output")
    made.contents[len(made.messages)] = f"{where}.output"
    made.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content}, where)


READERS: Mapping[str, Callable[[MessageBuilder, Item, str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
}
"""Item type -> function that adds it to the messages."""


def chat_body(
    request: ResponsesRequest, data: Mapping[str, Any], made: MessageBuilder, ignored: Ignored | None = None
) -> tuple[dict[str, Any], Renames]:
    """The chat body of a request, and the origins of its parts.

    ignored: records the hosted tools.

    Raises BadRequest and ApiError.
    """
    ignored = ignored or Ignored()
    body = passed_on(data, ResponsesRequest.model_fields.keys(), ELSEWHERE)
    body |= {"messages": made.messages, "model": request.model, "temperature": request.temperature}
    body |= {"top_p": request.top_p, "max_completion_tokens": request.max_output_tokens}
    _check_choices(request, ignored)
    include = request.include or []
    if LOGPROBS in include or request.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if (effort := (request.reasoning or {}).get("effort")) is not None:
        body["reasoning_effort"] = effort
    if (form := _response_format((request.text or {}).get("format"))) is not None:
        body["response_format"] = form
    tools, choice = _tools(request.tools or [], ignored), request.tool_choice
    if tools:
        body["tools"], body["tool_choice"] = _chosen(tools, choice)
        body["parallel_tool_calls"] = request.parallel_tool_calls
    elif choice not in (None, "auto", "none"):
        raise ignored.no_tools(choice)
    present = {name: value for name, value in body.items() if value is not None}
    return present, Renames({**RENAMED, **made.renames()})


def conversation_of(request: ResponsesRequest) -> str | None:
    """The id of the conversation that a response continues. Raises BadRequest."""
    value = request.conversation
    found = value.get("id") if isinstance(value, dict) else value
    if value is not None and not isinstance(found, str):
        raise BadRequest(f'conversation={show(value)} is not valid: give an id, or {{"id": "conv_…"}}.', "conversation")
    return found


def turns(items: list[Item]) -> list[int]:
    """The indices of ``items`` at which turns begin, the oldest first; :func:`since` shortens to them.

    A turn begins with a message of the user.
    """
    starts = [i for i, item in enumerate(items) if item["type"] == "message" and item.get("role") == "user"]
    first = next((i for i, item in enumerate(items) if not _stays(item)), len(items))
    return [start for start in starts if start > first]


def since(items: list[Item], start: int) -> list[Item]:
    """``items`` from ``start`` on. Messages of the system and developer before it stay."""
    return [*(item for item in items[:start] if _stays(item)), *items[start:]]


def _stays(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _check_choices(request: ResponsesRequest, ignored: Ignored) -> None:
    """Raise BadRequest for unsupported values of this API's own fields."""
    for value in request.include or []:
        if (kind := value.partition(".")[0]) in ITEMS:
            ignored.other(kind, "include")
        elif value not in INCLUDABLE:
            raise BadRequest(f"include={show(value)} is not supported; use {', '.join(sorted(INCLUDABLE))}.", "include")
    if request.truncation not in (None, "auto", "disabled"):
        raise BadRequest(f"truncation={show(request.truncation)} is not valid: use auto or disabled.", "truncation")
    if request.conversation is not None and request.previous_response_id is not None:
        raise BadRequest(
            "conversation and previous_response_id exclude each other: both say what the input goes on with. Leave out "
            "one of them.",
            "conversation",
        )
    summary = (request.reasoning or {}).get("summary")
    if summary not in (None, "auto"):
        raise BadRequest(
            f"reasoning.summary={show(summary)} is not supported: no summaries are made, reasoning items have the "
            "whole text. Use auto or leave it out.",
            "reasoning.summary",
        )
    if request.background and request.stream:
        raise BadRequest(
            "background and stream exclude each other here; poll GET /v1/responses/{id} instead.", "background"
        )
    if request.background and request.store is False:
        raise BadRequest("background needs store: the response could never be read. Remove store=false.", "background")
    if (request.stream_options or {}).get("include_obfuscation"):
        raise BadRequest("stream_options.include_obfuscation is not supported; set it to false.", "stream_options")


def _response_format(value: Any) -> Any:
    """``text.format`` in the chat body's form, in which the schema is one level deeper."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: v for name, v in value.items() if name != "type"}}
    return value


def _tools(fields: list[Any], ignored: Ignored) -> list[dict[str, Any]]:
    tools = []
    for i, tool in enumerate(fields):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if ignored.tool(kind, f"tools[{i}].type"):
            continue
        if kind != "function":
            raise BadRequest(
                f"tools[{i}].type={show(kind)} is not supported; this server calls no tools itself, give functions.",
                f"tools[{i}].type",
            )
        flat = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tools.append({"type": "function", "function": flat.get("function", flat)})
    return tools


def _chosen(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """The tools and the tool_choice of the chat body."""
    if not isinstance(choice, dict):
        return tools, choice
    if choice.get("type") == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        value, mode = choice.get("tools"), choice.get("mode")
        known = [tool["function"].get("name") for tool in tools]
        ones = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
        names = [one.get("name") for one in ones if hosted_type(one.get("type")) is None]
        if mode not in ("auto", "required") or not names or any(name not in known for name in names):
            rule = "its mode must be auto or required, and its tools a list of objects with names of functions in tools"
            raise BadRequest(f"tool_choice={show(choice)} is not valid: {rule}.", "tool_choice")
        return [tool for tool in tools if tool["function"].get("name") in names], mode
    raise BadRequest(
        f"tool_choice={show(choice)} is not supported; use auto, none, required, a function or allowed_tools.",
        "tool_choice",
    )
