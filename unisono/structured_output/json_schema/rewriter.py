"""The interface of the schema rewriter for the rules of arrays and objects, and a check that both share."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Protocol

from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.refs import References, SchemaPlace


class Rewriter(Protocol):
    """Rewriter of schemas, such as ``compile.Normaliser``. overlaps: pointers of schemas with several patterns."""

    references: References
    overlaps: list[str]

    def schema(self, place: SchemaPlace) -> Any:
        """A schema in llguidance's form: an object, True or False."""
        ...

    def again(self, schema: Any, place: SchemaPlace) -> Any:
        """Rewrite a schema that is derived from the one in ``place``."""
        ...

    def negated(self, place: SchemaPlace, keyword: str) -> Any:
        """The negation of the schema in ``place``, needed by ``keyword``."""
        ...

    def patterns(self, place: SchemaPlace) -> list[str]:
        """The expressions of pattern and format, for strings."""
        ...

    def expressions(self, pattern: Any, place: SchemaPlace, keyword: str) -> list[str]:
        """A pattern as expressions of whole strings, all of which must match."""
        ...

    def refuse(self, keyword: str, place: SchemaPlace, why: str) -> SchemaRefusedError:
        """The refusal of a keyword."""
        ...

    def text(self, text: str) -> str:
        """Record a text that answers may hold, and return it."""
        ...


def evaluates(value: Any, keywords: Set[str]) -> bool:
    """Return True if a schema in ``value``, at any depth, has one of the keywords that evaluate items or properties."""
    if isinstance(value, list):
        return any(evaluates(one, keywords) for one in value)
    if not isinstance(value, Mapping):
        return False
    return bool(keywords & value.keys()) or any(evaluates(one, keywords) for one in value.values())
