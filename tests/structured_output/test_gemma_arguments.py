"""Arguments in Gemma 4's form: what grammars allow, nested, recursive and free ones included."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.text_check import TextCheck
from unisono.text.tool_parsers.base import ParserContext, Tool
from unisono.text.tool_parsers.formats import NAMES
from unisono.text.tool_parsers.structure import Structure
from unisono.types import BadRequest

Q = '<|"|>'
LINK = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Link"}},
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a b": {"type": "string", "maxLength": 3},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "object": {
            "type": "object",
            "properties": {"n": {"type": ["number", "null"]}, "link": {"$ref": "#/$defs/Link"}},
            "required": ["n"],
        },
        "any": {},
        "one": {"enum": [1, "x", [1, {"k": None}]]},
        "word": {"type": "string", "pattern": "^[a-c]+$", "minLength": 2},
    },
    "required": ["list", "object"],
    "$defs": {"Link": LINK},
}
ALLOWED: dict[str, Any] = {
    "{list:[1],object:{n:1.5}}": {"list": [1], "object": {"n": 1.5}},
    "{list:[1,2],object:{n:null,link:{v:1,next:{next:{}}}}}": {
        "list": [1, 2], "object": {"n": None, "link": {"v": 1, "next": {"next": {}}}},
    },
    f"{{{Q}a b{Q}:{Q}x\"z{Q},list:[1],object:{{n:1}}}}": {"a b": 'x"z', "list": [1], "object": {"n": 1}},
    f"{{list:[1],object:{{n:1}},any:{{q:[{Q}s{Q},{{}},[]]}},one:[1,{{k:null}}]}}": {
        "list": [1], "object": {"n": 1}, "any": {"q": ["s", {}, []]}, "one": [1, {"k": None}],
    },
    f"{{list:[1],object:{{n:1}},any:true,word:{Q}abc{Q}}}": {
        "list": [1], "object": {"n": 1}, "any": True, "word": "abc",
    },
}  # fmt: skip
REFUSED = [
    "{object:{n:1},list:[1]}",  # not in the schema's order
    "{list:[],object:{n:1}}",
    "{list:[1,2,3],object:{n:1}}",
    "{list:[1],object:{}}",
    "{list:[1],object:{n:1,link:{v:1,next:{w:1}}}}",
    f"{{{Q}a b{Q}:{Q}long{Q},list:[1],object:{{n:1}}}}",
    "{list:[1],object:{n:1},one:2}",
    "{list:[1],object:{n:1},other:2}",
    f"{{list:[1],object:{{n:1}},word:{Q}a{Q}}}",
    f"{{list:[1],object:{{n:1}},word:{Q}xyz{Q}}}",
    '{list:[1],object:{n:1},one:"x"}',
]


def check(schema: dict[str, Any]) -> TextCheck:
    outputs = Structure(NAMES["gemma4"], {}).required([Tool("f", schema, strict=True)], parallel=False)
    return TextCheck("structural_tag", outputs.structural_tag)


def test_gemma_arguments_follow_the_schema_and_are_parsed() -> None:
    form = check(SCHEMA)
    for text, value in ALLOWED.items():
        call = f"<|tool_call>call:f{text}<tool_call|>"
        assert form.accepts(call), text
        (found,) = NAMES["gemma4"].parser(ParserContext([], str)).feed(call, last=True).calls
        assert json.loads(found.arguments) == value
    for text in REFUSED:
        assert not form.accepts(f"<|tool_call>call:f{text}<tool_call|>"), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {}}, ["{}", f"{{x:{Q}y{Q},z:[1]}}"], ["{x}", "{x:y}"]),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
          "additionalProperties": False}, ["{}", "{a:1}", "{b:true}", "{a:1,b:false}"], ["{b:true,a:1}", "{a:1,}"]),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
          "required": ["a"]}, ["{a:1}", f"{{a:{Q}1{Q}}}"], ["{a:null}"]),
        ({"type": "object", "properties": {"a": {"type": "array", "prefixItems": [{"const": 1}], "items": False}},
          "required": ["a"]}, ["{a:[]}", "{a:[1]}"], ["{a:[1,2]}", "{a:[2]}"]),
    ],
)  # fmt: skip
def test_small_schemas(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    form = check(schema)
    assert all(form.accepts(f"<|tool_call>call:f{text}<tool_call|>") for text in good)
    assert not any(form.accepts(f"<|tool_call>call:f{text}<tool_call|>") for text in bad)


def test_definitions_of_nested_objects_are_told_apart() -> None:
    """An inner object that refers to the second definition alone names it as the outer one names the first."""
    first, second = {"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^b+$"}
    inner = {"type": "object", "properties": {"y": {"$ref": "#/$defs/B"}}, "required": ["y"]}
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}, "i": inner},
        "required": ["x", "i"],
        "$defs": {"A": first, "B": second},
    }
    form = check(schema)
    assert form.accepts(f"<|tool_call>call:f{{x:{Q}aa{Q},i:{{y:{Q}bb{Q}}}}}<tool_call|>")
    assert not form.accepts(f"<|tool_call>call:f{{x:{Q}aa{Q},i:{{y:{Q}aa{Q}}}}}<tool_call|>")


def test_unsupported_gemma_argument_schemas_raise() -> None:
    with pytest.raises(BadRequest, match=r"anyOf.*stands beside"):
        check({"type": "object", "properties": {"a": {"minLength": 2, "anyOf": [{"type": "string"}, {"const": 1}]}}})
    with pytest.raises(BadRequest, match="enum"):
        check({"type": "object", "properties": {"a": {"enum": [Q]}}})
