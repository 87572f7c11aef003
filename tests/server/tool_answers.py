"""Answers in every form of tool calls, and what they say: shared by the tests of tools."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "code": {"$ref": "#/$defs/Code"},
    },
    "$defs": {"Code": {"type": "string", "pattern": "[0-9]+"}},
}

Call = tuple[str, str]
PARIS, OSLO = ("get_weather", '{"city": "Paris", "days": 2}'), ("get_weather", '{"city":"Os\\"lo }"}')

# form, answer -> content, calls
CASES: dict[str, tuple[str, str, tuple[str, list[Call]]]] = {
    "hermes": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        ("Let me look.", [PARIS]),
    ),
    "hermes two": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>\n\n<tool_call>\n'
        '{"arguments": {"city":"Os\\"lo }"}, "name": "get_weather"}\n</tool_call>\n',
        ("", [PARIS, OSLO]),
    ),
    "hermes marks in a string": (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"x": "</tool_call> {[<tool_call>"}}</tool_call> done',
        ("done", [("say", '{"x": "</tool_call> {[<tool_call>"}')]),
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "say", "arguments": "{\\"x\\": 1}"}</tool_call>',
        ("", [("say", '{"x": 1}')]),
    ),
    "hermes no arguments": (
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>',
        ("", [("now", "{}"), ("now", "{}")]),
    ),
    "hermes cut": (
        "hermes",
        'Yes \n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
        ("Yes", [("get_weather", '{"city": "Pa')]),
    ),
    "hermes no name": (
        "hermes",
        'A <tool_call> is a mark.</tool_call> So <tool_cal> is not. <tool_call>{"na',
        ('A <tool_call> is a mark.</tool_call> So <tool_cal> is not. <tool_call>{"na', []),
    ),
    "hermes between": (
        "hermes",
        'a \n<tool_call>{"name": "f"}</tool_call> b \n<tool_call>{"name": "g"}</tool_call>\n c\n',
        ("a\nb\nc", [("f", "{}"), ("g", "{}")]),
    ),
    "hermes broken": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call> Well.',
        ("Well.", [("f", '{"a": 1}oops}')]),
    ),
    "plain": ("hermes", " One < two <b> \n", (" One < two <b> \n", [])),
    "qwen3_coder": (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        ("Sure.", [PARIS]),
    ),
    "qwen3_coder types": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        '<parameter=unit>\nC\n</parameter>\n<parameter=tags>\n["a", "<b>"]\n</parameter>\n<parameter=code>\n 07 \n'
        "</parameter>\n</function>\n</tool_call>",
        ("", [("get_weather", '{"city": "12", "note": null, "unit": "C", "tags": ["a", "<b>"], "code": "07"}')]),
    ),
    "qwen3_coder text": (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nline "one"\n\n  <two>\n\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("", [("get_weather", '{"city": "line \\"one\\"\\n\\n  <two>\\n"}'), ("now", "{}")]),
    ),
    "qwen3_coder sloppy": (
        "qwen3_coder",
        "Ok <function=get_weather><parameter=city>Paris<parameter=days>2</parameter></function> <tool_call> is a mark",
        ("Ok\n<tool_call> is a mark", [PARIS]),
    ),
    "llama3_json": (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        ("", [PARIS]),
    ),
    "llama3_json two": (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"type": "function", "name": "get_weather", "parameters": {"city":"Os\\"lo }"}}',
        ("", [PARIS, OSLO]),
    ),
    "llama3_json other": ("llama3_json", '{"pens": {"name": 51}} it is', ('{"pens": {"name": 51}} it is', [])),
    "llama3_json text": ("llama3_json", ' I say {"name": "x"}', (' I say {"name": "x"}', [])),
    "mistral": (
        "mistral",
        'So: [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city":"Os\\"lo }"}}]',
        ("So:", [PARIS, OSLO]),
    ),
    "mistral v11": (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]get_weather{"city":"Os\\"lo }"}',
        ("", [PARIS, OSLO]),
    ),
    "mistral text": ("mistral", "[TOOL_CALL] no", ("[TOOL_CALL] no", [])),
    "deepseek_v3": (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city":"Os\\"lo }"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("Hm.", [PARIS, OSLO]),
    ),
    "deepseek_v31": (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":"Os\\"lo }"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", [PARIS, OSLO]),
    ),
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A definition in OpenAI's form."""
    function = {"name": name, "description": f"Does {name}.", **more}
    return {"type": "function", "function": function | ({"parameters": parameters} if parameters is not None else {})}
