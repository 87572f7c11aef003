"""Calls as the grammar engine takes them: xgrammar's structural tags, in the form that an answer is read in.

A mark that is a special token of the checkpoint is asked for as that token, for a grammar's text never has special
tokens; every other mark as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.server.tools.base import Format, Part, Schema, Tool
from unisono.types import BadRequest, StructuredOutputs

Tag = dict[str, Any]

BLANKS = 2
"""Blanks in a row between the parts of arguments, which models write on one line."""
ANSWER_BLANKS = 20
"""Blanks in a row between the parts of a JSON answer, as ``grammar`` has it."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Structure:
    """Writes structural tags in one form. specials: the ids of the checkpoint's special tokens."""

    def __init__(self, form: Format, specials: Mapping[str, int]) -> None:
        self._form = form
        self._specials = {mark: specials[mark] for mark in form.marks if mark in specials}
        self._split = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")

    def required(self, tools: Sequence[Tool], parallel: bool) -> StructuredOutputs:
        """One call of ``tools`` at least, and nothing else."""
        return _outputs(self._calls(tools, parallel))

    def optional(self, tools: Sequence[Tool], parallel: bool) -> StructuredOutputs:
        """Free text in which calls satisfy the schemas of strict tools."""
        form, inside = self._form, self._calls(_loosened(tools), parallel)
        trigger = next((mark for mark in self._specials if form.trigger.startswith(mark)), form.trigger)
        after = self._without(inside, trigger)
        if trigger in self._specials:
            rules = [[self._specials[trigger], after]]
            return _outputs({"type": "token_dispatch", "rules": rules, "loop": parallel})
        return _outputs(
            {"type": "dispatch", "rules": [[trigger, after]], "loop": parallel, "excludes": list(form.excludes)}
        )

    def either(self, tools: Sequence[Tool], parallel: bool, asked: StructuredOutputs) -> StructuredOutputs:
        """Calls, or an answer in the form that the request asks for."""
        return _outputs({"type": "or", "elements": [self._calls(_loosened(tools), parallel), _answer(asked)]})

    def _calls(self, tools: Sequence[Tool], parallel: bool) -> Tag:
        form = self._form
        calls = [self._sequence(form.call(tool)) for tool in tools]
        one: Tag = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        elements = [*self._parts(form.before), one]
        if parallel:
            more = {"type": "sequence", "elements": [*self._parts(form.between), one]} if form.between else one
            elements.append({"type": "star", "content": more})
        return {"type": "sequence", "elements": [*elements, *self._parts(form.after)]}

    def _sequence(self, parts: Sequence[Part]) -> Tag:
        return {"type": "sequence", "elements": [tag for part in parts for tag in self._parts(part)]}

    def _parts(self, part: Part) -> list[Tag]:
        if isinstance(part, Schema):
            schema = {**ANY_OBJECT, **part.schema}
            written: Tag = {"type": "json_schema", "json_schema": schema}
            return [written | ({"max_whitespace_cnt": BLANKS} if part.style == "json" else {"style": part.style})]
        found: list[Tag] = []
        place = 0
        for match in self._split.finditer(part):
            found += [_text(part[place : match.start()]), {"type": "token", "token": self._specials[match[0]]}]
            place = match.end()
        return [tag for tag in (*found, _text(part[place:])) if tag.get("value") != ""]

    def _without(self, tag: Tag, trigger: str) -> Tag:
        """``tag`` without the text that it begins with: what follows a trigger."""
        if tag["type"] == "const_string":
            return _text(tag["value"].removeprefix(trigger))
        if tag["type"] == "token":
            return _text("")
        elements = [dict(one) for one in tag["elements"]]
        if tag["type"] == "or":
            return {"type": "or", "elements": [self._without(one, trigger) for one in elements]}
        first = self._without(elements[0], trigger)
        rest = elements[1:]
        return {"type": "sequence", "elements": [*([] if first.get("value") == "" else [first]), *rest]}


def _loosened(tools: Sequence[Tool]) -> list[Tool]:
    """The same with any arguments where a tool is not strict."""
    return [tool if tool.strict else replace(tool, parameters={}) for tool in tools]


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _outputs(form: Tag) -> StructuredOutputs:
    try:
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})
    except BadRequest as error:
        raise BadRequest(reworded(str(error)), "tools") from None


def reworded(message: str) -> str:
    """An error of the grammar that tools became, as one of tools."""
    return "tools cannot be made a grammar:" + message.partition(":" if "is not valid:" in message else "compiled:")[2]


def _answer(asked: StructuredOutputs) -> Tag:
    """A request's own form as a part of a structural tag. Raises BadRequest for one that is a structural tag."""
    if asked.json is not None or asked.json_object:
        schema = json.loads(asked.json) if isinstance(asked.json, str) else asked.json or ANY_OBJECT
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": ANSWER_BLANKS}
    if asked.regex is not None:
        return {"type": "regex", "pattern": asked.regex}
    if asked.choice is not None:
        return {"type": "or", "elements": [_text(one) for one in asked.choice]}
    if asked.grammar is not None:
        return {"type": "grammar", "grammar": asked.grammar}
    raise BadRequest(
        "tools and a structural tag are set; the tag would have to contain the calls: leave out one of them.", "tools"
    )
