"""Every form of tool calls: answers are read the same wherever pieces cut them, and grammars write what is read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.http.conftest import ROOT
from tests.http.tool_answers import CASES, WEATHER, Call
from unisono.text.reasoning import PARSERS
from unisono.text.tool_parsers.base import ParserContext, Tool, ToolDelta
from unisono.text.tool_parsers.formats import ALIASES, FORMATS, NAMES, format_named, format_of
from unisono.text.tool_parsers.qwen3_coder import typed
from unisono.text.tool_parsers.structure import Structure
from unisono.types import ConfigError

TOOLS = [Tool("get_weather", WEATHER, strict=True), Tool("now", {"type": "object", "properties": {}})]


def read(form: str, pieces: list[str], parallel: bool = True, ends: bool = False) -> tuple[str, list[Call]]:
    """(content, calls) of an answer that comes in pieces. ends: the last one is known to be the last."""
    reader = NAMES[form].parser(ParserContext(TOOLS, lambda number: f"id{number}", parallel))
    found = [reader.feed(piece, ends and place == len(pieces) - 1) for place, piece in enumerate(pieces)]
    found += [] if ends else [reader.feed("", last=True)]
    calls: list[list[str]] = []
    for delta in (delta for one in found for delta in one.calls):
        assert isinstance(delta, ToolDelta)
        if delta.name is not None:
            own = f"functions.{delta.name}:{len(calls)}"  # Kimi's ids are the model's
            assert delta.id == (own if form == "kimi_k2" else f"id{len(calls)}")
            calls.append([delta.name, ""])
        assert delta.index == len(calls) - 1, "calls come one after the other"
        calls[-1][1] += delta.arguments
    return "".join(one.content for one in found), [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES)
def test_tool_call_parsing_is_independent_of_delta_boundaries(case: str) -> None:
    form, answer, expected = CASES[case]
    for ends in (False, True):
        assert read(form, [answer], ends=ends) == expected
        assert read(form, list(answer), ends=ends) == expected
    for place in range(len(answer)):
        assert read(form, [answer[:place], answer[place:]]) == expected
    dice = random.Random(case)
    for _ in range(200):
        cuts = sorted(dice.choices(range(len(answer)), k=dice.randint(2, 12)))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(form, pieces, ends=dice.random() < 0.5) == expected


@pytest.mark.parametrize("case", [name for name, (_, _, (_, calls)) in CASES.items() if len(calls) > 1])
def test_parallel_false_returns_one_call(case: str) -> None:
    form, answer, (_, calls) = CASES[case]
    for pieces in ([answer], list(answer)):
        assert read(form, pieces, parallel=False)[1] == calls[:1]


def test_arguments_come_as_they_are_written() -> None:
    """Not only when the call is complete."""
    for form in (
        "hermes",
        "llama3_json",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "granite",
        "internlm",
        "openai",
    ):
        _, answer, _ = CASES[form]
        reader = NAMES[form].parser(ParserContext(TOOLS, str))
        given = [[d.arguments for d in reader.feed(char).calls] for char in answer]
        assert sum(bool("".join(one)) for one in given) > 20, form
    reader = NAMES["gemma4"].parser(ParserContext(TOOLS, str))
    reader.feed('<|tool_call>call:get_weather{city:<|"|>')
    assert ["".join(delta.arguments for delta in reader.feed(char).calls) for char in 'a"b'] == ["a", '\\"', "b"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("specials", [False, True])
def test_grammar_conforming_calls_are_parsed(form: Any, specials: bool) -> None:
    """Calls are walked through the structure's own parts; tokens stand for their marks."""
    ids = {mark: 1000 + i for i, mark in enumerate(form.marks)} if specials else {}
    texts = {i: mark for mark, i in ids.items()}
    asked = Structure(form, ids).required(TOOLS, parallel=True)
    tag = json.loads(asked.structural_tag)["format"]

    numbers: list[int] = []

    def written(one: dict[str, Any], more: bool) -> str:
        match one["type"]:
            case "const_string":
                assert not any(mark in one["value"] for mark in ids), "a special token is no text"
                return one["value"]
            case "token":
                return texts[one["token"]]
            case "json_schema":
                if one.get("style") == "python":
                    return 'city="Paris", days=2'
                if one.get("style") == "gemma":
                    return '{city:<|"|>Paris<|"|>,days:2}'
                if one.get("style") == "glm_xml":
                    pairs = {"city": "Paris", "days": "2"}.items()
                    return "\n".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in pairs)
                if one.get("style") == "qwen_xml":
                    return "<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>"
                return '{"city": "Paris", "days": 2}'
            case "or":
                return written(one["elements"][0], more)
            case "regex":
                numbers.append(len(numbers))
                return str(numbers[-1])
            case "optional":
                text = written(one["content"], more)
                return text if not text.startswith(", ") or "days=" in text else ""
            case "repeat":
                return written(one["content"], more) if more else ""
        return "".join(written(part, more) for part in one["elements"])

    for more in (False, True):
        numbers.clear()
        content, calls = read(form.name, list(written(tag, more)))
        assert (content, calls) == ("", [("get_weather", '{"city": "Paris", "days": 2}')] * (1 + more))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"), ("1", {"type": "integer"}, 1), ("1", {"type": "number"}, 1),
        ("true", {"type": "string"}, "true"), ("True", {"type": "boolean"}, True), ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"), ("null", {"type": ["string", "null"]}, None), ("[1]", {}, [1]),
        ("a b", {}, "a b"), (" x ", {"type": "string"}, " x "), (" x ", {"enum": ["x", 1]}, "x"),
        (" 1 ", {"enum": ["x", 1]}, 1), ("1", {"const": "1"}, "1"),
        (" aa\n", {"type": "string", "pattern": "a+"}, "aa"),
        ('{"a": [', {"type": "object"}, '{"a": ['), ("5", {"allOf": [{"$ref": "#/$defs/T"}]}, "5"),
    ],
)  # fmt: skip
def test_values_of_xml_parameters(text: str, schema: dict[str, Any], value: Any) -> None:
    found = typed(text, {"properties": {"k": schema}, "$defs": {"T": {"type": "string"}}}, "k")
    assert (found, type(found)) == (value, type(value))


def test_a_schema_that_refers_to_itself() -> None:
    assert typed("x", {"properties": {"k": {"$ref": "#/properties/k"}}}, "k") == "x"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=k>", "qwen3_coder"),
        ("<|python_tag|>", "llama3_json"),
        ('{"name": , "parameters": } <|eot_id|>', "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]name[ARGS]", "mistral_v11"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<tool_call>name<arg_key>", "glm45"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call|> <|start_of_role|>", "granite"),
        ("<|action_start|><|plugin|>", "internlm"),
        ('<|tool_call>call: <|"|>', "gemma4"),
        ("[func_name1(params_name1=params_value1)] <|python_tag|>", "pythonic"),
        ("<|python_start|>", "pythonic"),
        ("<|channel|>analysis<|message|> <|channel|>commentary <tool_call>", "openai"),
        ("<function_calls>", None),
        ("{{ messages }}", None),
    ],
)
def test_tool_format_is_detected_from_the_template(template: str, name: str | None) -> None:
    found = format_of(template)
    assert (found and found.name) == name


def test_names_of_forms() -> None:
    assert format_named(None) is None
    assert format_named("qwen25") is NAMES["hermes"]
    assert format_named("openai") is format_named("gpt_oss") is format_named("gpt-oss")
    with pytest.raises(ConfigError, match=r"'wibble'.*hermes.*mistral"):
        format_named("wibble")


def test_the_page_has_every_name() -> None:
    page = (ROOT / "docs/guide/tools.md").read_text()
    for form in FORMATS:
        (line,) = [one for one in page.splitlines() if one.startswith(f"| `{form.name}` |")][:1]
        others = {name.strip() for name in line.split("|")[3].split(",")} - {""}
        assert others == {name for name, of in ALIASES.items() if of == form.name}
    assert all(f"`{name}`" in page for name in PARSERS)
