"""Tool calls as structural tags for the grammar engine, in the format that the parser reads.

A mark that is a special token of the checkpoint is required as that token, because a grammar's text never contains
special tokens; every other mark as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.text.tool_parsers.base import Format, FormatPart, SchemaPart, TagPart, Tool
from unisono.types import BadRequest, StructuredOutputs

Tag = dict[str, Any]

BLANKS = 2
"""Most consecutive blanks between the parts of arguments, which models write on one line."""
ANSWER_BLANKS = 20
"""Most consecutive blanks between the parts of a JSON answer, as in ``structured_output``."""

MAX_CALLS = 8
"""Most calls in an answer that must call: a small model may repeat one until its tokens are spent."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Structure:
    """Writer of structural tags in one format. specials: the ids of the checkpoint's special tokens."""

    def __init__(self, form: Format, specials: Mapping[str, int]) -> None:
        self._form = form
        self._specials = {mark: specials[mark] for mark in form.marks if mark in specials}
        self._split = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")

    def required(self, tools: Sequence[Tool], parallel: bool) -> StructuredOutputs:
        """At least one call of ``tools``, and nothing else."""
        return _outputs(self._calls(tools, parallel))

    def optional(self, tools: Sequence[Tool], parallel: bool) -> StructuredOutputs:
        """Free text in which calls satisfy the schemas of strict tools."""
        form, loose = self._form, _loosened(tools)
        if form.heads:
            return _outputs(self._with_heads(loose))
        trigger = next((mark for mark in self._specials if form.trigger.startswith(mark)), form.trigger)
        if trigger in self._specials:
            rules = [[self._specials[trigger], self._without(self._calls(loose, parallel), trigger)]]
            return _outputs({"type": "token_dispatch", "rules": rules, "loop": parallel})
        texts = [
            [text, self._without(self._calls(first, parallel, loose), text)]
            for text, first in form.triggers(loose).items()
        ]
        return _outputs({"type": "dispatch", "rules": texts, "loop": parallel, "excludes": list(form.excludes)})

    def either(self, tools: Sequence[Tool], parallel: bool, outputs: StructuredOutputs) -> StructuredOutputs:
        """Calls, or an answer in the requested form."""
        return _outputs({"type": "or", "elements": [self._calls(_loosened(tools), parallel), self._answer(outputs)]})

    def answer(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """An answer in the requested form, with the message head of this format."""
        if not self._form.answer_head or outputs.structural_tag is not None:
            return outputs
        return _outputs(self._answer(outputs))

    def _answer(self, outputs: StructuredOutputs) -> Tag:
        return {"type": "sequence", "elements": [*self._parts(self._form.answer_head), _answer(outputs)]}

    def _with_heads(self, tools: Sequence[Tool]) -> Tag:
        """Messages, each with a head; arguments follow the head of a call."""
        form = self._form
        calls = self._without(self._one_of(tools), form.trigger)
        heads = [calls, *(self._sequence([head]) for head in form.other_heads)]
        rules = [
            [begins, {"type": "sequence", "elements": [*self._parts(rest), {"type": "or", "elements": heads}]}]
            for begins, rest in form.heads.items()
        ]
        if form.trigger not in self._specials:
            return {"type": "dispatch", "rules": rules, "loop": True, "excludes": []}
        return {
            "type": "token_dispatch",
            "rules": [[self._specials[begins], rule] for begins, rule in rules if begins in self._specials],
            "loop": True,
        }

    def _calls(self, tools: Sequence[Tool], parallel: bool, later: Sequence[Tool] | None = None) -> Tag:
        """A call of ``tools``; if several are allowed, more of these, or of ``later``, up to MAX_CALLS."""
        form, one = self._form, self._one_of(tools)
        elements = [*self._parts(form.before), one]
        if parallel:
            one = self._one_of(later or tools)
            more = {"type": "sequence", "elements": [*self._parts(form.between), one]} if form.between else one
            elements.append({"type": "repeat", "min": 0, "max": MAX_CALLS - 1, "content": more})
        return {"type": "sequence", "elements": [*elements, *self._parts(form.after)]}

    def _one_of(self, tools: Sequence[Tool]) -> Tag:
        calls = [self._sequence(self._form.call(tool)) for tool in tools]
        return calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}

    def _sequence(self, parts: Sequence[FormatPart]) -> Tag:
        return {"type": "sequence", "elements": [tag for part in parts for tag in self._parts(part)]}

    def _parts(self, part: FormatPart) -> list[Tag]:
        if isinstance(part, SchemaPart):
            schema = _closed({**ANY_OBJECT, **part.schema})
            written: Tag = {"type": "json_schema", "json_schema": schema}
            return [written | ({"max_whitespace_cnt": BLANKS} if part.style == "json" else {"style": part.style})]
        if isinstance(part, TagPart):
            return [dict(part.tag)]
        found: list[Tag] = []
        place = 0
        for match in self._split.finditer(part):
            found += [_text(part[place : match.start()]), {"type": "token", "token": self._specials[match[0]]}]
            place = match.end()
        return [tag for tag in (*found, _text(part[place:])) if tag.get("value") != ""]

    def _without(self, tag: Tag, trigger: str) -> Tag:
        """``tag`` without its trigger, the text that it begins with."""
        return self._cut(tag, trigger)[0]

    def _cut(self, tag: Tag, trigger: str) -> tuple[Tag, str]:
        """(``tag`` without its beginning, the part of ``trigger`` that exceeds it). A token is a trigger as a whole."""
        if tag["type"] == "const_string":
            value = tag["value"]
            return _text(value.removeprefix(trigger)) if value.startswith(trigger) else _text(""), (
                trigger[len(value) :] if trigger.startswith(value) else ""
            )
        if tag["type"] == "token":
            return _text(""), ""
        elements = [dict(one) for one in tag["elements"]]
        if tag["type"] == "or":
            return {"type": "or", "elements": [self._without(one, trigger) for one in elements]}, ""
        while elements and trigger:
            first, trigger = self._cut(elements.pop(0), trigger)
            if first.get("value") != "":
                return {"type": "sequence", "elements": [first, *elements]}, trigger
        return {"type": "sequence", "elements": elements}, trigger


OPENING = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if",
    "dependentSchemas", "dependencies", "propertyNames", "minProperties",
})  # fmt: skip


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without additional properties: a small model writes those until its tokens are spent.

    A client's schema may have anything under a keyword; the grammar says what is wrong with it.
    """
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence) or OPENING & schema.keys():
        return schema
    listed = bool(properties) and all(isinstance(name, str) and name in properties for name in required)
    return {**schema, "additionalProperties": False} if listed else schema


def _loosened(tools: Sequence[Tool]) -> list[Tool]:
    """The tools, with any arguments allowed for those that are not strict."""
    return [tool if tool.strict else replace(tool, parameters={}) for tool in tools]


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _outputs(form: Tag) -> StructuredOutputs:
    try:
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})
    except BadRequest as error:
        raise tools_error(error) from None


def tools_error(error: BadRequest) -> BadRequest:
    """An error of the grammar that tools became, as one of tools."""
    message = str(error) if error.reason is None else f"tools cannot be made a grammar: {error.reason}"
    return BadRequest(message, "tools", error.code)


def _answer(outputs: StructuredOutputs) -> Tag:
    """A request's own form as a part of a structural tag. Raises BadRequest for a structural tag."""
    if outputs.json is not None or outputs.json_object:
        schema = json.loads(outputs.json) if isinstance(outputs.json, str) else outputs.json or ANY_OBJECT
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": ANSWER_BLANKS}
    if outputs.regex is not None:
        return {"type": "regex", "pattern": outputs.regex}
    if outputs.choice is not None:
        return {"type": "or", "elements": [_text(one) for one in outputs.choice]}
    if outputs.grammar is not None:
        return {"type": "grammar", "grammar": outputs.grammar}
    raise BadRequest(
        "tools and a structural tag are set; the tag would have to contain the calls: leave out one of them.", "tools"
    )
