"""Conversations with tools, in the form that a checkpoint's chat template can render.

Templates differ: arguments as objects or as text, a call's message with null or empty content, ids of nine characters.
Some support no tools at all. :class:`ToolTemplate` probes the template once, by rendering a short conversation, and
rewrites conversations accordingly. For a template without tools it puts their definitions into the system message, and
calls and results into plain messages, in Hermes' form, so that no tool is silently dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.types import TemporaryFailure

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str]
"""A template: messages and tools to text. Raises any exception to refuse them."""

HARMONY = "<|channel|>commentary"
"""Text that only gpt-oss's template has."""

NAME, KEY, VALUE, ID, RESULT = "probe_function", "probe_key", "probe_value", "call12345", "probe_result"
BROKEN_TEXT = "probe_broken"
BROKEN = f'{{"{KEY}": "{BROKEN_TEXT}'
"""Arguments of a truncated call."""
ENCODINGS = 3
"""Layers of JSON encoding of a call's arguments that are decoded."""
USER = {"role": "user", "content": "Hi."}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": "A key."}}},
    },
}

INSTRUCTIONS = """\
You can call these functions, each described by a JSON object:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between tags, one pair of tags for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
"""Tool instructions for a template that supports no tools."""


@dataclass(frozen=True)
class ToolTemplate:
    """The parts of a conversation with tools that a template can render.

    tools: definitions. calls: calls and results. objects: arguments as objects. empty: a call's content as an empty
    string instead of null. raw: arguments that are no object, as text that a model has truncated or broken; without it
    they become ``{}``. short_ids: ids must have nine letters and digits. harmony: gpt-oss, which takes one call per
    message, and reasoning as ``thinking``.
    """

    tools: bool = False
    calls: bool = False
    objects: bool = True
    empty: bool = False
    raw: bool = True
    short_ids: bool = False
    harmony: bool = False

    @classmethod
    def of(cls, text: str, render: Render) -> ToolTemplate:
        """Probe a template with this text."""
        tools = NAME in _try(render, [USER], [TOOL])
        short, harmony = "length 9" in text, HARMONY in text
        for objects in (True, False):
            for empty in (False, True):
                found = cls(tools, True, objects, empty, short_ids=short, harmony=harmony)
                written = _try(render, found.messages(_probe({KEY: VALUE}), None)[0], [TOOL] if tools else None)
                ok = VALUE in written and RESULT in written
                if ok and f"{{'{KEY}" not in written and f'\\"{KEY}' not in written:
                    broken = _try(render, found.messages(_probe(BROKEN), None)[0], [TOOL] if tools else None)
                    return replace(found, raw=BROKEN_TEXT in broken and RESULT in broken)
        return cls(tools, short_ids=short)

    def messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
        """A conversation and tools in the form that the template accepts.

        Input arguments are objects; content may be None.
        """
        if self.calls and self.harmony:
            messages = _one_call_each(messages)
        written = [self._message(message) for message in messages] if self.calls else _plain(messages)
        if tools and not self.tools:
            return _told(written, tools), None
        return written, tools

    def _message(self, message: Message) -> Message:
        if message["role"] == "tool" and self.short_ids:
            return {**message, "tool_call_id": _short(message["tool_call_id"])}
        if not message.get("tool_calls"):
            return message
        content = "" if message.get("content") is None and self.empty else message.get("content")
        return {**message, "content": content, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = dict(call["function"])
        arguments = arguments_object(function.get("arguments"))
        if isinstance(arguments, str) and not self.raw:
            arguments = {}
        if not self.objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = arguments
        written = {**call, "function": function}
        if "id" in call and self.short_ids:
            written["id"] = _short(call["id"])
        return written


NO_TOOLS = ToolTemplate()


def arguments_object(arguments: Any) -> dict[str, Any] | str:
    """A call's arguments as an object, or their text if they are none: a model may have truncated or broken them.

    JSON text is decoded, also an object that a client encoded more than once. Empty text and null are ``{}``.
    """
    value = arguments
    for _ in range(ENCODINGS):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            break
    if isinstance(value, Mapping):
        return dict(value)
    if value is None:
        return {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _probe(arguments: Any) -> list[Message]:
    """A conversation with a call and its result."""
    calls = [{"id": ID, "type": "function", "function": {"name": NAME, "arguments": arguments}}]
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": RESULT, "tool_call_id": ID, "name": NAME},
    ]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The conversation with one call per message, followed by its result, and reasoning as ``thinking``.

    gpt-oss's template renders either the reasoning or the content of a message with a call, as reasoning.
    """
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    written: list[Message] = []
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or []
        if message["role"] == "tool" and message.get("tool_call_id") in moved:
            continue
        if not calls:
            written.append(message)
            continue
        reasoning = [text for text in (message.get("reasoning_content"), message.get("content")) if text]
        rest = {name: message[name] for name in message if name not in ("reasoning_content", "content", "tool_calls")}
        for number, call in enumerate(calls):
            thinking = {"thinking": "\n\n".join(reasoning)} if reasoning and not number else {}
            written.append({**rest, **thinking, "content": None, "tool_calls": [call]})
            if len(calls) > 1 and (found := results.get(call.get("id"))) is not None:
                written.append(found)
                moved.add(call["id"])
    return written


def _try(render: Render, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The template's output; "" if it refuses."""
    try:
        return render(messages, tools)
    except TemporaryFailure:
        raise
    except Exception:  # the checkpoint's code
        return ""


def _short(value: str) -> str:
    """An id of nine letters and digits: ``value`` itself, or a hash of it."""
    if len(value) == 9 and value.isascii() and value.isalnum():
        return value
    return hashlib.sha256(value.encode()).hexdigest()[:9]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text, for a template that cannot render them; adjacent results become one message."""
    written: list[Message] = []
    for before, message in zip([{"role": ""}, *messages], messages, strict=False):
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before["role"] == "tool":
                text = f"{written.pop()['content']}\n{text}"
            written.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            texts = [message["content"]] if message.get("content") else []
            for call in message["tool_calls"]:
                arguments = arguments_object(call["function"].get("arguments"))
                call_id = {"name": call["function"]["name"], "arguments": arguments}
                texts.append(f"<tool_call>\n{json.dumps(call_id, ensure_ascii=False)}\n</tool_call>")
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            written.append({**rest, "content": "\n".join(texts)})
        else:
            written.append(message)
    return written


def _told(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the tools in its system message, which is added if there is none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=listed)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
