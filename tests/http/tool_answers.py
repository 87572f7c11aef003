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
    "hermes a mark twice": (
        "hermes",
        '\n<tool_call><tool_call>{"name": "now"}</tool_call>',
        ("\n<tool_call>", [("now", "{}")]),
    ),
    "hermes broken before a call": (
        "hermes",
        '<tool_call>{now}\n<tool_call>{"name": "now", "arguments": null}</tool_call>',
        ("<tool_call>{now}", [("now", "{}")]),
    ),
    "hermes two names": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}, "name": "later", "name": 3}</tool_call>',
        ("", [("now", "{}")]),
    ),
    "hermes blanks only": ("hermes", " \n\xa0", (" \n\xa0", [])),
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
    "mistral broken": (
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {"a": "é🙂"}}, {"name"oops',
        ('{"name"oops', [("now", '{"a": "é🙂"}')]),
    ),
    "mistral a mark alone": ("mistral", "So: [TOOL_CALLS]", ("So: ", [])),
    "mistral text": ("mistral", "[TOOL_CALL] no", ("[TOOL_CALL] no", [])),
    "deepseek_v3": (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city":"Os\\"lo }"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("Hm.", [PARIS, OSLO]),
    ),
    "kimi_k2": (
        "kimi_k2",
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|>\n<|tool_call_begin|>functions.get_weather:1'
        '<|tool_call_argument_begin|>{"city":"Os\\"lo }"}<|tool_call_end|><|tool_calls_section_end|>',
        ("Hm.", [PARIS, OSLO]),
    ),
    "kimi_k2 without a number": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|> get_weather <|tool_call_argument_begin|> "
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ("", [("get_weather", ' {"city": "Paris", "days": 2}')]),
    ),
    "openai": (
        "openai",
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
        ("Let me look.", [PARIS]),
    ),
    "openai recipient after the role": (
        "openai",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}',
        ("", [PARIS]),
    ),
    "openai two": (
        "openai",
        '<|channel|>commentary to=get_weather<|message|>{"city": "Paris", "days": 2}<|end|>\n<|start|>assistant '
        'to=functions.get_weather<|channel|>analysis code<|message|>{"city":"Os\\"lo }"}<|call|>\n'
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>",
        ("", [PARIS, OSLO, ("now", "{}")]),
    ),
    "openai a broken mark": (
        "openai",
        " to=functions.now<|chan<|channel|>final<|message|>Hm.",
        (" to=functions.now<|chan\nHm.", []),
    ),
    "openai blanks before a header": ("openai", "Hm. \n<|start|>assistant<|chann", ("Hm. \n", [])),
    "openai text": ("openai", "to <|channel|>final<|message|> a < b <|start|", ("to \n a < b <|start|", [])),
    "openai to others": (
        "openai",
        "<|channel|>analysis to=browser.search code<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes.<|return|>",
        ("{}\nYes.", []),
    ),
    "openai cut": (
        "openai",
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Pa',
        ("", [("get_weather", '{"city": "Pa')]),
    ),
    "openai cut in a header": ("openai", "Hm.<|start|>assistant<|channel|>commentary to=functions.get", ("Hm.", [])),
    "glm45": (
        "glm45",
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ("Sure.", [PARIS]),
    ),
    "glm45 in one line": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12 <b>\n</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["a"]</arg_value></tool_call><tool_call>now</tool_call> done',
        ("done", [("get_weather", '{"city": "12 <b>\\n", "tags": ["a"]}'), ("now", "{}")]),
    ),
    "glm45 text": (
        "glm45",
        "A <tool_call> is a mark, <tool_call>x y. <tool_call>now",
        ("A <tool_call> is a mark, <tool_call>x y. <tool_call>now", []),
    ),
    "glm45 cut": (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>da",
        ("", [("get_weather", '{"city": "Paris"')]),
    ),
    "granite": (
        "granite",
        'So: <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city":"Os\\"lo }"}}]',
        ("So:", [PARIS, OSLO]),
    ),
    "granite other": (
        "granite",
        '<tool_call> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
        ("", [PARIS]),
    ),
    "granite text after a call": (
        "granite",
        '<tool_call>{"name": "now", "arguments": {}}🙂 <tool_call>{"name": "now"}',
        ("🙂", [("now", "{}"), ("now", "{}")]),
    ),
    "granite text": ("granite", "<|tool_call|> no <tool", ("<|tool_call|>no <tool", [])),
    "internlm": (
        "internlm",
        'Hm.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}'
        '<|action_end|>\n<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city":"Os\\"lo }"}}'
        "<|action_end|>",
        ("Hm.", [PARIS, OSLO]),
    ),
    "internlm text": ("internlm", "<|action_start|> no", ("<|action_start|> no", [])),
    "gemma4": (
        "gemma4",
        'Sure.\n<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        ("Sure.", [PARIS]),
    ),
    "gemma4 two": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>, days: 2}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|> done",
        ("done", [PARIS, ("now", "{}")]),
    ),
    "gemma4 nested": (
        "gemma4",
        '<|tool_call>call:get_weather{tags:[<|"|>a "b"\n<|"|>,<|"|><|"|>,[],{x:[1,{}]}],note:null,code:<|"|>{[,:<|'
        '<tool_call|><|"|>,<|"|>odd key:<|"|>:-1.5e3,flag:true}<tool_call|>',
        (
            "",
            [
                (
                    "get_weather",
                    '{"tags": ["a \\"b\\"\\n", "", [], {"x": [1, {}]}], "note": null, "code": "{[,:<|<tool_call|>"'
                    ', "odd key:": -1.5e3, "flag": true}',
                )
            ],
        ),
    ),
    "gemma4 bare words": (
        "gemma4",
        '<|tool_call>call:get_weather{city:Os lo,days:007,note:None,unit:NaN,code:"x",tags:}<tool_call|>',
        (
            "",
            [("get_weather", '{"city": "Os lo", "days": "007", "note": null, "unit": "NaN", "code": "x", "tags": ""}')],
        ),
    ),
    "gemma4 open brackets": (
        "gemma4",
        "<|tool_call>call:f{a:[1,{b:2<tool_call|><|tool_call>call:g{x:1}}<|tool_call>call:h{word}",
        ("}", [("f", '{"a": [1, {"b": 2}]}'), ("g", '{"x": 1}'), ("h", "{}")]),
    ),
    "gemma4 text": (
        "gemma4",
        "A <|tool_call> is a mark, <|tool_call>calls are none. <|tool_call>call:now",
        ("A <|tool_call> is a mark, <|tool_call>calls are none. <|tool_call>call:now", []),
    ),
    "gemma4 cut": (
        "gemma4",
        '<|tool_call>call:get_weather{days:2,city:<|"|>Pa',
        ("", [("get_weather", '{"days": 2, "city": "Pa')]),
    ),
    "pythonic": ("pythonic", "[get_weather(city='Paris', days=2)]", ("", [PARIS])),
    "pythonic two": (
        "pythonic",
        " <|python_start|>[get_weather(city='Paris', days=2),\nget_weather( city = \"Os'lo (,)\", code=None , tags="
        "['a', {'b': True}] ), now()]<|python_end|> done",
        (
            "done",
            [
                PARIS,
                ("get_weather", '{"city": "Os\'lo (,)", "code": null, "tags": ["a", {"b": true}]}'),
                ("now", "{}"),
            ],
        ),
    ),
    "pythonic odd values": (
        "pythonic",
        "[get_weather('Paris', 2, note=x.y(1, 2), unit=true, tags=('a',), code='it\\'s'), now()]",
        (
            "",
            [
                (
                    "get_weather",
                    '{"city": "Paris", "days": 2, "note": "x.y(1, 2)", "unit": true, "tags": ["a"], "code": "it\'s"}',
                ),
                ("now", "{}"),
            ],
        ),
    ),
    "pythonic blanks in a call": ("pythonic", "[now \n(city='x')]", ("", [("now", '{"city": "x"}')])),
    "pythonic text": ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", [])),
    "pythonic other text": ("pythonic", " I say [f(x=1)]", (" I say [f(x=1)]", [])),
    "pythonic cut": ("pythonic", "[get_weather(city='Paris', da", ("", [("get_weather", '{"city": "Paris"')])),
    "deepseek_v31 a mark alone": ("deepseek_v31", "\n<｜tool▁calls▁begin｜>", ("\n", [])),
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


def put_together(chunks: Any) -> tuple[str, list[Any], str | None]:
    """(content, calls, finish reason) of a stream's first choice, as OpenAI's clients put it together."""
    content, calls, finish = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            content, finish = content + (choice.delta.content or ""), choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert (call.type, call.index) == ("function", len(calls))
                    calls.append([call.id, call.function.name, ""])
                else:
                    assert call.function.name is None
                calls[call.index][2] += call.function.arguments or ""
    return content, calls, finish
