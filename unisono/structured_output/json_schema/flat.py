"""Schemas of arguments as lists of properties, for calls that are not written as JSON objects.

:func:`alternatives` turns a schema of an object into plain ones, each with only ``properties``, ``required`` and
``additionalProperties``: a call's arguments satisfy one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.normalise import conjunction, normalised

MAX_ALTERNATIVES = 64


@dataclass(frozen=True)
class FlatArguments:
    """An object's properties. others: schema of additional ones. definitions: targets of references in them."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    others: Any = True
    definitions: Mapping[str, Any] = field(default_factory=dict)

    def schema(self, name: str) -> Any:
        """The schema of one property, with the definitions of its references."""
        own = self.properties.get(name, self.others)
        return {**own, "$defs": dict(self.definitions)} if isinstance(own, Mapping) and self.definitions else own


def alternatives(schema: Any) -> list[FlatArguments]:
    """The plain objects that a JSON schema allows. Raises SchemaRefusedError."""
    ready = normalised(schema).schema
    every = _flat(ready, ready.get("$defs", {}), ())
    found = [one for one in every if all(one.schema(name) is not False for name in one.required)]
    if not found:
        raise SchemaRefusedError("type", "", "no object satisfies it")
    return found


def _flat(schema: Any, definitions: Mapping[str, Any], seen: tuple[str, ...]) -> list[FlatArguments]:
    if isinstance(schema, bool):
        return [FlatArguments(definitions=definitions)] if schema else []
    if "object" not in _types(schema):
        return []
    for name in ("patternProperties", "minProperties", "maxProperties", "enum"):
        if name in schema:
            why = "arguments in this form of calls are properties with names that the schema lists"
            raise SchemaRefusedError(name, "", why, "list the properties")
    others = schema.get("additionalProperties", True)
    own = FlatArguments(schema.get("properties", {}), tuple(schema.get("required", ())), others, definitions)
    parts: list[list[FlatArguments]] = [[own]]
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in seen:
            raise SchemaRefusedError("$ref", "", "it refers to itself")
        parts.append(_flat(definitions[name], definitions, (*seen, name)))
    parts += [_flat(part, definitions, seen) for part in schema.get("allOf", ())]
    if "anyOf" in schema:
        parts.append([one for option in schema["anyOf"] for one in _flat(option, definitions, seen)])
    if prod(map(len, parts)) > MAX_ALTERNATIVES:
        raise SchemaRefusedError("anyOf", "", f"it allows more than {MAX_ALTERNATIVES} combinations of properties")
    return [_merged(chosen) for chosen in product(*parts)]


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", "object")
    return [types] if isinstance(types, str) else list(types)


def _merged(chosen: tuple[FlatArguments, ...]) -> FlatArguments:
    """The conjunction of the chosen objects."""
    names = dict.fromkeys(name for one in chosen for name in (*one.properties, *one.required))
    properties = {name: conjunction([one.properties.get(name, one.others) for one in chosen]) for name in names}
    required = dict.fromkeys(name for one in chosen for name in one.required)
    return FlatArguments(
        properties, tuple(required), conjunction([one.others for one in chosen]), chosen[0].definitions
    )
