"""Object keywords, rewritten into properties, required and additionalProperties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import comb
from typing import Any

from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.logic import NoExactForm, Size, inlined
from unisono.structured_output.json_schema.refs import SchemaPlace
from unisono.structured_output.json_schema.rewriter import Rewriter, evaluates
from unisono.structured_output.json_schema.values import Validator

MAX_COMBINATIONS = 100
"""Most combinations of optional properties that are enumerated for minProperties or maxProperties."""

_NAME_KEYWORDS = frozenset({"type", "pattern", "format", "minLength", "maxLength", "enum", "const"})
_COMBINATORS = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")
_EVALUATING = frozenset({
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "$ref", "$dynamicRef", "allOf",
    *_COMBINATORS,
})  # fmt: skip


class Objects:
    """Rewrites the object keywords of a schema for a Rewriter."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._to = rewriter

    def keywords(self, place: SchemaPlace) -> tuple[dict[str, Any], list[Any]]:
        """(keywords that llguidance supports, further conjuncts for objects)."""
        schema = place.schema
        main = self._properties(place)
        parts: list[Any] = []
        if "propertyNames" in schema:
            main = self._with_names(main, place)
        parts += self._counts(main, place)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in schema.get(keyword, {}).items():
                parts.append(self._dependent(name, needs, place, keyword))
        if schema.get("unevaluatedProperties", True) not in (True, {}):
            parts += self._unevaluated(place)
        return main, parts

    def _properties(self, place: SchemaPlace) -> dict[str, Any]:
        schema, to = place.schema, self._to
        main: dict[str, Any] = {}
        if "properties" in schema:
            own = {to.text(name): to.schema(place.child("properties", name)) for name in schema["properties"]}
            main["properties"] = own
        if "required" in schema:
            names = schema["required"]
            if not all(isinstance(name, str) for name in names):
                raise to.refuse("required", place, "it must be a list of names")
            main["required"] = list(dict.fromkeys(map(to.text, names)))
        if schema.get("patternProperties"):
            found: dict[str, Any] = {}
            for pattern in schema["patternProperties"]:
                expressions = to.expressions(pattern, place.child("patternProperties"), "patternProperties")
                if len(expressions) > 1:
                    raise to.refuse("patternProperties", place, f"{pattern[:60]!r}: a lookahead is not supported here")
                found[expressions[0]] = to.schema(place.child("patternProperties", pattern))
            if len(found) > 1:
                to.overlaps.append(place.pointer)
            main["patternProperties"] = found
        if "additionalProperties" in schema:
            main["additionalProperties"] = to.schema(place.child("additionalProperties"))
        return main

    # ---- names ----------------------------------------------------------------------------------

    def _with_names(self, main: dict[str, Any], place: SchemaPlace) -> dict[str, Any]:
        """propertyNames: the valid names become properties or a pattern."""
        to, names = self._to, place.child("propertyNames")
        if names.schema in (True, {}):
            return main
        try:
            rule = inlined(names, to.references, Size())
        except NoExactForm:
            raise to.refuse("propertyNames", place, "it refers to itself") from None
        if main.get("patternProperties") or (rule is not False and not _NAME_KEYWORDS.issuperset(rule)):
            raise to.refuse("propertyNames", place, "it is not one of the forms that are supported")
        validator = Validator(to.references)
        others = main.get("additionalProperties", True)
        listed = {
            name: own
            if rule is not False and validator.valid(name, SchemaPlace(rule, names.pointer, names.base))
            else False
            for name, own in {**dict.fromkeys(main.get("required", ()), others), **main.get("properties", {})}.items()
        }
        made = {**main, "properties": listed, "additionalProperties": False}
        if rule is False or ("type" in rule and "string" not in rule["type"]):
            return made
        if "enum" in rule or "const" in rule:
            values = rule["enum"] if "enum" in rule else [rule["const"]]
            for name in values:
                if isinstance(name, str) and validator.valid(name, SchemaPlace(rule, names.pointer, names.base)):
                    listed.setdefault(to.text(name), others)
            return made
        if others is False:
            return made
        expressions = self._name_expressions(rule, place)
        if len(expressions) > 1:
            raise to.refuse("propertyNames", place, "pattern, format and lengths cannot be combined here")
        return {**made, "patternProperties": {expressions[0]: others}} if expressions else main

    def _name_expressions(self, rule: Mapping[str, Any], place: SchemaPlace) -> list[str]:
        found = list(self._to.patterns(SchemaPlace(rule, place.pointer + "/propertyNames", place.base)))
        if "minLength" in rule or "maxLength" in rule:
            most = int(rule["maxLength"]) if "maxLength" in rule else ""
            found.append(f"^(?s:.){{{int(rule.get('minLength', 0))},{most}}}$")
        return found

    # ---- counts ---------------------------------------------------------------------------------

    def _counts(self, main: dict[str, Any], place: SchemaPlace) -> list[Any]:
        """minProperties and maxProperties, as the combinations of optional properties that they allow."""
        low, high = place.schema.get("minProperties", 0), place.schema.get("maxProperties")
        required = main.get("required", [])
        need, left = max(0, int(low) - len(required)), None if high is None else int(high) - len(required)
        optional = [
            name for name, own in main.get("properties", {}).items() if own is not False and name not in required
        ]
        more = main.get("additionalProperties", True) is not False or any(
            own is not False for own in main.get("patternProperties", {}).values()
        )
        if left is not None and (left < 0 or left < need):
            return [False]
        if left is not None and not more and len(optional) <= left:
            left = None
        if not need and left is None:
            return []
        if more and need > 1:
            raise self._to.refuse(
                "minProperties", place, "keys of additional properties may repeat, so it is not exact"
            )
        if not optional:
            return [_object([], [], int(low), None if high is None else int(high))] if more else [False] if need else []
        return [{"anyOf": list(self._combinations(optional, need, left, more, place))}]

    def _combinations(
        self, optional: list[str], need: int, left: int | None, more: bool, place: SchemaPlace
    ) -> Iterator[dict[str, Any]]:
        count = len(optional)
        if left is None:  # at least ``need``: any others may join
            self._limit("minProperties", comb(count, need), place)
            for chosen in combinations(optional, need):
                yield _object(list(chosen), [], 0, None)
            if more:  # need is 1
                yield _object([], optional, need, None)
            return
        sizes = range(0 if more else need, min(count, left) + 1)
        self._limit("maxProperties", sum(comb(count, size) for size in sizes), place)
        for size in sizes:
            for chosen in combinations(optional, size):
                absent = [name for name in optional if name not in chosen]
                if more:
                    yield _object(list(chosen), absent, max(0, need - size), left - size)
                else:
                    yield _object(list(chosen), absent, 0, None)

    def _limit(self, keyword: str, count: int, place: SchemaPlace) -> None:
        if count > MAX_COMBINATIONS:
            raise self._to.refuse(
                keyword, place, f"more than {MAX_COMBINATIONS} combinations of properties are possible"
            )

    # ---- dependencies, unevaluated --------------------------------------------------------------

    def _dependent(self, name: str, needs: Any, place: SchemaPlace, keyword: str) -> Any:
        absent = _object([], [self._to.text(name)], 0, None)
        if isinstance(needs, str):  # draft 3
            needs = [needs]
        if isinstance(needs, list):
            names = [one for one in needs if isinstance(one, str)]
            if len(names) < len(needs):
                raise self._to.refuse(keyword, place, "it must have lists of names")
            if name in place.schema.get("required", ()):
                return _object(list(map(self._to.text, names)), [], 0, None)
            return {"anyOf": [absent, _object([name, *map(self._to.text, names)], [], 0, None)]}
        own = self._to.schema(place.child(keyword, name))
        if own is True:
            return True
        if own is False:
            return absent
        return {"anyOf": [absent, {"allOf": [_object([name], [], 0, None), own]}]}

    def _unevaluated(self, place: SchemaPlace) -> list[Any]:
        evaluated = self._evaluated(place, place, [])
        if evaluated is None:
            return []
        own = self._to.schema(place.child("unevaluatedProperties"))
        names, patterns = evaluated
        found: dict[str, Any] = {
            "type": "object",
            "properties": dict.fromkeys(names, True),
            "additionalProperties": own,
        }
        if patterns:
            found["patternProperties"] = dict.fromkeys(patterns, True)
        return [found]

    def _evaluated(
        self, place: SchemaPlace, asking: SchemaPlace, seen: list[str]
    ) -> tuple[list[str], list[str]] | None:
        """(names, patterns) of the properties that a schema evaluates in every valid object; None for all."""
        schema = place.schema
        if not isinstance(schema, Mapping) or place.pointer in seen:
            return [], []
        seen = [*seen, place.pointer]
        if "additionalProperties" in schema or (place is not asking and "unevaluatedProperties" in schema):
            return None
        names, patterns = list(schema.get("properties", ())), []
        for pattern in schema.get("patternProperties", ()):
            patterns += self._to.expressions(pattern, place, "patternProperties")
        for name in _COMBINATORS:
            if name in schema and evaluates(schema[name], _EVALUATING):
                raise SchemaRefusedError(
                    "unevaluatedProperties", asking.pointer, f"{name!r} decides which properties are evaluated"
                )
        inner = [place.child("allOf", i) for i in range(len(schema.get("allOf", ())))]
        inner += [self._to.references.resolved(place, name) for name in ("$ref", "$dynamicRef") if name in schema]
        for one in inner:
            found = self._evaluated(one, asking, seen)
            if found is None:
                return None
            names, patterns = names + found[0], patterns + found[1]
        return names, patterns


def _object(required: list[str], absent: list[str], low: int, high: int | None) -> dict[str, Any]:
    """An object with ``required`` and without ``absent`` properties. low, high: number of its other properties."""
    made: dict[str, Any] = {"type": "object"}
    if required:
        made["required"] = required
    if absent:
        made["properties"] = dict.fromkeys(absent, False)
    if low:
        made["minProperties"] = low + len(required)
    if high is not None:
        made["maxProperties"] = high + len(required)
    return made
