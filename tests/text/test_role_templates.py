"""Conversations that a chat template refuses, or would silently shorten, are rewritten; all others stay as they are."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from unisono.text.templates.roles import RoleTemplate, merged_leading
from unisono.text.templates.tools import ToolTemplate, arguments_object

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Qwen 3.5's rule."""
SILENT = "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}" + (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""gpt-oss drops later system messages without a word."""
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Gemma 2's rule."""
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if rest is not sameas messages %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Mistral's rule."""
ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def renderer(text: str) -> Any:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    template = jinja2.Environment().from_string(text)
    return lambda messages, tools=None: template.render(messages=messages, tools=tools, raise_exception=refuse)


def written(text: str, *turns: tuple[str, Any]) -> str:
    """The prompt of a conversation, with a template's rules found by probes."""
    render = renderer(text)
    messages = merged_leading([{"role": role, "content": content} for role, content in turns])
    return render(RoleTemplate.of(render).messages(messages))


S, U, A = "system", "user", "assistant"
CODEX = ((S, "instructions"), (S, "developer"), (U, "x"))
CLAUDE = ((S, "a"), (U, "x"), (S, "b"), (A, "y"), (U, "z"))
REPEATS = ((U, "x"), (U, "y"), (A, "a"), (A, "b"), (U, "z"))


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (ANY, CODEX, "<system>instructions\n\ndeveloper<user>x"),
        (STRICT, CODEX, "<system>instructions\n\ndeveloper<user>x"),
        (NO_SYSTEM, CODEX, "<user>instructions\n\ndeveloper\n\nx"),
        (ANY, CLAUDE, "<system>a<user>x<system>b<assistant>y<user>z"),
        (STRICT, CLAUDE, "<system>a\n\nb<user>x<assistant>y<user>z"),
        (SILENT, CLAUDE, "<system>a\n\nb<user>x<assistant>y<user>z"),
        (NO_SYSTEM, CLAUDE, "<user>a\n\nb\n\nx<assistant>y<user>z"),
        (STRICT, CLAUDE[1:], "<system>b<user>x<assistant>y<user>z"),
        (ANY, REPEATS, "<user>x<user>y<assistant>a<assistant>b<user>z"),
        (STRICT, REPEATS, "<user>x<user>y<assistant>a<assistant>b<user>z"),
        (NO_SYSTEM, REPEATS, "<user>x\n\ny<assistant>a\n\nb<user>z"),
        (ALTERNATING, REPEATS, "<user>x\n\ny<assistant>a\n\nb<user>z"),
        (ALTERNATING, CLAUDE, "<system>a\n\nb<user>x<assistant>y<user>z"),
        (STRICT, ((S, ""), (S, "b"), (U, "x")), "<system>b<user>x"),
        (STRICT, ((S, ""), (S, ""), (U, "x")), "<system><user>x"),
        (STRICT, ((S, "a"), (S, "b")), "<system>a\n\nb"),
        ("{{ raise_exception('no') if messages | length > 3 }}{{ messages | length }}", REPEATS[:3], "3"),
    ],
)
def test_sequences_of_roles(template: str, turns: Any, expected: str) -> None:
    assert written(template, *turns) == expected


def test_merged_messages_keep_their_parts() -> None:
    """Pictures stay in their place, reasoning and calls stay with the message."""
    image, call = {"type": "image"}, {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": U, "content": [image, {"type": "text", "text": "one"}]},
        {"role": U, "content": "two"},
        {"role": A, "content": "", "reasoning_content": "hm"},
        {"role": A, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "s", "tool_call_id": "2"},
    ]
    assert RoleTemplate(repeats=False).messages(messages) == [
        {"role": U, "content": [image, {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": A, "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        *messages[4:],
    ]
    assert RoleTemplate().messages(messages) is messages
    calls = [{"role": A, "content": None, "tool_calls": [call]}] * 2
    assert RoleTemplate(repeats=False).messages(calls) == [{"role": A, "content": None, "tool_calls": [call, call]}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1}), ("", {}), (None, {}), ("null", {}),
        ('"null"', {}), ('"\\"{}\\""', {}), ('{"a": "cut', '{"a": "cut'), ("[1]", "[1]"), ("3", "3"), ("true", "true"),
        ('"text"', '"text"'), ("[" * 100_000, "[" * 100_000), ("9" * 5000, "9" * 5000), ([1], "[1]"), (3, "3"),
    ],
)  # fmt: skip
def test_arguments_as_an_object(arguments: Any, value: Any) -> None:
    assert arguments_object(arguments) == value


ITEMS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{% endfor %}"
)
DUMPED = ITEMS.replace(
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}", " {{ c.function.arguments }}"
)


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (ITEMS, '{"x": "cut', "[f]"), (ITEMS, "[1]", "[f]"), (ITEMS, '"{\\"x\\": 1}"', "[f x=1]"),
        (ITEMS, "null", "[f]"), (DUMPED, '{"x": "cut', '[f {"x": "cut]'), (DUMPED, "[1]", "[f [1]]"),
        (DUMPED, '"{\\"x\\": 1}"', '[f {"x": 1}]'),
    ],
)  # fmt: skip
def test_broken_arguments_as_a_template_takes_them(template: str, arguments: str, expected: str) -> None:
    """``{}`` where the template goes through an object, else the text itself."""
    render = renderer(template)
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages: list[Any] = [{"role": A, "content": None, "tool_calls": calls}]
    found = ToolTemplate.of(template, render)
    assert found.calls
    assert render(found.messages(messages, None)[0]) == expected
