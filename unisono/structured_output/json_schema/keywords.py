"""The keywords of JSON Schema: enforced, enforced in some forms, refused, or without effect on an answer.

``compile.py`` refuses by this table, and the tables of docs/guide/structure.md are generated from it (:func:`markdown`,
checked by a test).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["enforced", "partly", "approximated", "refused"]


@dataclass(frozen=True)
class Keyword:
    """A keyword that decides validity.

    when: the forms that are enforced. instead: the way out.

    An answer is valid under every accepted keyword. ``partly``: some forms are refused. ``approximated``: some valid
    values cannot be generated.
    """

    status: Status
    when: str = ""
    instead: str = ""


class SchemaRefusedError(ValueError):
    """A JSON schema that cannot be enforced; the text names the keyword, its JSON pointer and the way out."""

    def __init__(self, keyword: str, pointer: str, why: str, instead: str = "") -> None:
        way_out = instead or (KEYWORDS[keyword].instead if keyword in KEYWORDS else "")
        place = f"#{pointer}" if pointer else "#"
        super().__init__(f"keyword {keyword!r} at {place}: {why}" + (f"; {way_out}" if way_out else ""))
        self.keyword, self.pointer = keyword, pointer


KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword("enforced"),
    "enum": Keyword("enforced", "integers up to 2^53"),
    "const": Keyword("enforced", "integers up to 2^53"),
    "$ref": Keyword("partly", "within the schema: pointers, $anchor, $id", "copy the other schema into $defs"),
    "$dynamicRef": Keyword("partly", "where one $dynamicAnchor of that name exists", "use $ref"),
    "$recursiveRef": Keyword("partly", 'as $ref "#"', "use $ref"),
    "allOf": Keyword("enforced"),
    "anyOf": Keyword("enforced"),
    "oneOf": Keyword(
        "partly", "where the branches exclude each other, or what they have in common can be left out",
        "use anyOf, or give each branch a required property with a const of its own",
    ),
    "not": Keyword(
        "partly", "of types, bounds, const, enum, lengths, required, properties, and combinations of these; of the "
        "type integer, numbers with a fraction are not written either",
        "write the values that are allowed",
    ),
    "if": Keyword("partly", "where its negation can be written (see not)", "use anyOf of the two cases"),
    "then": Keyword("partly", "with if"),
    "else": Keyword("partly", "with if"),
    "minimum": Keyword("enforced", "up to 2^53"),
    "maximum": Keyword("enforced", "up to 2^53"),
    "exclusiveMinimum": Keyword("enforced", "up to 2^53"),
    "exclusiveMaximum": Keyword("enforced", "up to 2^53"),
    "multipleOf": Keyword("partly", "up to 9 digits", "use an enum, or leave it out"),
    "minLength": Keyword("enforced"),
    "maxLength": Keyword("enforced"),
    "pattern": Keyword(
        "partly", "ECMA-262 without back references, lookbehind, word boundaries and negative lookahead",
        "rewrite the expression",
    ),
    "format": Keyword(
        "partly", "the formats of the table below; other names are annotations", "use pattern",
    ),
    "properties": Keyword("enforced", "in the order of the schema"),
    "required": Keyword("enforced"),
    "additionalProperties": Keyword("enforced"),
    "patternProperties": Keyword(
        "partly", "where no name matches two expressions", "list the properties, or make the expressions disjoint"
    ),
    "propertyNames": Keyword(
        "partly", "pattern, format, lengths, const or enum, beside no patternProperties", "use patternProperties"
    ),
    "minProperties": Keyword(
        "partly", "0 and 1; more where additionalProperties is false", "name the properties in required"
    ),
    "maxProperties": Keyword("partly", "up to 100 combinations of optional properties", "list the properties"),
    "dependentRequired": Keyword("enforced"),
    "dependentSchemas": Keyword("enforced"),
    "dependencies": Keyword("enforced", "as dependentRequired and dependentSchemas"),
    "unevaluatedProperties": Keyword(
        "partly", "beside properties, allOf and $ref", "use additionalProperties in a schema without combinators"
    ),
    "items": Keyword("enforced"),
    "prefixItems": Keyword("enforced"),
    "additionalItems": Keyword("enforced", "with a list of items"),
    "minItems": Keyword("enforced"),
    "maxItems": Keyword("enforced"),
    "uniqueItems": Keyword(
        "partly", "where items have at most 5 values, or the places exclude each other",
        "leave it out and check the answer, or list the arrays that are allowed in enum",
    ),
    "contains": Keyword("approximated", "the items are among the first 8 of the array", "use prefixItems"),
    "minContains": Keyword("approximated", "with contains", "use prefixItems"),
    "maxContains": Keyword("approximated", "where the negation of contains can be written (see not)", "leave it out"),
    "unevaluatedItems": Keyword("partly", "beside prefixItems, allOf and $ref", "use items"),
    "extends": Keyword("refused", "", "use allOf"),
    "disallow": Keyword("refused", "", "use not"),
    "divisibleBy": Keyword("refused", "", "use multipleOf"),
}  # fmt: skip


def markdown() -> str:
    """The table of keywords for the docs."""
    names = {"partly": "enforced or refused"}
    lines = ["| keyword | | forms | instead of others |", "| --- | --- | --- | --- |"]
    for name, keyword in KEYWORDS.items():
        lines.append(f"| `{name}` | {names.get(keyword.status, keyword.status)} | {keyword.when} | {keyword.instead} |")
    return "\n".join(lines)
