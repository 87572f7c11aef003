"""Structural tags in the public form of xgrammar and vLLM: which texts match, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.text_check import TextCheck
from unisono.types import BadRequest

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAG = {"type": "tag", "begin": "<n>", "content": NUMBER, "end": "</n>"}
OTHER = {"type": "tag", "begin": "<nn>", "content": {"type": "any_text"}, "end": ["</nn>", "<end>"]}
ARGUMENTS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "sequence, or, regex": (
        {"type": "sequence", "elements": [
            text("a"), {"type": "or", "elements": [text("b"), {"type": "regex", "pattern": "c+"}]},
        ]},
        ["ab", "accc"], ["a", "abc", ""],
    ),
    "an expression before what it would take": (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]+"}, text("ab")]},
        ["xab", "abab"], ["ab", "xa"],
    ),
    "optional, star, plus, repeat": (
        {"type": "sequence", "elements": [
            {"type": "optional", "content": text("o")}, {"type": "star", "content": text("s")},
            {"type": "plus", "content": text("p")}, {"type": "repeat", "min": 1, "max": 2, "content": text("r")},
        ]},
        ["pr", "osspprr"], ["o", "prrr", "or"],
    ),
    "tag": (OTHER, ["<nn>any <x> text</nn>", "<nn><end>"], ["<nn>a", "<nn>a</nn>b", "<nn>a</nn>b</nn>"]),
    "triggered tags": (
        {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG, OTHER]},
        ["", "free < text", "so <n>5</n> and <nn>x</nn>."], ["<n>x</n>", "<n", "<nx>"],
    ),
    "triggered tags, one at least, and the first is the last": (
        {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG, OTHER], "at_least_one": True,
         "stop_after_first": True},
        ["<n>5</n>", "<nn></nn>"], ["", "<n>5</n> more", "x<n>5</n>"],
    ),
    "tags with a separator": (
        {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}, ["", "<n>1</n>", "<n>1</n>, <n>2</n>"],
        ["<n>1</n><n>2</n>", "<n>1</n>, "],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["call:", NUMBER]], "loop": True, "excludes": ["bad"]},
        ["fine", "call:5 and call:6"], ["call:x", "a bad text", "call:"],
    ),
    "a grammar": (
        {"type": "sequence", "elements": [
            text("<"), {"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, text(">"),
        ]},
        ["<xxy>", "<y>"], ["<x>", "y"],
    ),
    "parameters between marks": (
        {"type": "json_schema", "json_schema": ARGUMENTS, "style": "qwen_xml"},
        ["<parameter=unit>\nC\n</parameter>\n<parameter=days>\n2\n</parameter>",
         "<parameter=unit>F</parameter><parameter=days>2</parameter><parameter=note>a < b\n</parameter>"],
        ["<parameter=unit>K</parameter><parameter=days>2</parameter>", "<parameter=unit>C</parameter>",
         "<parameter=unit>C</parameter><parameter=days>2</parameter><parameter=x>1</parameter>"],
    ),
    "parameters, one of two": (
        {"type": "json_schema", "style": "qwen_xml", "json_schema": {
            "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
            "additionalProperties": False, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        ["<parameter=a>true</parameter>", "<parameter=b>false</parameter>"], ["", "<parameter=a>3</parameter>"],
    ),
    "keyword arguments": (
        {"type": "json_schema", "json_schema": ARGUMENTS, "style": "python"},
        ['unit="C", days=2', 'unit="F", days=2, note="x"'], ['unit="K", days=2', "days=2", ""],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("form", "matching", "other"), CASES.values(), ids=list(CASES))
def test_structural_tags_accept_and_reject_texts(form: dict[str, Any], matching: list[str], other: list[str]) -> None:
    check = TextCheck("structural_tag", {"type": "structural_tag", "format": form})
    assert [check.accepts(one) for one in matching] == [True] * len(matching)
    assert [check.accepts(one) for one in other] == [False] * len(other)


def test_the_older_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tags = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    check = TextCheck("structural_tag", {"type": "structural_tag", "structures": tags, "triggers": ["<f"]})
    assert check.accepts('say <f>{"a": 1}</f> so')
    assert not check.accepts('say <f>{"a": "x"}</f>')


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "nonsense"}, "must be one of"),
        ({"type": "any_text", "max_tokens": 3}, "max_tokens is not supported"),
        ({**NUMBER, "style": "cohere_xml"}, "is not supported; choose one of json"),
        ({"type": "token", "token": "<nothing>"}, "no token '<nothing>'"),
        ({"type": "regex", "pattern": "a$b"}, "in the middle"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "'uniqueItems' at #"),
        ({"type": "triggered_tags", "triggers": ["<x"], "tags": [TAG]}, "must start with one of triggers"),
        ({"type": "grammar", "grammar": "root ::= root"}, "no text matches it"),
    ],
)
def test_invalid_structural_tags_raise(form: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match="cannot be compiled") as caught:
        TextCheck("structural_tag", {"type": "structural_tag", "format": form})
    assert says in str(caught.value)
