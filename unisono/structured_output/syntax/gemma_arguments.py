"""Arguments of a tool in Gemma 4's form (``{key:<|"|>text<|"|>,other:[1,true]}``), as a structural tag.

Properties come in the order of the schema, optional ones may be left out. Strings have no escapes: they end with the
quote mark, a special token of the checkpoint or, without one, text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.structured_output.json_schema.flat import FlatArguments, alternatives
from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.normalise import normalised

Tag = dict[str, Any]

QUOTE = '<|"|>'
BARE = re.compile(r"[A-Za-z_][\w.-]*")
KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
"""The expression of a key that the schema does not name."""
MAX_PLACES = 64
"""Most items with a schema of their own, and most ``minItems``."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SCALARS = ("number", "integer", "boolean", "null")
TYPES = ("string", *SCALARS[:1], *SCALARS[2:], "array", "object")


class SharedTag(dict[str, Any]):
    """A part that is written once as a rule, so that it may contain itself. key: identifies the rule."""

    def __init__(self, key: str) -> None:
        super().__init__(type="shared", key=key)


def gemma_arguments(schema: Any, quote: int | None) -> Tag:
    """The texts of an object that ``schema`` allows. quote: the id of the quote token; None: the mark is text.

    Raises SchemaRefusedError.
    """
    return GemmaValues(quote).arguments(schema)


class GemmaValues:
    """Writer of the values of one schema."""

    def __init__(self, quote: int | None) -> None:
        self._mark: Tag = _constant(QUOTE) if quote is None else {"type": "token", "token": quote}
        self._excludes = [QUOTE] if quote is None else []
        self._shared: dict[str, SharedTag] = {}

    def arguments(self, schema: Any) -> Tag:
        return self._object(normalised(schema).schema)

    # ---- values ---------------------------------------------------------------------------------

    def _value(self, schema: Any, root: Mapping[str, Any]) -> Tag:
        """A value of a normalised schema. root: its definitions."""
        if schema is True or not schema:
            return self._anything()
        if "enum" in schema:
            return _either([self._exact(value) for value in schema["enum"]])
        parts = [{name: own for name, own in schema.items() if name not in ("allOf", "anyOf", "$ref", "$defs")}]
        parts = [part for part in [*parts, *schema.get("allOf", ())] if part not in (True, {})]
        if not parts and "$ref" in schema and "anyOf" not in schema:
            return self._definition(schema["$ref"], root)
        if not parts and "$ref" not in schema:
            return _either([self._value(option, root) for option in schema["anyOf"]])
        if _names_object(schema, root):
            return self._object({**schema, "$defs": dict(root)})
        if "$ref" in schema or "anyOf" in schema or any("anyOf" in part or "$ref" in part for part in parts):
            raise _refused("anyOf", "it stands beside other keywords")
        return self._typed(_merged(parts), root)

    def _definition(self, reference: str, root: Mapping[str, Any]) -> Tag:
        """The rule of a definition. Its key has all definitions that it reaches: objects inside a schema are normalised
        again, which gives other names to them.
        """
        name = reference.removeprefix("#/$defs/")
        key = json.dumps([name, {one: root[one] for one in sorted(_reached(root[name], root, {name}))}])
        if key not in self._shared:
            made = self._shared[key] = SharedTag(key)
            made["content"] = self._value(root[name], root)
        return self._shared[key]

    def _typed(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Tag:
        types = schema.get("type", list(TYPES))
        return _either([self._of_type(one, schema, root) for one in ([types] if isinstance(types, str) else types)])

    def _of_type(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Tag:
        if kind == "string":
            made: Tag = {"type": "any_text", "excludes": self._excludes, "patterns": schema.get("patterns", [])}
            bounds = (("minLength", "min_chars"), ("maxLength", "max_chars"))
            return self._quoted(made | {name: schema[own] for own, name in bounds if own in schema})
        if kind == "array":
            return self._array(schema, root)
        if kind == "object":
            names = ("properties", "required", "additionalProperties", "patternProperties", "minProperties",
                     "maxProperties")  # fmt: skip
            own = {name: schema[name] for name in names if name in schema}
            return self._object({**own, "type": "object", "$defs": dict(root)}) if own else self._any_object()
        limits = {name: schema[name] for name in NUMBERS if name in schema and kind in ("number", "integer")}
        return {"type": "json_schema", "json_schema": {"type": kind, **limits}, "max_whitespace_cnt": 0}

    def _exact(self, value: Any) -> Tag:
        """One value."""
        if isinstance(value, str):
            if QUOTE in value:
                raise _refused("enum", f"a string contains {QUOTE}")
            return self._quoted(_constant(value))
        if isinstance(value, Mapping):
            pairs = [_sequence([self._key(name), self._exact(one)]) for name, one in value.items()]
            return _sequence([_constant("{"), *_joined(pairs), _constant("}")])
        if isinstance(value, list):
            return _sequence([_constant("["), *_joined([self._exact(one) for one in value]), _constant("]")])
        return _constant(json.dumps(value))

    def _quoted(self, content: Tag) -> Tag:
        return _sequence([self._mark, content, self._mark])

    # ---- lists and objects ----------------------------------------------------------------------

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Tag:
        first, least, most = schema.get("prefixItems", []), schema.get("minItems", 0), schema.get("maxItems")
        rest = schema.get("items", True)
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if len(first) > MAX_PLACES or least > MAX_PLACES:
            raise _refused("prefixItems", f"more than {MAX_PLACES} items have a schema of their own, or must be there")
        if most is not None and most < least:
            raise _refused("maxItems", "it is below minItems")
        places = max(len(first), least) if most is None else min(most, max(len(first), least))
        items = [self._value(first[place] if place < len(first) else rest, root) for place in range(places)]
        tail: list[Tag] = []
        if most is None or most > places:
            one = self._value(rest, root)
            more = _sequence([_constant(","), one])
            left = -1 if most is None else most - places
            if not places:
                again = {"type": "repeat", "min": 0, "max": left - 1 if left > 0 else -1, "content": more}
                return _sequence([_constant("["), _optional(_sequence([one, again])), _constant("]")])
            tail = [{"type": "repeat", "min": 0, "max": left, "content": more}]
        for place in reversed(range(places)):
            written = _sequence([*([_constant(",")] if place else []), items[place], *tail])
            tail = [written if place < least else _optional(written)]
        return _sequence([_constant("["), *tail, _constant("]")])

    def _object(self, schema: Mapping[str, Any]) -> Tag:
        return _either([self._properties(one) for one in alternatives(schema)])

    def _properties(self, own: FlatArguments) -> Tag:
        names = [*own.properties, *(name for name in own.required if name not in own.properties)]
        if not names:
            return _constant("{}") if own.others is False else self._any_object(own.others, own.definitions)
        required = [name for name in names if name in own.required]
        others = [name for name in names if name not in own.required and own.schema(name) is not False]
        pairs = {name: self._pair(name, own) for name in names if name in required or name in others}
        if required:  # those before the first that must be there end with a comma, those after it begin with one
            order = [name for name in names if name in pairs]
            first = order.index(next(name for name in order if name in required))
            before = [_optional(_sequence([pairs[name], _constant(",")])) for name in order[:first]]
            after = {name: _sequence([_constant(","), pairs[name]]) for name in order[first + 1 :]}
            rest = [one if name in required else _optional(one) for name, one in after.items()]
            return _sequence([_constant("{"), *before, pairs[order[first]], *rest, _constant("}")])
        chains: list[Tag] = []
        tail: list[Tag] = []
        for name in reversed(others):  # each may come first; those after it follow
            chains.insert(0, _sequence([pairs[name], *tail]))
            tail = [_optional(_sequence([_constant(","), pairs[name]])), *tail]
        body = [_optional(_either(chains))] if chains else []
        return _sequence([_constant("{"), *body, _constant("}")])

    def _pair(self, name: str, own: FlatArguments) -> Tag:
        return _sequence([self._key(name), self._value(_plain(own.schema(name)), own.definitions)])

    def _key(self, name: str) -> Tag:
        """A key and its colon; one that would not be read back bare stands between quotes."""
        if BARE.fullmatch(name):
            return _constant(f"{name}:")
        if QUOTE in name:
            raise _refused("properties", f"a name contains {QUOTE}")
        return _sequence([self._mark, _constant(name), self._mark, _constant(":")])

    # ---- any value ------------------------------------------------------------------------------

    def _anything(self) -> SharedTag:
        if "any" not in self._shared:
            made = self._shared["any"] = SharedTag("any")
            scalars: Tag = {"type": "json_schema", "json_schema": {"type": ["number", "boolean", "null"]}}
            made["content"] = _either([
                self._of_type("string", {}, {}), {**scalars, "max_whitespace_cnt": 0}, self._array({}, {}),
                self._any_object(),
            ])  # fmt: skip
        return self._shared["any"]

    def _any_object(self, values: Any = True, root: Mapping[str, Any] | None = None) -> Tag:
        """An object with any keys."""
        pair = _sequence([{"type": "regex", "pattern": KEY}, _constant(":"), self._value(_plain(values), root or {})])
        more = {"type": "star", "content": _sequence([_constant(","), pair])}
        return _sequence([_constant("{"), _optional(_sequence([pair, more])), _constant("}")])


def _plain(schema: Any) -> Any:
    """A property's schema without the definitions that come with it."""
    return {name: own for name, own in schema.items() if name != "$defs"} if isinstance(schema, Mapping) else schema


def _names_object(schema: Any, root: Mapping[str, Any], seen: tuple[str, ...] = ()) -> bool:
    """True if every alternative is an object."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") == "object" or any(_names_object(part, root, seen) for part in schema.get("allOf", ())):
        return True
    if "anyOf" in schema:
        return all(_names_object(option, root, seen) for option in schema["anyOf"])
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    return bool(name) and name not in seen and _names_object(root.get(name), root, (*seen, name))


def _reached(schema: Any, root: Mapping[str, Any], found: set[str]) -> set[str]:
    """Add the names of the definitions that ``schema`` refers to, directly or not, to ``found``."""
    if isinstance(schema, Mapping):
        name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
        if name in root and name not in found:
            found.add(name)
            _reached(root[name], root, found)
        for own in schema.values():
            _reached(own, root, found)
    elif isinstance(schema, list):
        for one in schema:
            _reached(one, root, found)
    return found


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The conjunction of schemas without references and alternatives; ``patterns`` collects their patterns."""
    made: dict[str, Any] = {}
    for part in parts:
        for name, own in part.items():
            if name == "pattern":
                made["patterns"] = [*made.get("patterns", []), own]
            elif name not in made or made[name] == own:
                made[name] = own
            elif name == "type":
                both = [one for one in _list(made[name]) if one in _list(own)]
                if not both:
                    raise _refused("type", "no value satisfies it")
                made[name] = both
            else:
                raise _refused("allOf", f"its parts have different values of {name!r}")
    return made


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refused(keyword: str, why: str) -> SchemaRefusedError:
    return SchemaRefusedError(keyword, "", f"{why}, which this form of calls cannot write", "simplify the schema")


def _joined(tags: Sequence[Tag]) -> list[Tag]:
    """The parts with commas between them."""
    return [one for place, tag in enumerate(tags) for one in ([_constant(",")] if place else []) + [tag]]


def _constant(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(elements: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _optional(tag: Tag) -> Tag:
    return {"type": "optional", "content": tag}


def _either(tags: Sequence[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": list(tags)}
