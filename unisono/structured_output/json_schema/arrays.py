"""Array keywords, rewritten into prefixItems and items."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, permutations
from typing import Any

from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.logic import NoExactForm, Size, disjoint, inlined
from unisono.structured_output.json_schema.refs import SchemaPlace
from unisono.structured_output.json_schema.rewriter import Rewriter, evaluates
from unisono.structured_output.json_schema.values import has_type

MAX_PLACES = 8
"""The matches of ``contains`` are among this many first items of an array."""
MAX_COMBINATIONS = 100
"""Most placements of these items that are enumerated."""
MAX_VALUES = 5
"""Most values of the items of an array with ``uniqueItems``: 5 make 326 arrays."""

_COMBINATORS = ("anyOf", "oneOf", "if", "then", "else")
_EVALUATING = frozenset({
    "prefixItems", "items", "additionalItems", "contains", "unevaluatedItems", "$ref", "$dynamicRef", "allOf",
    *_COMBINATORS,
})  # fmt: skip


class Arrays:
    """Rewrites the array keywords of a schema for a Rewriter."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._to = rewriter

    def keywords(self, place: SchemaPlace) -> tuple[dict[str, Any], list[Any]]:
        """(keywords that llguidance supports, further conjuncts for arrays)."""
        schema = place.schema
        first, rest = positional(schema)
        main: dict[str, Any] = {}
        if first in schema:
            main["prefixItems"] = [self._to.schema(place.child(first, i)) for i in range(len(schema[first]))]
        if rest in schema and (first in schema or rest == "items"):
            main["items"] = self._to.schema(place.child(rest))
        main |= {name: int(schema[name]) for name in ("minItems", "maxItems") if name in schema}
        most = main.get("maxItems")
        if main.get("items") is False:
            most = min(len(main.get("prefixItems", ())), most if most is not None else len(main.get("prefixItems", ())))
        parts = []
        if "contains" in schema:
            parts += self._contains(place, most)
        if schema.get("uniqueItems"):
            parts += self._unique(place, most)
        if schema.get("unevaluatedItems", True) not in (True, {}):
            parts += self._unevaluated(place)
        return main, parts

    def _contains(self, place: SchemaPlace, most: int | None) -> list[Any]:
        """Arrays whose matches of ``contains`` are among the first MAX_PLACES items."""
        schema = place.schema
        least, limit = int(schema.get("minContains", 1)), schema.get("maxContains")
        contained = self._to.schema(place.child("contains"))
        if limit is None and (not least or contained in (True, {})):
            return [{"type": "array", "minItems": least}] if least else []
        if contained is False:
            return [False] if least else []
        other: Any = True
        if limit is not None:
            other = self._to.again(self._to.negated(place.child("contains"), "maxContains"), place)
        places = MAX_PLACES if most is None else min(MAX_PLACES, most)
        counts = [least] if limit is None else range(least, min(int(limit), places) + 1)
        chosen = [one for count in counts for one in combinations(range(places), count)]
        if len(chosen) > MAX_COMBINATIONS:
            raise self._to.refuse(
                "contains", place, f"more than {MAX_COMBINATIONS} placements of the items are possible"
            )
        options = [
            {
                "type": "array",
                "prefixItems": [contained if i in one else other for i in range(max(one, default=-1) + 1)],
                "items": other,
                "minItems": max(one, default=-1) + 1,
            }
            for one in chosen
        ]
        return [{"anyOf": options}] if options else [False]

    def _unique(self, place: SchemaPlace, most: int | None) -> list[Any]:
        if most is not None and most <= 1:
            return []
        schema = place.schema
        first, rest = positional(schema)
        try:
            own = [
                inlined(place.child(first, i), self._to.references, Size()) for i in range(len(schema.get(first, ())))
            ]
            items = inlined(place.child(rest), self._to.references, Size()) if rest in schema else True
        except NoExactForm:
            own, items = [True, True], True
        bounded = bool(own) and most is not None and most <= len(own)
        if bounded and all(disjoint(a, b) for i, a in enumerate(own) for b in own[:i]):
            return []
        values = None if own else finite(items)
        if values is None or len(values) > MAX_VALUES:
            why = (
                f"its items may have more than {MAX_VALUES} different values, and no grammar tells whether they repeat"
            )
            raise self._to.refuse("uniqueItems", place, why)
        sizes = range(int(schema.get("minItems", 0)), min(len(values), most if most is not None else len(values)) + 1)
        arrays = [list(one) for size in sizes for one in permutations(values, size)]
        return [{"type": "array", "enum": arrays}] if arrays else [False]

    def _unevaluated(self, place: SchemaPlace) -> list[Any]:
        count = self._evaluated(place, place, [])
        if count is None:
            return []
        own = self._to.schema(place.child("unevaluatedItems"))
        return [{"type": "array", "prefixItems": [True] * count, "items": own}]

    def _evaluated(self, place: SchemaPlace, asking: SchemaPlace, seen: list[str]) -> int | None:
        """The number of items that a schema evaluates in every valid array; None for all."""
        schema = place.schema
        if not isinstance(schema, Mapping) or place.pointer in seen:
            return 0
        seen = [*seen, place.pointer]
        first, rest = positional(schema)
        if rest in schema or (place is not asking and "unevaluatedItems" in schema):
            return None
        for name in ("contains", *_COMBINATORS):
            if name in schema and (name == "contains" or evaluates(schema[name], _EVALUATING)):
                raise SchemaRefusedError(
                    "unevaluatedItems", asking.pointer, f"{name!r} decides which items are evaluated"
                )
        count = len(schema.get(first, ()))
        inner = [place.child("allOf", i) for i in range(len(schema.get("allOf", ())))]
        inner += [self._to.references.resolved(place, name) for name in ("$ref", "$dynamicRef") if name in schema]
        for one in inner:
            found = self._evaluated(one, asking, seen)
            if found is None:
                return None
            count = max(count, found)
        return count


def positional(schema: Mapping[str, Any]) -> tuple[str, str]:
    """(keyword of the items by position, keyword of the others): those of draft 2019-09 and before, or the current
    ones.
    """
    if isinstance(schema.get("items"), list):
        return "items", "additionalItems"
    return "prefixItems", "items"


def finite(schema: Any) -> list[Any] | None:
    """The values of a schema, if it lists them; otherwise None."""
    if not isinstance(schema, Mapping):
        return [] if schema is False else None
    if "enum" in schema or "const" in schema:
        return list(schema["enum"]) if "enum" in schema else [schema["const"]]
    types = schema.get("type")
    named = types if isinstance(types, list) else [types]
    if types is None or not set(named) <= {"boolean", "null"}:
        return None
    return [value for value in (False, True, None) if has_type(value, named)]
