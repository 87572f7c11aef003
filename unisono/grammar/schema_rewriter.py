"""The rewriter of JSON schemas as the rules for arrays and objects call it back, and a check that both share."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Protocol

from unisono.grammar.keywords import SchemaRefusedError
from unisono.grammar.schema_refs import References, SchemaPlace


class Rewriter(Protocol):
    """Rewrites schemas; ``json_schema.Normaliser`` is one. overlaps: pointers of schemas with several patterns."""

    references: References
    overlaps: list[str]

    def schema(self, place: SchemaPlace) -> Any:
        """A schema as llguidance takes it: an object, True or False."""
        ...

    def again(self, schema: Any, place: SchemaPlace) -> Any:
        """A schema that was made of the one in ``place``."""
        ...

    def negated(self, place: SchemaPlace, keyword: str) -> Any:
        """The negation of the schema in ``place``, which ``keyword`` needs."""
        ...

    def patterns(self, place: SchemaPlace) -> list[str]:
        """The expressions that strings match: of pattern and format."""
        ...

    def expressions(self, pattern: Any, place: SchemaPlace, keyword: str) -> list[str]:
        """A pattern as expressions of whole strings, all of which hold."""
        ...

    def refuse(self, keyword: str, place: SchemaPlace, why: str) -> SchemaRefusedError:
        """The refusal of a keyword."""
        ...

    def text(self, text: str) -> str:
        """Note a text that answers may hold, and return it."""
        ...


def evaluates(value: Any, keywords: Set[str]) -> bool:
    """Return True if a schema in ``value``, at any depth, has one of the keywords that evaluate items or properties."""
    if isinstance(value, list):
        return any(evaluates(one, keywords) for one in value)
    if not isinstance(value, Mapping):
        return False
    return bool(keywords & value.keys()) or any(evaluates(one, keywords) for one in value.values())
