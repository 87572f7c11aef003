"""The interface of the rewriter of JSON schemas that the rules for arrays and objects call back."""

from __future__ import annotations

from typing import Any, Protocol

from unisono.structured_output.json_schema.keywords import SchemaRefusedError
from unisono.structured_output.json_schema.refs import References, SchemaPlace


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
