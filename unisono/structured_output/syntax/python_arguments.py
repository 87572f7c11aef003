"""Arguments of a tool as Python keyword arguments (``a=1, b="x"``), as a structural tag. Values are JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.structured_output.json_schema.flat import FlatArguments, alternatives

Tag = dict[str, Any]

BLANKS = 2
"""Most consecutive blanks between the parts of a value."""
ORDERED = 8
"""Optional properties in the order of the schema; beyond this number, properties may come in any order."""


def keyword_arguments(schema: Any) -> Tag:
    """The ``key=value, …`` texts that an object's schema allows: required ones first, each in the schema's order."""
    return _either([_arguments(one) for one in alternatives(schema)])


def _arguments(own: FlatArguments) -> Tag:
    required = list(own.required)
    others = [name for name, one in own.properties.items() if name not in required and one is not False]
    if not required and not others:
        return _NOTHING if own.others is False else _ANYTHING

    def pair(name: str, before: str = "") -> Tag:
        value = {"type": "json_schema", "json_schema": own.schema(name), "max_whitespace_cnt": BLANKS}
        return _sequence([{"type": "const_string", "value": f"{before}{name}="}, value])

    if required:
        needed = [pair(name, ", " if place else "") for place, name in enumerate(required)]
        return _sequence([*needed, *(_optional(pair(name, ", ")) for name in others)])
    if len(others) > ORDERED:
        again = {"type": "star", "content": _either([pair(name, ", ") for name in others])}
        return _optional(_sequence([_either([pair(name) for name in others]), again]))
    first = [
        _sequence([pair(name), *(_optional(pair(one, ", ")) for one in others[place + 1 :])])
        for place, name in enumerate(others)
    ]
    return _optional(_either(first))


def _sequence(elements: Sequence[Mapping[str, Any]]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _optional(tag: Mapping[str, Any]) -> Tag:
    return {"type": "optional", "content": tag}


def _either(tags: Sequence[Mapping[str, Any]]) -> Tag:
    return dict(tags[0]) if len(tags) == 1 else {"type": "or", "elements": list(tags)}


def _any_pair(before: str) -> Tag:
    key = {"type": "regex", "pattern": before + "[a-zA-Z_][a-zA-Z0-9_]{0,63}="}
    return _sequence([key, {"type": "json_schema", "json_schema": True, "max_whitespace_cnt": BLANKS}])


_NOTHING: Tag = {"type": "const_string", "value": ""}
_ANYTHING = _optional(_sequence([_any_pair(""), {"type": "star", "content": _any_pair(", ")}]))
