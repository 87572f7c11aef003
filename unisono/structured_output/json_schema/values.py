"""Validation of JSON values against a schema: the values of an enum that are valid under its other keywords."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from unisono.structured_output.json_schema.formats import FORMATS, REFUSED
from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.refs import References, SchemaPlace
from unisono.structured_output.syntax.regex import RegexError, rewritten

MAX_DEPTH = 100


def identity(value: Any) -> Hashable:
    """A key of a JSON value. Equal values have equal keys: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, Mapping):
        return Mapping, frozenset((name, identity(one)) for name, one in value.items())
    return float if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value), value


def equal(a: Any, b: Any) -> bool:
    """Equality of JSON values; see :func:`identity`."""
    return identity(a) == identity(b)


def type_of(value: Any) -> str:
    """The type of a JSON value; ``integer`` for numbers without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or (math.isfinite(value) and value.is_integer()) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def has_type(value: Any, types: Any) -> bool:
    own = type_of(value)
    named = types if isinstance(types, list) else [types]
    return own in named or (own == "integer" and "number" in named)


class Validator:
    """Validator of values. Raises SchemaRefusedError for unsupported keywords."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._members: dict[int, frozenset[Hashable]] = {}  # of each enum, by the id of its list

    def valid(self, value: Any, place: SchemaPlace, depth: int = 0) -> bool:
        """True if ``value`` is valid under the schema in ``place``."""
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            raise SchemaRefusedError("$ref", place.pointer, "references go round in a circle")
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            if name in schema and schema[name] is not True:
                raise SchemaRefusedError(name, place.pointer, "it stands beside enum or const")
        return (
            self._references_hold(value, place, depth)
            and self._combined(value, place, depth)
            and self._plain(value, schema, place)
            and (not isinstance(value, str) or self._string(value, schema, place))
            and (not isinstance(value, list) or self._array(value, place, depth))
            and (not isinstance(value, Mapping) or self._object(value, place, depth))
        )

    def _references_hold(self, value: Any, place: SchemaPlace, depth: int) -> bool:
        return all(
            self.valid(value, self._references.resolved(place, name), depth + 1)
            for name in ("$ref", "$dynamicRef")
            if name in place.schema
        )

    def _combined(self, value: Any, place: SchemaPlace, depth: int) -> bool:
        schema = place.schema

        def holds(*path: str | int) -> bool:
            return self.valid(value, place.child(*path), depth + 1)

        if "if" in schema:
            branch = "then" if holds("if") else "else"
            if branch in schema and not holds(branch):
                return False
        return (
            all(holds("allOf", i) for i in range(len(schema.get("allOf", ()))))
            and ("anyOf" not in schema or any(holds("anyOf", i) for i in range(len(schema["anyOf"]))))
            and ("oneOf" not in schema or sum(holds("oneOf", i) for i in range(len(schema["oneOf"]))) == 1)
            and ("not" not in schema or not holds("not"))
        )

    def _plain(self, value: Any, schema: Mapping[str, Any], place: SchemaPlace) -> bool:
        if "type" in schema and not has_type(value, schema["type"]):
            return False
        if "enum" in schema and identity(value) not in self._values_of(schema["enum"]):
            return False
        if "const" in schema and not equal(value, schema["const"]):
            return False
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        above, low = (low, None) if above is True else (above, low)
        below, high = (high, None) if below is True else (below, high)
        if (low is not None and value < low) or (high is not None and value > high):
            return False
        for bound, sign in ((above, 1), (below, -1)):
            if bound not in (None, False) and (value - bound) * sign <= 0:
                return False
        step = schema.get("multipleOf")
        return step is None or (math.isfinite(value) and Fraction(repr(value)) % Fraction(repr(step)) == 0)

    def _values_of(self, enum: list[Any]) -> frozenset[Hashable]:
        """Keys of an enum's values. The schema keeps the list alive, so its id is unique."""
        if id(enum) not in self._members:
            self._members[id(enum)] = frozenset(map(identity, enum))
        return self._members[id(enum)]

    def _string(self, value: str, schema: Mapping[str, Any], place: SchemaPlace) -> bool:
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
            return False
        if "pattern" in schema and not matches(schema["pattern"], value, place):
            return False
        name = schema.get("format")
        if name in REFUSED:
            raise SchemaRefusedError("format", place.pointer, f"the format {name!r} is not supported")
        return not isinstance(name, str) or name not in FORMATS or re.fullmatch(FORMATS[name], value) is not None

    def _array(self, value: list[Any], place: SchemaPlace, depth: int) -> bool:
        schema = place.schema
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            return False
        if schema.get("uniqueItems") and len(set(map(identity, value))) < len(value):
            return False
        first, rest = ("prefixItems", "items")
        if isinstance(schema.get("items"), list):
            first, rest = "items", "additionalItems"
        count = len(schema.get(first, ()))
        for i, one in enumerate(value):
            inner = place.child(first, i) if i < count else place.child(rest) if rest in schema else None
            if inner is not None and not self.valid(one, inner, depth + 1):
                return False
        if "contains" in schema:
            found = sum(self.valid(one, place.child("contains"), depth + 1) for one in value)
            return bool(schema.get("minContains", 1) <= found <= schema.get("maxContains", math.inf))
        return True

    def _object(self, value: Mapping[str, Any], place: SchemaPlace, depth: int) -> bool:
        schema = place.schema
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf):
            return False
        if not all(name in value for name in schema.get("required", ())):
            return False
        for name, one in value.items():
            inner = [place.child("properties", name)] if name in schema.get("properties", ()) else []
            inner += [
                place.child("patternProperties", pattern)
                for pattern in schema.get("patternProperties", ())
                if matches(pattern, name, place)
            ]
            if not inner and "additionalProperties" in schema:
                inner = [place.child("additionalProperties")]
            if not all(self.valid(one, part, depth + 1) for part in inner):
                return False
            if "propertyNames" in schema and not self.valid(name, place.child("propertyNames"), depth + 1):
                return False
        return self._dependent(value, place, depth)

    def _dependent(self, value: Mapping[str, Any], place: SchemaPlace, depth: int) -> bool:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in place.schema.get(keyword, {}).items():
                if name not in value:
                    continue
                if isinstance(needs, list):
                    if not all(one in value for one in needs):
                        return False
                elif not self.valid(value, place.child(keyword, name), depth + 1):
                    return False
        return True


def matches(pattern: str, text: str, place: SchemaPlace) -> bool:
    """True if an ECMA-262 pattern is found in ``text``. Raises SchemaRefusedError for an unsupported pattern."""
    try:
        return all(one.fullmatch(text) for one in _compiled(pattern)[0]) and not any(
            one.fullmatch(text) for one in _compiled(pattern)[1]
        )
    except (RegexError, re.error) as error:
        raise SchemaRefusedError("pattern", place.pointer, str(error)) from None


@lru_cache(1000)
def _compiled(pattern: str) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    found = rewritten(pattern, search=True)

    def python(text: str) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", text))

    return [python(one) for one in (found.body, *found.also)], [python(one) for one in found.never]
