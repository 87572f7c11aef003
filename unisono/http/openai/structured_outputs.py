"""Structured outputs in request bodies: OpenAI's ``response_format``, and vLLM's fields for the same.

``protocol.py`` declares the fields; this module reads them. A body may set one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from unisono.http.errors import show
from unisono.types import BadRequest, StructuredOutputs
from unisono.types.errors import FieldPath
from unisono.types.unknown_fields import known_part

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's older fields and SGLang's -> fields of structured_outputs."""

SCHEMA_FIELDS = {"name", "description", "schema", "strict"}
OPTIONS = {field.name for field in fields(StructuredOutputs)}


def structured_outputs(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """Read the fields of a body that constrain its answer: ``response_format``, ``structured_outputs``, ``guided_…``.

    None if the answer is free. Raises BadRequest with the field.
    """
    found = {name: _options(name, value) for name, value in fields.items() if value is not None}
    chosen = {name: options for name, options in found.items() if options is not None}
    if len(chosen) > 1:
        names = [part for name in chosen for part in (" and ", FieldPath(name))][1:]
        raise BadRequest([*names, " are set; an answer has one form: give one of them."], names[0])
    for name, options in chosen.items():
        try:
            return StructuredOutputs(**options)
        except BadRequest as error:
            raise BadRequest(error.parts, name) from None
    return None


def _options(name: str, value: Any) -> dict[str, Any] | None:
    """The fields of StructuredOutputs that a body's field sets; None if the answer stays free."""
    if name in GUIDED:
        return {GUIDED[name]: value}
    if name == "response_format":
        return _response_format(value)
    value = known_part(value, OPTIONS, name)
    unknown = sorted(value.keys() - OPTIONS)
    if unknown:
        raise BadRequest(
            f"structured_outputs has {unknown[0]!r}, which is none of {', '.join(sorted(OPTIONS))}; remove it.", name
        )
    if not isinstance(value.get("disable_any_whitespace", False), bool):
        raise BadRequest("structured_outputs.disable_any_whitespace must be true or false.", name)
    return dict(value)


def _response_format(value: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    if not isinstance(kind, str) or kind not in known:
        _refuse(value, "its type must be text, json_object, json_schema or structural_tag")
    value = known_part(value, known["json_schema"], "response_format")
    if extra := sorted(value.keys() - known[kind]):
        _refuse(value, f"{extra[0]!r} does not belong to type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, Mapping) or wrapped.get("schema") is None:
        _refuse(value, "json_schema must be an object with a name and a schema")
    wrapped = known_part(wrapped, SCHEMA_FIELDS, "response_format.json_schema")
    if extra := sorted(wrapped.keys() - SCHEMA_FIELDS):
        _refuse(value, f"json_schema has {extra[0]!r}, which is none of {', '.join(sorted(SCHEMA_FIELDS))}")
    return {"json": wrapped["schema"]}


def _refuse(value: Mapping[str, Any], why: str) -> NoReturn:
    raise BadRequest(f"response_format={show(value)} is not valid: {why}.", "response_format")
