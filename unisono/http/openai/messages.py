"""The messages of a chat request, checked, in the form of chat templates.

``protocol.ChatRequest.conversation`` calls :func:`conversation`. A message keeps the fields that templates read: role,
content, name, reasoning_content, tool_calls (arguments as objects) and tool_call_id. Every other field is refused,
unless clients send it back empty with an assistant's message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.http.errors import show
from unisono.media.fetching.sources import MediaSource
from unisono.media.parts import READERS, is_media, source_of
from unisono.text.templates.tools import arguments_object
from unisono.types import BadRequest
from unisono.types.unknown_fields import dropped, known_part

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages -> roles in templates."""
TEXT_FIELDS = ("name", "reasoning_content", "reasoning")
"""Fields of any message that are strings."""
ROLE_FIELDS: Mapping[str, frozenset[str]] = {
    "assistant": frozenset({"tool_calls"}),
    "tool": frozenset({"tool_call_id"}),
}
"""Fields that belong to one role only."""
OPTIONAL_CONTENT = ("assistant", "tool")
"""Roles whose messages may have no content."""
EMPTY_FIELDS = frozenset(
    {"refusal", "audio", "annotations", "function_call", "tool_calls", "tool_call_id", "parsed",
     "provider_specific_fields"}
)  # fmt: skip
"""Fields that clients send back empty with an assistant's message."""
NEAREST = {"function_call": "tool_calls", "functions": "tools"}
CALL_FIELDS = {"id", "type", "function", "index"}
FUNCTION_FIELDS = {"name", "arguments", "parsed_arguments"}

Message = dict[str, Any]


def conversation(messages: Sequence[Any]) -> tuple[list[Message], list[MediaSource]]:
    """The messages in the form of chat templates, and their images and videos, in order.

    Raises BadRequest with the first bad one.
    """
    if not messages:
        raise BadRequest("messages is empty; give at least one message.", "messages")
    sources: list[MediaSource] = []
    return [_message(message, f"messages[{i}]", sources) for i, message in enumerate(messages)], sources


def _message(message: Any, where: str, sources: list[MediaSource]) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{where}={show(message)} is not valid: it must be an object with role and content.", where)
    role = message.get("role")
    if role == "function":
        raise BadRequest(
            f"{where}.role='function' is not supported; give a function's result as role tool with tool_call_id.",
            f"{where}.role",
        )
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where}.role={show(role)} is not supported; use one of {', '.join(ROLES)}.", f"{where}.role")
    own = ROLE_FIELDS.get(role, frozenset())
    for name, value in message.items():
        known = name in ("role", "content") or name in TEXT_FIELDS or name in own
        recognised = name in EMPTY_FIELDS or name in NEAREST
        if not known and not recognised and dropped(f"{where}.{name}"):
            continue
        if not known and not (name in EMPTY_FIELDS and value in (None, [], {})):
            way_out = f"use {NEAREST[name]}" if name in NEAREST else "remove it"
            raise BadRequest(f"{where}.{name}={show(value)} is not supported; {way_out}.", f"{where}.{name}")
    result: Message = {"role": ROLES[role]}
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls") if "tool_calls" in own else []
    result["content"] = _content(message.get("content"), f"{where}.content", role, sources)
    if result["content"] is None and not calls:
        result["content"] = ""  # an answer that was truncated inside its reasoning, or a tool that returned nothing
    for name in TEXT_FIELDS:
        if (value := message.get(name)) is not None:
            result["reasoning_content" if name == "reasoning" else name] = _text(value, f"{where}.{name}")
    if calls:
        result["tool_calls"] = calls
    if role == "tool":
        result["tool_call_id"] = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    return result


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where}={show(value)} is not valid: it must be a string.", where)
    return value


def _content(content: Any, where: str, role: str, sources: list[MediaSource]) -> Any:
    """The text of a string or of a list of text parts, joined by newlines as in vLLM.

    None if there is none, which is allowed only for messages of the assistant and of tools. With images or videos, a
    list of parts of the types text, image and video; the media are appended to ``sources``.
    """
    if isinstance(content, str):
        return content
    if content in (None, []) and role in OPTIONAL_CONTENT:
        return None
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where}={show(content)} is not valid: it must be a string or a list of text parts.", where)
    if not any(is_media(part) for part in content):
        return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    parts = []
    for i, part in enumerate(content):
        if is_media(part):
            sources.append(source_of(part, f"{where}[{i}]", role))
            parts.append({"type": str(sources[-1].kind)})
        else:
            parts.append({"type": "text", "text": _part(part, f"{where}[{i}]")})
    return parts


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        kinds = ", ".join(("text", *READERS))
        raise BadRequest(f"{where}={show(part)} is not supported; this server takes parts of the types {kinds}.", where)
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRequest(f"{where}={show(calls)} is not valid: it must be a list of tool calls.", where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    """One call.

    Its arguments become an object; text that is no JSON object stays, because a model may have truncated it.
    """
    form = '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
    function: Any = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        function = known_part(function, FUNCTION_FIELDS, f"{where}.function")
        call = known_part(call, CALL_FIELDS, where)
    ok = isinstance(function, dict) and isinstance(function.get("name"), str) and call.get("type") in (None, "function")
    if not ok or call.keys() - CALL_FIELDS or function.keys() - FUNCTION_FIELDS:
        raise BadRequest(f"{where}={show(call)} is not valid: it must be {form}.", where)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise BadRequest(
            f"{where}.function.arguments={show(arguments)} is not valid: it must be a string of JSON.",
            f"{where}.function.arguments",
        )
    written: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_object(arguments)},
    }
    if call.get("id") is not None:
        written["id"] = _text(call["id"], f"{where}.id")
    return written
