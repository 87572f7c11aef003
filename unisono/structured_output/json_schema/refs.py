"""References in a JSON schema: pointers, anchors and identifiers, resolved within the document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from unisono.structured_output.json_schema.keywords import SchemaRefusedError

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    "not", "if", "then", "else", "items", "additionalItems", "contains", "additionalProperties", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


@dataclass(frozen=True)
class SchemaPlace:
    """A schema in a document. pointer: its JSON pointer. base: the URI that its references are relative to."""

    schema: Any
    pointer: str
    base: str

    def child(self, *path: str | int) -> SchemaPlace:
        """The schema below, at ``path``."""
        schema, pointer = self.schema, self.pointer
        for step in path:
            schema = schema[step]
            pointer += "/" + escaped(str(step))
        return SchemaPlace(schema, pointer, based(self.base, schema))


def escaped(step: str) -> str:
    """Escape one step of a JSON pointer."""
    return step.replace("~", "~0").replace("/", "~1")


def based(base: str, schema: Any) -> str:
    """The base URI of a schema inside one with ``base``."""
    own = identifier(schema)
    return urldefrag(urljoin(base, own)).url if own and not own.startswith("#") else base


def identifier(schema: Any) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    own = schema.get("$id", schema.get("id"))
    return own if isinstance(own, str) else None


class References:
    """The schemas of one document, by URI and anchor."""

    def __init__(self, root: Any) -> None:
        self.root = SchemaPlace(root, "", based("", root))
        self._resources: dict[str, SchemaPlace] = {"": self.root, self.root.base: self.root}
        self._anchors: dict[tuple[str, str], SchemaPlace] = {}
        self._dynamic: dict[str, list[SchemaPlace]] = {}
        for place in _places(self.root):
            self._note(place)

    def _note(self, place: SchemaPlace) -> None:
        schema = place.schema
        own = identifier(schema)
        if own and not own.startswith("#"):
            self._resources.setdefault(place.base, place)
        elif own:
            self._anchors.setdefault((place.base, own[1:]), place)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(name), str):
                self._anchors.setdefault((place.base, schema[name]), place)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(place)

    def resolved(self, place: SchemaPlace, keyword: str = "$ref") -> SchemaPlace:
        """The target of the reference in ``place``. Raises SchemaRefusedError."""
        reference = place.schema[keyword]
        if not isinstance(reference, str):
            raise SchemaRefusedError(keyword, place.pointer, "it must be a string")
        if keyword == "$dynamicRef" and len(self._dynamic.get(reference.rpartition("#")[2], [])) > 1:
            raise SchemaRefusedError(keyword, place.pointer, f"{reference!r} means several schemas")
        uri, fragment = urldefrag(urljoin(place.base, reference) if reference[:1] != "#" else place.base + reference)
        resource = self._resources.get(uri)
        if resource is None:
            why = f"{reference!r} is not in this schema, and nothing is fetched"
            raise SchemaRefusedError(keyword, place.pointer, why)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((resource.base, unquote(fragment)))
            if found is None:
                raise SchemaRefusedError(keyword, place.pointer, f"the anchor {reference!r} does not exist")
            return found
        for step in unquote(fragment).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            inner = resource.schema
            if isinstance(inner, Mapping) and step in inner:
                resource = resource.child(step)
            elif isinstance(inner, list) and re.fullmatch("0|[1-9][0-9]*", step) and int(step) < len(inner):
                resource = resource.child(int(step))
            else:
                raise SchemaRefusedError(keyword, place.pointer, f"{reference!r} does not exist in this schema")
        if not isinstance(resource.schema, (Mapping, bool)):
            raise SchemaRefusedError(keyword, place.pointer, f"{reference!r} is not a schema")
        return resource


def _places(root: SchemaPlace) -> Iterator[SchemaPlace]:
    """All schemas of a document that are objects."""
    open_ = [root]
    while open_:
        place = open_.pop()
        schema = place.schema
        if not isinstance(schema, Mapping):
            continue
        yield place
        for name in SINGLE:
            if name in schema:
                open_ += (
                    [place.child(name, i) for i in range(len(schema[name]))]
                    if isinstance(schema[name], list)
                    else [place.child(name)]
                )
        for name in LISTS:
            if isinstance(schema.get(name), list):
                open_ += [place.child(name, i) for i in range(len(schema[name]))]
        for name in MAPS:
            if isinstance(schema.get(name), Mapping):
                open_ += [place.child(name, key) for key in schema[name]]
