"""JSON schemas: which texts each keyword takes, and which schemas are refused, by keyword and pointer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.text_check import TextCheck, accepts
from tests.structured_output.written import check_written
from unisono.types import BadRequest

B, N, S = {"type": "boolean"}, {"type": "integer"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": B, "b": B}, "additionalProperties": False}

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    # siblings of combinators: all hold
    "anyOf beside properties": (
        {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": true}', '{"b": false}', '{"a": true, "b": true}'], ["3", '"x"', "{}", '{"zz": 1}'],
    ),
    "properties beside anyOf": (
        {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"],
         "anyOf": [{"properties": {"a": B}, "required": ["a"]}]},
        ['{"k": "x", "a": true}'], ['{"a": true}', '{"k": "y", "a": true}'],
    ),
    "type beside oneOf": (
        {"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 4}]}, ['"ab"', '"abcd"'], ["3", '"abc"'],
    ),
    "bounds beside allOf": ({"type": "integer", "maximum": 5, "allOf": [{"minimum": 3}]}, ["3", "4"], ["1", "9"]),
    "allOf of two": ({"allOf": [{**N, "minimum": 3}, {**N, "maximum": 5}]}, ["4"], ['"x"', "6"]),
    "enum beside bounds": ({"enum": [1, "a", 7, None], **N, "maximum": 5}, ["1"], ["7", '"a"', "null"]),
    "const beside enum": ({"const": "a", "enum": ["a", "b"]}, ['"a"'], ['"b"']),
    "annotations beside $ref": ({"$ref": "#/$defs/x", "title": "t", "$defs": {"x": N}}, ["1"], ['"a"']),
    "keywords beside $ref": ({"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": N}}, ["3"], ["4", '"a"']),
    "not beside enum": ({"enum": ["a", "b"], "not": {"const": "a"}}, ['"b"'], ['"a"']),
    # references
    "anchor": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, ["5"], ['"5"']),
    "escaped pointers": (
        {"items": {"$ref": "#/$defs/a~1b%25~0c"}, "type": "array", "$defs": {"a/b%~c": N}}, ["[1]"], ['["1"]'],
    ),
    "identifiers": (
        {"$id": "https://x.example/a.json", "$ref": "b.json", "$defs": {"b": {"$id": "b.json", "type": "null"}}},
        ["null"], ["1"],
    ),
    "recursion": (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"n": {"n": {}}}'], ['{"n": 1}'],
    ),
    "definitions of draft 7": ({"$ref": "#/definitions/x", "definitions": {"x": N}}, ["2"], ["true"]),
    # logic
    "not of a number": ({"type": "integer", "not": {"const": 2}}, ["1", "3", "-2"], ["2"]),
    "not of a string": ({**S, "not": {"enum": ["ab", "a"]}}, ['""', '"b"', '"abc"', '"ac"'], ['"a"', '"ab"']),
    "not of a type": ({"not": {"type": ["string", "object"]}}, ["1", "[]", "null"], ['"a"', "{}"]),
    "not of required": ({**AB, "not": {"required": ["a", "b"]}}, ["{}", '{"a": true}'], ['{"a": true, "b": true}']),
    "if, then, else": (
        {"type": "object", "properties": {"a": B, "b": N},
         "if": {"properties": {"a": {"const": True}}, "required": ["a"]},
         "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
        ['{"a": true, "b": 1}', '{"a": false}', "{}"], ['{"a": true}', '{"a": false, "b": 1}', '{"b": 1}'],
    ),
    "oneOf by discriminator": (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: B}, "required": ["k", k]} for k in "xy"]},
        ['{"k": "x", "x": true}', '{"k": "y", "y": true}'], ['{"k": "x", "y": true}', '{"k": "z"}'],
    ),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 4}]},
                            ["1", "5"], ["2", "4"]),
    # strings
    "pattern and maxLength": ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 4}, ['"abcd"'], ['"abcde"', '""']),
    "pattern and minLength": ({"type": "string", "pattern": "^[a-z]*$", "minLength": 2}, ['"ab"'], ['""', '"a"']),
    "format and maxLength": ({"type": "string", "format": "email", "maxLength": 6}, ['"a@b.cd"'], ['"aaaaaa@bb.cc"']),
    "pattern anywhere": ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    "anchors in groups": ({"type": "string", "pattern": "(^a|b$)"}, ['"ax"', '"xb"'], ['"xa"']),
    "lookahead": ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, ['"a1"'], ['"ab"']),
    "quotes and backslashes": (
        {"type": "string", "pattern": '^C:\\\\"[a-z]$'}, ['"C:\\\\\\"x"'], ['"C:\\"x"', 'C:\\"x'],
    ),
    "control characters": ({"type": "string", "pattern": "^a\\nb\\u0001$"}, ['"a\\nb\\u0001"'], ['"a\nb\x01"']),
    "dates": ({"format": "date"}, ['"2024-02-29"', "1"], ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"']),
    "unknown formats": ({"type": "string", "format": "color"}, ['"x"'], ["1"]),
    # numbers
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, ["1.5", "-2"], ["1.3"]),
    "exclusive bounds of draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    # arrays
    "items of draft 7": (
        {"type": "array", "items": [N, B], "additionalItems": False}, ["[]", "[1, true]"], ["[true]", "[1, true, 1]"],
    ),
    "contains": ({"type": "array", "items": N, "contains": {"const": 7}}, ["[7]", "[1, 7, 2]"], ["[]", "[1]"]),
    "minContains and maxContains": (
        {"type": "array", "items": N, "contains": {"minimum": 5}, "minContains": 1, "maxContains": 2},
        ["[5]", "[1, 5, 2, 6, 1]"], ["[1]", "[5, 6, 7]"],
    ),
    "uniqueItems of an enum": (
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[]", "[2, 1]"], ["[1, 1]"]
    ),
    "unevaluatedItems": (
        {"type": "array", "allOf": [{"prefixItems": [N]}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"],
    ),
    # objects
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": true}', '{"a": true, "b": true}'],
                          ['{"a": true}']),
    "dependencies of draft 7": ({**AB, "dependencies": {"a": {"required": ["b"]}}}, ['{"b": true}'], ['{"a": true}']),
    "minProperties": ({**AB, "minProperties": 1}, ['{"b": true}'], ["{}"]),
    "minProperties, additional ones": ({"type": "object", "properties": {"a": B}, "minProperties": 1},
                                       ['{"a": true}', '{"x": 1}'], ["{}"]),
    "maxProperties": ({**AB, "maxProperties": 1}, ["{}", '{"a": true}'], ['{"a": true, "b": true}']),
    "propertyNames, a quote": ({"type": "object", "propertyNames": {"pattern": '^"$'}, "additionalProperties": B},
                               ['{"\\"": true}'], ['{""": true}', '{"a": true}']),
    "patternProperties, a quote": ({"type": "object", "patternProperties": {'^"$': B}, "additionalProperties": False},
                                   ['{"\\"": true}'], ['{""": true}']),
    "names that are spelt differently": ({"type": "object", "properties": {"a": N}}, ['{"a": 1, "b": "x"}'],
                                         ['{"\\u0061": "x"}', '{"a": "x"}']),
    "names that are spelt differently, beside control characters": (
        {"type": "object", "properties": {"a": N, "c": {"const": "\u0001"}}},
        ['{"a": 1, "b": "x"}', '{"c": "\\u0001"}'], ['{"\\u0061": "x"}', '{"c": "\\u0002"}', '{"c": ""}'],
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": B}}], "properties": {"b": B}, "unevaluatedProperties": False},
        ['{"b": true, "a": true}'], ['{"c": 1}'],
    ),
    "boolean schemas": ({"type": "object", "properties": {"a": False, "b": True}}, ['{"b": []}'], ['{"a": 1}']),
    "unknown keywords": ({"type": "integer", "colour": "red", "x-order": 3}, ["1"], ['"a"']),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES.values(), ids=list(CASES))
def test_keywords(schema: Any, valid: list[str], invalid: list[str]) -> None:
    form = TextCheck("json", schema)
    assert [form.accepts(text) for text in valid] == [True] * len(valid)
    assert [form.accepts(text) for text in invalid] == [False] * len(invalid)


REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at #", "leave it out"),
    ({"properties": {"a/b": {"pattern": r"(a)\1"}}}, "'pattern' at #/properties/a~1b", "back reference"),
    ({"items": {"pattern": "^(?!x)y"}}, "'pattern' at #/items", "negative lookahead"),
    ({"anyOf": [True, {"format": "iri"}]}, "'format' at #/anyOf/1", "use pattern"),
    ({"not": {"pattern": "a"}}, "'not' at #/not", "pattern"),
    ({"if": {"pattern": "a"}, "then": {"minLength": 2}}, "'if' at #/if", "anyOf"),
    ({"$ref": "https://elsewhere.example/x"}, "'$ref' at #", "nothing is fetched"),
    ({"$ref": "#/$defs/none"}, "'$ref' at #", "does not exist"),
    ({"type": "object", "minProperties": 2}, "'minProperties' at #", "required"),
    ({"type": "number", "minimum": 2**60}, "'minimum' at #", "53 bits"),
    ({"enum": [2**60]}, "'enum' at #", "53 bits"),
    ({"type": "number", "multipleOf": 1e-12}, "'multipleOf' at #", "digits"),
    (
        {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": B}}, True]},
        "'unevaluatedProperties' at #",
        "anyOf",
    ),
    (
        {"unevaluatedProperties": False, "anyOf": [True, {"not": {"not": {"properties": {"a": B}}}}]},
        "'unevaluatedProperties' at #",
        "anyOf",
    ),
    ({"unevaluatedItems": False, "anyOf": [{"prefixItems": [B]}, True]}, "'unevaluatedItems' at #", "anyOf"),
    (
        {"unevaluatedItems": False, "anyOf": [True, {"not": {"not": {"prefixItems": [B]}}}]},
        "'unevaluatedItems' at #",
        "anyOf",
    ),
    ({"type": "object", "patternProperties": {"a": N, "b": S}}, "'patternProperties'", "disjoint"),
    ({"divisibleBy": 2}, "'divisibleBy' at #", "use multipleOf"),
    ({"type": "wibble"}, "'type' at #", "wibble"),
    ({"minLength": -1}, "'minLength' at #", "whole number"),
    ({"properties": 5}, "'properties' at #", "object"),
    # no value satisfies these
    ({"$ref": "#"}, "'$ref' at #", "itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "at #", "no value satisfies it"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "at #", "no value satisfies it"),
    ({"enum": ["a"], "type": "integer"}, "at #", "no value satisfies it"),
    ({"not": {}}, "at #", "no value satisfies it"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "", "no value satisfies it"),
    ({"allOf": [N, S]}, "", "no value satisfies it"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "", "no value satisfies it"),
]


@pytest.mark.parametrize(("schema", "where", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_the_keyword_its_pointer_and_the_way_out(schema: Any, where: str, says: str) -> None:
    with pytest.raises(BadRequest, match="cannot be compiled") as caught:
        TextCheck("json", schema)
    assert where in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_branch_that_never_ends_is_not_begun() -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/e"}}, "required": ["x"]}
    form = TextCheck("json", {"anyOf": [N, {"$ref": "#/$defs/e"}], "$defs": {"e": endless}})
    assert form.accepts("3")
    matcher = form.matcher()
    assert not matcher.try_consume_tokens(list(b"{"))


def test_blanks() -> None:
    schema = {"type": "object", "properties": {"a": N}, "required": ["a"]}
    assert accepts("json", schema, "{" + " " * 20 + '"a": 1}')
    assert not accepts("json", schema, "{" + " " * 21 + '"a": 1}')
    assert not TextCheck("json", schema, compact=True).accepts('{"a": 1}')
    assert TextCheck("json", schema, compact=True).accepts('{"a":1}')
    assert accepts("json_object", True, '{"x": [1, {"y": null}]}')
    assert not accepts("json_object", True, "[]")


REGEXES: list[tuple[str, list[str], list[str]]] = [
    (r"\Aabc\Z", ["abc"], ["AabcZ", "ab"]), (r"^abc$", ["abc"], ["xabc"]), (r"\d{2}|x", ["12", "x"], ["1", "1x"]),
    (r"(?P<y>[0-9]+)-(?:a|b)", ["12-a"], ["12-c"]), (r"(?i)yes", ["YES", "yes"], ["no"]), (r"a.c", ["abc"], ["a\nc"]),
    (r"(?s)a.c", ["a\nc"], ["ac"]), (r"[]a]+", ["]a"], ["b"]), (r"a{,2}", ["", "aa"], ["aaa"]), (r"\S+", ["a"], [" "]),
    (r"(?!foo)[a-z]+", ["bar", "fo"], ["foo", "foobar"]), (r"(?=.*\d)\w+", ["a1"], ["ab"]), (r"a*?b", ["aab"], ["aa"]),
    (r"\x41\u00e9/\.", ["Aé/."], ["A"]), (r"[\w-]+", ["a-b"], ["a b"]), (r"a|b[^\s\S]", ["a"], ["b"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "matching", "other"), REGEXES, ids=[row[0] for row in REGEXES])
def test_expressions(pattern: str, matching: list[str], other: list[str]) -> None:
    form = TextCheck("regex", pattern)
    assert [form.accepts(text) for text in matching] == [True] * len(matching)
    assert [form.accepts(text) for text in other] == [False] * len(other)


@pytest.mark.parametrize(
    "pattern",
    ["a^b", "a$b", r"\Gab", r"a\b", r"(a)\1", "a*+", "(?>a)", "(?<=a)b", r"\h", "(?m)^a", "x(?=a)", "(a", "a)", "*a",
     "[a", "[z-a]", "a{3,2}", "[[:alpha:]]", r"[^\s\S]", r"\k<x>"],
)  # fmt: skip
def test_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(BadRequest, match=r"structured_outputs\.regex cannot be compiled"):
        TextCheck("regex", pattern)


def test_choices() -> None:
    form = TextCheck("choice", ["a", "ab", 'q"\\\n'])
    assert [form.accepts(text) for text in ("a", "ab", 'q"\\\n', "b", "aba")] == [True, True, True, False, False]


# ---- everything that masks allow is valid -------------------------------------------------------------


def test_texts_that_masks_allow_are_valid() -> None:
    chance = random.Random(0)
    found = 0
    for name, (schema, _, _) in CASES.items():
        if not name.startswith(("unevaluated", "identifiers")):
            found += check_written(schema, TextCheck("json", schema), chance, 4)
    assert found > 100


def test_a_long_enum_is_read_in_one_pass() -> None:
    """8,000 values took 13 s when each was compared with all others."""
    form = TextCheck("json", {"enum": [f"v{i}" for i in range(8_000)]})
    assert form.accepts('"v7999"')
    assert not form.accepts('"v8000"')
