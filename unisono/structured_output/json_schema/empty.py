"""Finds schemas that no finite value satisfies, such as an object that requires another of its own kind inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = {"null", "boolean", "number", "string", "array", "object"}


def without_empty(root: Any, definitions: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A normalised schema and its definitions, with False in place of schemas that no finite value satisfies."""
    filled: set[str] = set()
    while more := {name for name, own in definitions.items() if name not in filled and _filled(own, filled)}:
        filled |= more
    kept = {name: _pruned(own, filled) for name, own in definitions.items() if name in filled}
    return (_pruned(root, filled) if _filled(root, filled) else False), kept


def _filled(schema: Any, filled: set[str]) -> bool:
    """True if some value satisfies a schema, given the definitions that some value satisfies."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in filled:
        return False
    if not all(_filled(part, filled) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_filled(option, filled) for option in schema["anyOf"]):
        return False
    types = schema.get("type")
    kinds = ALL_TYPES if types is None else set(types if isinstance(types, list) else [types])
    if kinds - {"array", "object"}:
        return True
    return ("object" in kinds and _object_filled(schema, filled)) or (
        "array" in kinds and _array_filled(schema, filled)
    )


def _object_filled(schema: Mapping[str, Any], filled: set[str]) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if schema.get("patternProperties"):
        others = True
    return all(_filled(properties.get(name, others), filled) for name in schema.get("required", ()))


def _array_filled(schema: Mapping[str, Any], filled: set[str]) -> bool:
    first, others = schema.get("prefixItems", []), schema.get("items", True)
    least = schema.get("minItems", 0)
    needed = [*first[:least], *([others] if least > len(first) else [])]
    return all(_filled(own, filled) for own in needed)


def _pruned(schema: Any, filled: set[str]) -> Any:
    """A schema without the parts that no value satisfies."""
    if isinstance(schema, bool):
        return schema
    if not _filled(schema, filled):
        return False
    made = dict(schema)
    for name in ("properties", "patternProperties"):
        if name in made:
            made[name] = {key: _pruned(own, filled) for key, own in made[name].items()}
    for name in ("additionalProperties", "items"):
        if name in made:
            made[name] = _pruned(made[name], filled)
    for name in ("allOf", "prefixItems"):
        if name in made:
            made[name] = [_pruned(own, filled) for own in made[name]]
    if "anyOf" in made:
        options = [one for one in (_pruned(own, filled) for own in made["anyOf"]) if one is not False]
        made["anyOf"] = options
    return made
