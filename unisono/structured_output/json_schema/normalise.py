"""JSON schemas for llguidance: rewritten where that is exact, refused otherwise.

llguidance supports types, bounds, lengths, patterns, properties, items and combinators. :func:`normalised` rewrites
every other keyword into these: references into definitions, conditions and negations into alternatives, counts of
properties into the possible combinations. No keyword that decides validity is dropped. ``keywords.py`` has the table of
enforced keywords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.structured_output.json_schema.arrays import Arrays
from unisono.structured_output.json_schema.empty import without_empty
from unisono.structured_output.json_schema.formats import FORMATS, REFUSED
from unisono.structured_output.json_schema.keywords import KEYWORDS, SchemaRefusedError
from unisono.structured_output.json_schema.logic import TYPES, NoExactForm, Size, disjoint, inlined, negated
from unisono.structured_output.json_schema.objects import Objects
from unisono.structured_output.json_schema.refs import References, SchemaPlace
from unisono.structured_output.json_schema.values import Validator
from unisono.structured_output.syntax.regex import ANYTHING, RegexError, rewritten

EXACT = 2**53
_NAMED = ("properties", "patternProperties")
MAX_NODES = 50_000
MAX_BRANCHES = 12
"""Most overlapping branches of a oneOf."""


@dataclass(frozen=True)
class Normalised:
    r"""A schema for llguidance.

    controls: its strings may hold control characters that need a \\u escape.

    overlaps: JSON pointers of schemas with several patternProperties, which may match the same name.
    """

    schema: dict[str, Any]
    controls: bool
    overlaps: tuple[str, ...] = ()


def normalised(schema: Any) -> Normalised:
    """The schema for llguidance. Raises SchemaRefusedError, also for one that no value satisfies."""
    if not isinstance(schema, (Mapping, bool)):
        raise SchemaRefusedError("type", "", "a schema must be an object, true or false")
    made = Normaliser(schema)
    root = made.schema(made.references.root)
    root, definitions = without_empty(root, made.definitions)
    if root is False:
        raise SchemaRefusedError(
            "type" if not isinstance(schema, Mapping) else _first(schema), "", "no value satisfies it"
        )
    if made.controls:
        root, definitions = guarded(root), {name: guarded(own) for name, own in definitions.items()}
    body: dict[str, Any] = {} if root is True else dict(root)
    if definitions:
        body["$defs"] = definitions
    return Normalised(body, made.controls, tuple(made.overlaps))


def _first(schema: Mapping[str, Any]) -> str:
    """The keyword that an error names for a schema that no value satisfies."""
    return next((name for name in schema if name in KEYWORDS), "type")


class Normaliser:
    """Rewrites one schema. definitions: the targets of its references, by name."""

    def __init__(self, root: Any) -> None:
        self.references = References(root)
        self.definitions: dict[str, Any] = {}
        self.controls = False
        self.overlaps: list[str] = []  # pointers of schemas with several patternProperties
        self._validator = Validator(self.references)
        self._names: dict[str, str] = {}
        self._nodes = 0
        self._objects, self._arrays = Objects(self), Arrays(self)

    def schema(self, place: SchemaPlace) -> Any:
        """A schema in llguidance's form: an object, True or False."""
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaRefusedError(
                place.pointer.rpartition("/")[2], place.pointer, "a schema is an object or a boolean"
            )
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaRefusedError(
                _first(schema), place.pointer, f"it has more than {MAX_NODES} parts when written out"
            )
        self._check(place)
        if "enum" in schema or "const" in schema:
            return self._values(place)
        parts = [*self._referred(place), *self._typed(place), *self._combined(place)]
        return conjunction(parts)

    def again(self, schema: Any, place: SchemaPlace) -> Any:
        """Rewrite a schema that is derived from the one in ``place``."""
        return self.schema(SchemaPlace(schema, place.pointer, place.base))

    def refuse(self, keyword: str, place: SchemaPlace, why: str) -> SchemaRefusedError:
        return SchemaRefusedError(keyword, place.pointer, why)

    def text(self, text: str) -> str:
        """Record a text that answers may hold: a name or a value."""
        self.controls = self.controls or any(is_control(ord(char)) for char in text)
        return text

    # ---- keywords -------------------------------------------------------------------------------

    def _check(self, place: SchemaPlace) -> None:
        for name in place.schema:
            keyword = KEYWORDS.get(name)
            if keyword is not None and keyword.status == "refused":
                raise self.refuse(name, place, "it is not supported")
        for name in ("properties", "patternProperties"):
            if not isinstance(place.schema.get(name, {}), Mapping):
                raise self.refuse(name, place, "it must be an object")
        for name in ("required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"):
            if not isinstance(place.schema.get(name, []), list):
                raise self.refuse(name, place, "it must be a list")
        for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
                     "maxContains"):  # fmt: skip
            value = place.schema.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
                raise self.refuse(name, place, "it must be a whole number from 0 on")

    def _values(self, place: SchemaPlace) -> Any:
        """enum and const: the values that are valid under all other keywords."""
        schema = place.schema
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        kept = [value for value in values if self._validator.valid(value, place)]
        for value in kept:
            self._note_value(value, place)
        return {"enum": kept} if kept else False

    def _note_value(self, value: Any, place: SchemaPlace) -> None:
        if isinstance(value, str):
            self.text(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > EXACT:
            raise self.refuse("enum" if "enum" in place.schema else "const", place, f"{value} is not exact in 53 bits")
        elif isinstance(value, Mapping):
            for name, one in value.items():
                self.text(name)
                self._note_value(one, place)
        elif isinstance(value, list):
            for one in value:
                self._note_value(one, place)

    def _referred(self, place: SchemaPlace) -> list[Any]:
        found = []
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if name in place.schema:
                target = self.references.resolved(place, name)
                found.append(self._definition(target, (place.pointer,)))
        return found

    def _definition(self, target: SchemaPlace, seen: tuple[str, ...]) -> Any:
        """A reference to the definition of a schema; references to references are followed."""
        schema = target.schema
        if isinstance(schema, bool):
            return schema
        if set(schema) & set(KEYWORDS) == {"$ref"}:
            if target.pointer in seen:
                raise self.refuse("$ref", target, "it refers to itself")
            return self._definition(self.references.resolved(target), (*seen, target.pointer))
        key = f"{target.base}#{target.pointer}"
        if key not in self._names:
            name = self._names[key] = f"d{len(self._names)}"
            self.definitions[name] = True
            self.definitions[name] = self.schema(target)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # ---- types ----------------------------------------------------------------------------------

    def _typed(self, place: SchemaPlace) -> list[Any]:
        """The constraints of a schema on each type, as conjuncts."""
        schema = place.schema
        types = self._types(place)
        main: dict[str, Any] = {} if types is None else {"type": types}
        kinds = {*TYPES} if types is None else set(types if isinstance(types, list) else [types])
        parts: list[tuple[str, Any]] = []
        if kinds & {"number", "integer"}:
            main |= self._numbers(place)
        if "string" in kinds:
            main |= {name: int(schema[name]) for name in ("minLength", "maxLength") if name in schema}
            first, *others = [*self.patterns(place), None]
            main |= {"pattern": first} if first is not None else {}
            parts += [("string", {"type": "string", "pattern": one}) for one in others if one is not None]
        if "array" in kinds:
            own, more = self._arrays.keywords(place)
            main, parts = main | own, parts + [("array", part) for part in more]
        if "object" in kinds:
            own, more = self._objects.keywords(place)
            main, parts = main | own, parts + [("object", part) for part in more]
        for_all = [
            part if kinds == {kind} else disjunction([part, {"type": sorted(kinds - {kind})}]) for kind, part in parts
        ]
        return [main, *for_all] if main else for_all

    def _types(self, place: SchemaPlace) -> Any:
        types = place.schema.get("type")
        if types is None:
            return None
        named = types if isinstance(types, list) else [types]
        unknown = [one for one in named if one not in (*TYPES, "integer")]
        if unknown or not named:
            what = f"{unknown[0]!r} is not a type" if unknown else "it is empty"
            raise self.refuse("type", place, f"{what}; the types are {', '.join((*TYPES, 'integer'))}")
        if "number" in named:
            named = [one for one in named if one != "integer"]
        return named[0] if len(named) == 1 else list(dict.fromkeys(named))

    def _numbers(self, place: SchemaPlace) -> dict[str, Any]:
        schema = place.schema
        found: dict[str, Any] = {}
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(name)
            if value is None or isinstance(value, bool):
                continue
            if not isinstance(value, (int, float)):
                raise self.refuse(name, place, "it must be a number")
            if abs(value) > EXACT:
                raise self.refuse(name, place, f"{value} is not exact in 53 bits; leave it out")
            found[name] = value
        for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if schema.get(flag) is True and bound in found:  # draft 4
                found[flag] = found.pop(bound)
        step = schema.get("multipleOf")
        if step is not None:
            if isinstance(step, bool) or not isinstance(step, (int, float)) or step <= 0:
                raise self.refuse("multipleOf", place, "it must be a number above 0")
            if len(repr(step).replace(".", "").strip("0")) > 9 or "e" in repr(step) or step > 10**9:
                raise self.refuse("multipleOf", place, f"{step} has too many digits")
            found["multipleOf"] = step
        return found

    def patterns(self, place: SchemaPlace) -> list[str]:
        """The expressions of pattern and format, for strings."""
        schema, found = place.schema, []
        if "pattern" in schema:
            found += self.expressions(schema["pattern"], place, "pattern")
        name = schema.get("format")
        if name in REFUSED:
            raise self.refuse("format", place, f"the format {name!r} is not supported")
        if name in FORMATS:
            found += self.expressions(f"^(?:{FORMATS[name]})$", place, "format")
        return found

    def expressions(self, pattern: Any, place: SchemaPlace, keyword: str) -> list[str]:
        """A pattern as expressions of whole strings, all of which must match."""
        if not isinstance(pattern, str):
            raise self.refuse(keyword, place, "it must be a string")
        try:
            made = rewritten(pattern, search=True)
        except RegexError as error:
            raise self.refuse(keyword, place, f"{pattern[:60]!r}: {error}") from None
        if made.never:
            raise self.refuse(keyword, place, f"{pattern[:60]!r}: a negative lookahead is not supported")
        for one in (made.body, *made.also):
            codes = re.findall(r"\\x\{([0-9A-F]+)\}", re.sub(r"\[[^\]]*\]", "", one))
            self.controls = self.controls or any(is_control(int(code, 16)) for code in codes)
        return [f"^(?:{one})$" for one in (made.body, *made.also)]

    # ---- combinators ----------------------------------------------------------------------------

    def _combined(self, place: SchemaPlace) -> list[Any]:
        schema = place.schema
        parts = [self.schema(place.child("allOf", i)) for i in range(len(schema.get("allOf", ())))]
        if "anyOf" in schema:
            parts.append(disjunction([self.schema(place.child("anyOf", i)) for i in range(len(schema["anyOf"]))]))
        if "oneOf" in schema:
            parts.append(self._one_of(place))
        if "not" in schema:
            parts.append(self.again(self.negated(place.child("not"), "not"), place))
        if "if" in schema and ("then" in schema or "else" in schema):
            parts.append(self._if(place))
        return parts

    def negated(self, place: SchemaPlace, keyword: str) -> Any:
        """The negation of the schema in ``place``, without references."""
        size = Size()
        try:
            return negated(inlined(place, self.references, size), size)
        except NoExactForm as error:
            raise self.refuse(keyword, place, f"the negation of {error.keyword!r} has no exact form here") from None

    def _if(self, place: SchemaPlace) -> Any:
        schema = place.schema
        yes = self.schema(place.child("then")) if "then" in schema else True
        no = self.schema(place.child("else")) if "else" in schema else True
        options = []
        if yes is not False:
            options.append(conjunction([self.schema(place.child("if")), yes]))
        if no is not False:
            options.append(conjunction([self.again(self.negated(place.child("if"), "if"), place), no]))
        return disjunction(options)

    def _one_of(self, place: SchemaPlace) -> Any:
        branches = [place.child("oneOf", i) for i in range(len(place.schema["oneOf"]))]
        made = [self.schema(branch) for branch in branches]
        used = [i for i, one in enumerate(made) if one is not False]
        if len(used) < 2:
            return made[used[0]] if used else False
        plain = [inlined(branches[i], self.references, Size(), loose=True) for i in used]
        around = inlined(
            SchemaPlace({**place.schema, "oneOf": []}, place.pointer, place.base), self.references, Size(), loose=True
        )
        overlapping: dict[int, list[int]] = {i: [] for i in range(len(used))}
        for i in range(len(used)):
            for j in range(i):
                if not _apart(plain[i], plain[j], around):
                    overlapping[i].append(j)
                    overlapping[j].append(i)
        if not any(overlapping.values()):
            return disjunction([made[i] for i in used])
        if len(used) > MAX_BRANCHES:
            raise self.refuse("oneOf", place, f"more than {MAX_BRANCHES} branches, some of which overlap")
        options = []
        for i, others in overlapping.items():
            nots = [self.again(self.negated(branches[used[j]], "oneOf"), place) for j in others]
            options.append(conjunction([made[used[i]], *nots]))
        return disjunction(options)


def _apart(a: Any, b: Any, around: Mapping[str, Any]) -> bool:
    """True if branches exclude each other, alone or under the keywords around them."""
    if disjoint(a, b):
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    outer = {name: value for name, value in around.items() if name in ("type", "properties", "required", "allOf")}
    return bool(outer) and disjoint({"allOf": [a, outer]}, {"allOf": [b, outer]})


def is_control(code: int) -> bool:
    r"""True if JSON writes a character as \u and four digits."""
    return (code < 0x20 and chr(code) not in "\n\r\t\b\f") or code == 0x7F


def guarded(schema: Any) -> Any:
    r"""A schema whose additional properties cannot be a listed one spelt with \u escapes."""
    if isinstance(schema, list):
        return [guarded(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: own if name == "enum" else guarded(own) for name, own in schema.items() if name not in _NAMED}
    made |= {name: {key: guarded(own) for key, own in schema[name].items()} for name in _NAMED if name in schema}
    if ("properties" in made or "required" in made) and made.get("additionalProperties", True) is not False:
        if made.get("patternProperties"):
            raise SchemaRefusedError(
                "patternProperties", "", "it stands beside additional properties in a schema with control characters"
            )
        made["patternProperties"] = {f"^{ANYTHING}$": made.get("additionalProperties", True)}
        made["additionalProperties"] = False
    return made


def conjunction(parts: list[Any]) -> Any:
    """A schema with all of ``parts``."""
    kept = [part for part in parts if part not in (True, {})]
    if any(part is False for part in kept):
        return False
    if not kept:
        return True
    return kept[0] if len(kept) == 1 else {"allOf": kept}


def disjunction(options: list[Any]) -> Any:
    """A schema with any of ``options``."""
    kept = [option for option in options if option is not False]
    if any(option in (True, {}) for option in kept):
        return True
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}
