"""Arguments of a tool as parameters between marks (Qwen, GLM, MiniMax), as a structural tag.

Each property is a parameter, in the order of the schema; optional ones may be left out. A value of type string is bare
text up to the closing mark, every other value is JSON. A text that several types allow is interpreted as in the tool
parser: as JSON if it is JSON of an allowed type, as text otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.structured_output.json_schema.flat import FlatArguments, alternatives
from unisono.structured_output.json_schema.formats import FORMATS

Tag = dict[str, Any]


@dataclass(frozen=True)
class XmlStyle:
    r"""The marks of one parameter syntax.

    {} is replaced by the key, \n? is an optional line end.

    end: the closing mark without line ends. excludes: other texts that no bare value contains.
    """

    before: str
    after: str
    end: str
    excludes: tuple[str, ...]
    key: str
    """The expression of a key that the schema does not name."""


STYLES: Mapping[str, XmlStyle] = {
    "qwen_xml": XmlStyle(
        "\n?<parameter={}>", "</parameter>", "</parameter>", ("<parameter=", "</function>"), r"[^<>\s]{1,128}"
    ),
    "glm_xml": XmlStyle(
        "<arg_key>{}</arg_key>\n?<arg_value>", "</arg_value>\n?", "</arg_value>", ("<arg_key>", "</tool_call>"),
        r"[^<>\s]{1,128}",
    ),
    "minimax_xml": XmlStyle(
        '<parameter name="{}">', "</parameter>\n?", "</parameter>", ("<parameter name=", "</invoke>"),
        r'[^<>\s"]{1,128}',
    ),
}  # fmt: skip

_GAP: Tag = {"type": "regex", "pattern": r"\n?"}
BLANKS = 2
TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")


def parameters(schema: Any, style: XmlStyle) -> Tag:
    """The parameters that an object's schema allows."""
    return _either([_parameters(one, style) for one in alternatives(schema)])


def _parameters(own: FlatArguments, style: XmlStyle) -> Tag:
    parts: list[Tag] = []
    names = [*own.properties, *(name for name in own.required if name not in own.properties)]
    for name in names:
        schema = own.schema(name)
        if schema is not False:
            one = _sequence([_opening(style, name), _value(schema, style), *_closing(style)])
            parts.append(one if name in own.required else {"type": "optional", "content": one})
    if not names and own.others is not False:
        parts.append(_others(style))
    return _sequence(parts)


def _others(style: XmlStyle) -> Tag:
    """Any number of parameters of any name."""
    before, after = style.before.split("{}")
    opening = [*_marks(before), {"type": "regex", "pattern": style.key}, *_marks(after)]
    return {"type": "star", "content": _sequence([*opening, _value(True, style), *_closing(style)])}


def _opening(style: XmlStyle, name: str) -> Tag:
    return _sequence(_marks(style.before.replace("{}", name)))


def _marks(text: str) -> list[Tag]:
    """A mark, with its optional line ends."""
    first, *others = text.split("\n?")
    return [_constant(first), *(part for other in others for part in (_GAP, _constant(other)))]


def _closing(style: XmlStyle) -> list[Tag]:
    return _marks(style.after)


def _value(schema: Any, style: XmlStyle) -> Tag:
    """A parameter's value between its marks."""
    text: Tag = {"type": "any_text", "excludes": [style.end, *style.excludes]}
    if not isinstance(schema, Mapping):
        return text
    texts, others = _kinds(schema, schema)
    if any(not one for one in texts):
        return text  # the schema allows any text
    exact = [_sequence([_GAP, _exact(one, style), _GAP]) for one in texts]
    definitions = {name: schema[name] for name in ("$defs",) if name in schema}
    jsons = [
        _sequence([_GAP, _json({**definitions, **one} if isinstance(one, Mapping) else one), _GAP]) for one in others
    ]
    return _either([*exact, *jsons]) if exact or jsons else _sequence([_GAP, _json(schema), _GAP])


def _json(schema: Any) -> Tag:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": BLANKS}


def _kinds(schema: Any, root: Mapping[str, Any], seen: tuple[str, ...] = ()) -> tuple[list[Any], list[Any]]:
    """(string schemas, one for each alternative that allows strings; the alternatives without strings).

    A string schema without keywords allows any string.
    """
    if not isinstance(schema, Mapping):
        return ([{}], []) if schema is True else ([], [])
    if isinstance(options := schema.get("anyOf"), list):
        found = [_kinds(option, root, seen) for option in options]
        return [one for texts, _ in found for one in texts], [one for _, others in found for one in others]
    if isinstance(reference := schema.get("$ref"), str):
        target = (root.get("$defs") or {}).get(reference.removeprefix("#/$defs/"))
        if reference in seen or target is None:
            return [], [schema]
        return _kinds(target, root, (*seen, reference))
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        strings = [value for value in values if isinstance(value, str)]
        rest = [value for value in values if not isinstance(value, str)]
        return [{"enum": strings}] if strings else [], [{"enum": rest}] if rest else []
    types = schema.get("type")
    named = [types] if isinstance(types, str) else types if isinstance(types, list) else None
    if named is None:
        text = {name: schema[name] for name in TEXT_KEYWORDS if name in schema}
        return [text], [schema] if text else []
    if "string" not in named:
        return [], [schema]
    left = [one for one in named if one != "string"]
    text = {name: schema[name] for name in TEXT_KEYWORDS if name in schema}
    return [text], [{**schema, "type": left}] if left else []


def _exact(text: Mapping[str, Any], style: XmlStyle) -> Tag:
    """A bare text with constraints."""
    if "enum" in text:
        return _either([_constant(value) for value in text["enum"]])
    made: Tag = {"type": "any_text", "excludes": [style.end, *style.excludes], "patterns": []}
    if "pattern" in text:
        made["patterns"].append(text["pattern"])
    if "format" in text:
        made["patterns"].append(f"^(?:{FORMATS[text['format']]})$" if text["format"] in FORMATS else "")
    made |= {name: text[own] for own, name in (("minLength", "min_chars"), ("maxLength", "max_chars")) if own in text}
    return made


def _constant(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(elements: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _either(tags: Sequence[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": list(tags)}
