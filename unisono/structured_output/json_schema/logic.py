"""Logic on JSON schemas: negation, and disjointness of two schemas.

Both work on schemas without references (:func:`inlined`) and give up if the result has no exact form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.structured_output.json_schema.refs import References, SchemaPlace
from unisono.structured_output.json_schema.values import has_type, identity, type_of

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_SIZE = 400
"""Most keywords of a schema to negate, those of its references included."""

_BOUNDS = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
           "exclusiveMaximum": "minimum"}  # fmt: skip
_COUNTS = {"minLength": ("maxLength", "string"), "minItems": ("maxItems", "array"),
           "minProperties": ("maxProperties", "object")}  # fmt: skip
_LIMITS = {"maxLength": ("minLength", "string"), "maxItems": ("minItems", "array"),
           "maxProperties": ("minProperties", "object")}  # fmt: skip
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "contentMediaType", "contentEncoding",
    "contentSchema", "$vocabulary",
})  # fmt: skip


class NoExactForm(Exception):
    """A negation that cannot be written as a schema. keyword: the cause."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


class Size:
    """A counter of keywords, so that no schema grows without bound."""

    def __init__(self) -> None:
        self.left = MAX_SIZE

    def take(self, keyword: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise NoExactForm(keyword)


def inlined(
    place: SchemaPlace, references: References, size: Size, loose: bool = False, open_: tuple[str, ...] = ()
) -> Any:
    """The schema in ``place`` with its references inlined.

    Raises NoExactForm for recursive ones, and for references in keywords that are not read. With ``loose`` those are
    left out instead; the schema then allows more.
    """
    schema = place.schema
    if not isinstance(schema, Mapping):
        return schema
    if loose and size.left <= 0:
        return True
    size.take("$ref")

    def inner(*path: str | int) -> Any:
        return inlined(place.child(*path), references, size, loose, open_)

    made: dict[str, Any] = {}
    parts: list[Any] = []
    for name, value in schema.items():
        if name == "$ref":
            target = references.resolved(place)
            if target.pointer not in open_:
                parts.append(inlined(target, references, size, loose, (*open_, target.pointer)))
            elif not loose:
                raise NoExactForm("$ref")
        elif name in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            made[name] = [inner(name, i) for i in range(len(value))]
        elif name in ("not", "if", "then", "else"):
            if not loose:
                made[name] = inner(name)
        elif name == "properties" and isinstance(value, Mapping):
            made[name] = {key: inner(name, key) for key in value}
        elif name not in ANNOTATIONS:
            if not _refers(value):
                made[name] = value
            elif not loose:
                raise NoExactForm("$ref")
    if parts:
        made["allOf"] = [*made.get("allOf", []), *parts]
    return made


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or "$dynamicRef" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def negated(schema: Any, size: Size) -> Any:
    """A schema of all values that are not valid under ``schema``, which has no references. Raises NoExactForm."""
    if isinstance(schema, bool):
        return not schema
    options: list[Any] = []
    for name, value in schema.items():
        size.take(name)
        if name not in ANNOTATIONS and name not in ("then", "else"):
            one = _negated_keyword(name, value, schema, size)
            options += one if isinstance(one, list) else [one]
    options = [option for option in options if option is not False]
    if any(option is True for option in options):
        return True
    return (options[0] if len(options) == 1 else {"anyOf": options}) if options else False


def _negated_keyword(name: str, value: Any, schema: Mapping[str, Any], size: Size) -> Any:
    """The negation of one keyword: a schema, or a list of alternatives."""
    if name == "type":
        return _other_types(value if isinstance(value, list) else [value])
    if name in ("const", "enum"):
        return _other_values([value] if name == "const" else value)
    if name in _BOUNDS:
        if isinstance(value, bool):
            raise NoExactForm(name)
        return {"type": "number", _BOUNDS[name]: value}
    if name in _COUNTS:
        other, kind = _COUNTS[name]
        return {"type": kind, other: int(value) - 1} if value > 0 else False
    if name in _LIMITS:
        other, kind = _LIMITS[name]
        return {"type": kind, other: int(value) + 1}
    if name == "required":
        return [{"type": "object", "properties": {key: False}} for key in value]
    if name == "properties":
        found = [(key, negated(own, size)) for key, own in value.items()]
        return [
            {"type": "object", "required": [key], "properties": {key: own}} for key, own in found if own is not False
        ]
    if name == "not":
        return value
    if name == "anyOf":
        return {"allOf": [negated(own, size) for own in value]}
    if name == "allOf":
        return [negated(own, size) for own in value]
    if name == "if":
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return [{"allOf": [value, negated(then, size)]}, {"allOf": [negated(value, size), negated(otherwise, size)]}]
    if name == "items" and value in (True, {}):
        return False
    raise NoExactForm(name)


def _other_types(types: list[str]) -> Any:
    """All other types.

    If only integers are excluded, numbers with a fraction are left out: no schema expresses them.
    """
    excluded = {*types, *(["number"] if "integer" in types else [])}
    left = [one for one in TYPES if one not in excluded]
    return {"type": left} if left else False


def _other_values(values: list[Any]) -> list[Any]:
    """Alternatives for all other values."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"}:
        raise NoExactForm("const")
    numbers = sorted({value for value in values if has_type(value, "number")})
    strings = [value for value in values if isinstance(value, str)]
    others: list[str] = [one for one in ("null", "array", "object") if one not in kinds]
    others += [] if numbers else ["number"]
    others += [] if strings else ["string"]
    options: list[Any] = [{"type": others}]
    left = [one for one in (True, False) if not any(value is one for value in values)]
    options += [{"enum": left}] if left else []
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        options.append({"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}})
    if strings:
        options.append({"type": "string", "pattern": other_strings(strings)})
    return options


def other_strings(strings: list[str]) -> str:
    """An expression of all other strings."""
    if sum(map(len, strings)) > MAX_SIZE * 4:
        raise NoExactForm("enum")
    return f"^(?:{_outside(sorted(set(strings)))})$"


def _outside(strings: list[str]) -> str:
    """Alternatives of the texts that are not in ``strings``, by their first character."""
    heads: dict[str, list[str]] = {}
    for text in strings:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    ways = [] if "" in strings else [""]
    anything = r"[^]*"
    if heads:
        ways.append("[^" + "".join(f"\\u{{{ord(char):x}}}" for char in heads) + "]" + anything)
    else:
        ways.append(f"[^]{anything}")
    ways += [f"\\u{{{ord(char):x}}}(?:{_outside(rest)})" for char, rest in heads.items()]
    return "|".join(ways)


def disjoint(a: Any, b: Any) -> bool:
    """True if provably no value is valid under both schemas, which have no references."""
    if a is False or b is False:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    for name in ("anyOf", "oneOf"):
        if name in a and all(disjoint(option, b) for option in a[name]):
            return True
        if name in b and all(disjoint(option, a) for option in b[name]):
            return True
    if any(disjoint(part, b) for part in a.get("allOf", ())) or any(disjoint(part, a) for part in b.get("allOf", ())):
        return True
    if "allOf" in a or "allOf" in b:
        one, other = _flat(a), _flat(b)
        return ("allOf" not in one and "allOf" not in other) and disjoint(one, other)
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return set(map(identity, values)).isdisjoint(map(identity, others))
    if values is not None:
        return all(not _may_have_type(type_of(value), _kinds(b)) for value in values)
    if others is not None:
        return all(not _may_have_type(type_of(value), _kinds(a)) for value in others)
    if not any(_may_have_type(kind, _kinds(b)) for kind in _kinds(a)):
        return True
    return _ranges_apart(a, b) or (_kinds(a) == {"object"} == _kinds(b) and _objects_apart(a, b))


def _flat(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema merged with the keywords of its allOf; required and properties are united, its other keywords win."""
    made = {name: value for name, value in schema.items() if name != "allOf"}
    for part in schema.get("allOf", ()):
        if isinstance(part, bool):
            continue
        for name, value in _flat(part).items():
            if name == "required":
                made[name] = [*made.get(name, []), *value]
            elif name == "properties":
                own = made.get(name, {})
                made[name] = {**value, **own, **{key: {"allOf": [own[key], value[key]]} for key in own if key in value}}
            else:
                made.setdefault(name, value)
    return made


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    value = schema.get("type")
    if value is None:
        return {*TYPES, "integer"}
    return {value} if isinstance(value, str) else set(value)


def _may_have_type(kind: str, kinds: set[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds) or (kind == "number" and "integer" in kinds)


def _ranges_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """True if bounds of numbers, strings, arrays or objects exclude each other."""
    if not (_kinds(a) | _kinds(b) <= {"number", "integer"} or len(_kinds(a) | _kinds(b)) == 1):
        return False
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"),
                      ("minimum", "maximum")):  # fmt: skip
        for one, other in ((a, b), (b, a)):
            if low in one and high in other and one[low] > other[high]:
                return True
    for low, high in (("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum"),
                      ("exclusiveMinimum", "exclusiveMaximum")):  # fmt: skip
        for one, other in ((a, b), (b, a)):
            bounds = [bound for bound in (one.get(low), other.get(high)) if not isinstance(bound, (bool, type(None)))]
            if len(bounds) == 2 and bounds[0] >= bounds[1]:
                return True
    return False


def _objects_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """True if a required property has no value that is valid under both objects."""
    for name in {*a.get("required", ()), *b.get("required", ())}:
        if disjoint(_property(a, name), _property(b, name)):
            return True
    return False


def _property(schema: Mapping[str, Any], name: str) -> Any:
    own = (schema.get("properties") or {}).get(name)
    if own is not None:
        return own
    return schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
