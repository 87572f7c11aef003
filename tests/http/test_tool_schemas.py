"""Tools whose schemas are not schemas: refused as the client's mistake, or read around, in every form of calls."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.conftest import Server
from tests.http.fuzz import Raw, odd_values
from tests.http.tool_answers import CASES, WEATHER
from unisono.text.tool_parsers.base import ParserContext, Tool
from unisono.text.tool_parsers.formats import FORMATS, NAMES
from unisono.text.tool_parsers.structure import Structure
from unisono.types import BadRequest, StructuredOutputs

OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "allOf", "anyOf", "$ref", "$defs")
OF_VALUES = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "pattern", "maxLength", "properties", "items")
VALUES = [one for one in odd_values() if not isinstance(one, Raw)]


def odd_schemas() -> Iterator[dict[str, Any]]:
    """WEATHER with each odd value under a keyword, of the whole or of a property."""
    for name, value in itertools.product(OF_OBJECTS, VALUES):
        yield {**WEATHER, name: value}
    for name, value in itertools.product(OF_VALUES, VALUES):
        schema = copy.deepcopy(WEATHER)
        schema["properties"]["city"][name] = value
        yield schema
    for value in VALUES:
        yield {**WEATHER, "properties": {"city": value, "days": value}}
    yield {**WEATHER, "properties": True, "required": []}
    yield {**WEATHER, "properties": [[1]], "required": [[1]]}


def some_schemas(number: int) -> list[dict[str, Any]]:
    """A third of the odd schemas, another one for the next number; in the long matrix all of them."""
    return list(itertools.islice(odd_schemas(), number % 3, None, 3))


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "every"])
"""Run with all odd schemas."""


@EVERY
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammars_of_odd_schemas(form: Any, every: bool) -> None:
    """A structure is made, for the grammar to judge, or the request is refused; nothing else happens."""
    made = refused = 0
    answer = StructuredOutputs(json={"type": "object"})
    schemas = list(odd_schemas()) if every else some_schemas(list(FORMATS).index(form))
    for schema in schemas:
        structure, tools = Structure(form, {}), [Tool("get_weather", schema, strict=True)]
        for parallel in (False, True):
            try:
                structure.required(tools, parallel)
                structure.optional(tools, parallel)
                structure.either(tools, parallel, answer)
                made += 1
            except BadRequest:
                refused += 1
    assert made
    assert made + refused == 2 * len(schemas)


@EVERY
@pytest.mark.parametrize("case", CASES)
def test_answers_are_read_with_odd_schemas(case: str, every: bool) -> None:
    """A model's text never fails to be read, whatever its tools' schemas are; the same calls are found."""
    form, text, (content, calls) = CASES[case]
    for schema in odd_schemas() if every else some_schemas(list(CASES).index(case)):
        reader = NAMES[form].parser(ParserContext([Tool("get_weather", schema), Tool("now", schema)], str))
        found = reader.feed(text, last=True)
        assert found.content == content
        assert [one.name for one in found.calls if one.name is not None] == [name for name, _ in calls]


@pytest.mark.parametrize("properties", [True, 1.0, -255, "x", [["a"]]])
def test_a_schema_without_an_object_of_properties(server: Server, properties: Any) -> None:
    tool = {"name": "add", "input_schema": {"type": "object", "properties": properties}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "tools": [tool]}
    for choice in ("tool", "any", "auto"):
        named = {"name": "add"} if choice == "tool" else {}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            sent = {**body, "tool_choice": {"type": choice, **named}}
            answer = server.http.post(path, json=sent)
            assert answer.status_code in (200, 400), answer.text
