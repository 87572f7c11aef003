"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5.

Values of strings are bare text; others are JSON. An answer's arguments are assembled as JSON, one parameter at a time.
Source: the chat template of Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.text.tool_parsers.base import Format, FormatPart, ParserContext, SchemaPart, Tool, ToolCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
PYTHON = {"True": True, "False": False, "None": None}
KINDS: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


class XmlCallParser(ToolCallParser):
    """Parser that starts at a function's opening mark: models sometimes omit ``<tool_call>`` and closing marks."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._body = self._key = self._value = ""
        self._parameters: Mapping[str, Any] = {}
        self._any = self._open = False

    def outside(self) -> bool:
        text, mark = self.until(OPEN, FUNCTION)
        self.say(text)
        if mark:
            self._body, self.step = mark, self._name if mark == FUNCTION else self._function
        return mark is not None

    def _function(self) -> bool:
        """Read a function after ``<tool_call>``; otherwise the text stays text."""
        held = self.held
        blanks = held[: len(held) - len(held.lstrip())]
        self.held = held[len(blanks) :]
        self._body += blanks
        if (not self.held and not self.last) or self.awaits(FUNCTION):
            return False
        if self.takes(FUNCTION):
            self._body, self.step = self._body + FUNCTION, self._name
        else:
            self._give_up()
        return True

    def _name(self) -> bool:
        text, mark = self.until(">", "\n")
        self._body += text + (mark or "")
        if mark == ">":
            name = self._body[:-1].rpartition(FUNCTION)[2].strip()
            tool = next((tool for tool in self.context.tools if tool.name == name), None)
            self._parameters = {} if tool is None else tool.parameters
            self.begin_call(name)
            self._body, self._any, self._open, self.step = "", False, True, self._between
        elif mark or self.last:
            self._give_up()
        return mark is not None

    def _give_up(self) -> None:
        """Return text that is not a call as content."""
        text, self._body, self.step = self._body, "", self.outside
        self.say(text)

    def _between(self) -> bool:
        """Read within a function, between parameters."""
        _, mark = self.until(PARAMETER, FUNCTION_END, CLOSE)
        if mark == PARAMETER:
            self._key, self._value, self.step = "", "", self._parameter_name
        elif mark:
            self._end(mark)
        return mark is not None

    def _parameter_name(self) -> bool:
        text, mark = self.until(">")
        self._key += text
        if mark:
            self.step = self._read_value
        return mark is not None

    def _read_value(self) -> bool:
        text, mark = self.until(PARAMETER_END, PARAMETER, FUNCTION_END)
        self._value += text
        if mark is None:
            return False  # the answer ends inside the value, which is left out
        value = typed(self._value.removeprefix("\n").removesuffix("\n"), self._parameters, self._key.strip())
        pair = f"{json.dumps(self._key.strip(), ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self.argue((", " if self._any else "{") + pair)
        self._any, self.step = True, self._between
        if mark == PARAMETER:
            self._key, self._value, self.step = "", "", self._parameter_name
        elif mark == FUNCTION_END:
            self._end(mark)
        return True

    def _end(self, mark: str) -> None:
        self.argue("}" if self._any else "{}")
        self.step = self._close if mark == FUNCTION_END else self.outside
        if mark == CLOSE:
            self.finish_call()

    def _close(self) -> bool:
        if self.skip() and not self.awaits(CLOSE):
            self.takes(CLOSE)
            self.finish_call()
            return True
        return False


def typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """The value of a parameter's text by its schema; the text itself if it does not fit."""
    own = _own(schema, key)
    listed = [one for part in own for one in _given(part)]
    kinds = {kind for part in own for kind in _types(part)}
    if "string" in kinds and any(name in part for part in own for name in EXACT):
        text = text.strip()  # surrounding blanks do not belong to such a value
    try:
        value = PYTHON[text.strip()] if text.strip() in PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return next((one for one in listed if one == text.strip()), text)
    if listed:
        return next((one for one in listed if one == text.strip() or same(one, value)), value)
    types = tuple(kind for name in kinds for kind in KINDS.get(name, ()))
    if not kinds or (isinstance(value, types) and not (isinstance(value, bool) and bool not in types)):
        return value
    return text


EXACT = ("pattern", "format", "minLength", "maxLength")


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: Python treats true and 1 as equal."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _own(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The schema of a parameter, its references and its alternatives, in one list."""
    properties = schema.get("properties")
    found: list[Mapping[str, Any]] = []
    open_ = [properties.get(key)] if isinstance(properties, Mapping) else []
    while open_ and len(found) < MAX_PARTS:
        part = open_.pop()
        if not isinstance(part, Mapping):
            continue
        found.append(part)
        for name in ("anyOf", "oneOf", "allOf"):
            open_ += part[name] if isinstance(part.get(name), list) else []
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#/"):
            open_.append(_referred(schema, reference))
    return found


MAX_PARTS = 64
"""Most parts of a parameter's schema that are read; a schema may refer to itself."""


def _referred(schema: Any, reference: str) -> Any:
    for name in reference.removeprefix("#/").split("/"):
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _given(part: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists; none where it lists none, or is malformed."""
    listed = part.get("enum")
    if isinstance(listed, list) and listed:
        return listed
    return [part["const"]] if "const" in part else []


def _types(part: Mapping[str, Any]) -> list[str]:
    named = part.get("type")
    named = named if isinstance(named, list) else [named]
    return [one for one in named if isinstance(one, str)]


class QwenCoder(Format):
    """Qwen's XML."""

    name = "qwen3_coder"
    marks = (OPEN, CLOSE)
    parser = XmlCallParser
    trigger = OPEN
    interrupts = (OPEN,)
    excludes = (FUNCTION,)

    def known_by(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def call(self, tool: Tool) -> Sequence[FormatPart]:
        head = f"{OPEN}\n{FUNCTION}{tool.name}>\n"
        return head, SchemaPart(tool.parameters, "qwen_xml"), f"\n{FUNCTION_END}\n{CLOSE}"
