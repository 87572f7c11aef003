"""Structured outputs to grammars of llguidance. Runs in the compiling process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from unisono.structured_output.json_schema.keywords import KEYWORDS
from unisono.structured_output.json_schema.normalise import normalised
from unisono.structured_output.syntax.ebnf import ebnf_to_lark, quoted
from unisono.structured_output.syntax.endless import check_ends
from unisono.structured_output.syntax.regex import rewritten
from unisono.structured_output.syntax.structural_tag import TagWriter, Vocabulary

BLANKS = 20
"""Most consecutive blanks between the parts of a JSON text: a small model may write nothing else until its tokens are
spent.
"""

_LARK = re.compile(
    r"^[ \t]*[?!]{0,2}[A-Za-z_][\w-]*(?:\[[^\]\n]*\])?(?:::\w+)?(?:\.-?\d+)?[ \t]*:(?![:=])", re.MULTILINE
)


_PRIORITY = re.compile(r"^([ \t]*[?!]{0,2}[A-Za-z_]\w*)\.-?\d+(?=[ \t]*:)", re.MULTILINE)
"""A rule with a priority, which chooses between parses and changes no text."""


NOTHING = "no text matches it, or none that this model's tokens spell"


class RefusedError(ValueError):
    """A structured output that cannot be enforced; the text names the part and the reason."""


def is_lark(text: str) -> bool:
    """True for a grammar in Lark's notation, False for EBNF."""
    return "::=" not in text and _LARK.search(text) is not None


_ENGINE = (
    ("patternProperty regexes", "patternProperties", "a name may match several expressions"),
    ("circular references", "$ref", "it refers to itself, with other keywords beside the reference"),
    ("min/maxProperties", "minProperties", "the combinations of properties cannot be written out"),
    ("Unable to determine if regex is empty", "pattern", "it is too complex beside the other keywords of the string"),
    ("schema too large", "allOf", "its alternatives, multiplied, are too many"),
)
"""Messages of llguidance about a schema that passes ``json_schema/`` -> (keyword, reason)."""


def parse(kind: str, value: Any, compact: bool, vocabulary: Vocabulary) -> str:
    """The grammar in llguidance's form of the field ``kind`` of StructuredOutputs.

    compact: JSON without blanks. vocabulary: the tokens that a structural tag may name. Raises ValueError.
    """
    if kind == "json":
        return _alone("start: " + _json(json.loads(value), 0 if compact else BLANKS))
    if kind == "json_object":
        return _alone("start: " + _json({"type": "object"}, 0 if compact else BLANKS))
    if kind == "regex":
        return _alone(f"start: TEXT\nTEXT: {_regex(value)}")
    if kind == "choice":
        return _alone("start: TEXT\nTEXT: " + " | ".join(quoted(text) for text in value))
    if kind == "grammar":
        return _alone(_lark(value))
    return _structural_tag(value, compact, vocabulary)


def _alone(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _lark(text: str) -> str:
    if not is_lark(text):
        return ebnf_to_lark(text)
    check_ends(text)
    return _PRIORITY.sub(r"\1", text)


def _regex(pattern: str) -> str:
    """A regular expression as a terminal of Lark."""
    found = rewritten(pattern, search=False)
    parts = [f"/{body}/" for body in (found.body, *found.also)] + [f"~/{body}/" for body in found.never]
    return " & ".join(parts)


def _json(schema: Any, blanks: int) -> str:
    """A JSON schema as an expression of Lark. blanks: most consecutive ones between the parts of a text."""
    ready = normalised(schema)
    options: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"' + ("u" if ready.controls else "")}
    if blanks:
        options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{blanks}}}"
    else:
        options["whitespace_flexible"] = False
    return "%json " + json.dumps({**ready.schema, "x-guidance": options}, ensure_ascii=False)


def _structural_tag(text: str, compact: bool, vocabulary: Vocabulary) -> str:
    """A structural tag; its embedded grammars are named parts of the result."""
    tag = json.loads(text)
    if not isinstance(tag, Mapping):
        raise RefusedError("it must be a JSON object")
    others: dict[str, str] = {}

    def embedded(kind: str, value: Any, blanks: int | None) -> str:
        if kind == "json":
            return _json(value, 0 if compact else BLANKS if blanks is None else blanks)
        name = others.setdefault(_lark(value), f"grammar_{len(others)}")
        return f"@{name}"

    main = TagWriter(vocabulary, embedded).grammar(tag)
    named = [{"name": name, "lark_grammar": lark} for lark, name in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": main}, *named]})


def reason(error: BaseException) -> str:
    """An error's message on one line, without a full stop and without the grammar that llguidance quotes."""
    message = str(error)
    if "Unsatisfiable schema" in message:
        return "no value satisfies it: " + _line(message.rpartition("Unsatisfiable schema:")[2])
    for sign, keyword, why in _ENGINE:
        if sign in message:
            return f"keyword {keyword!r}: {why}; {KEYWORDS[keyword].instead or 'simplify it'}"
    return _line(message) or type(error).__name__


def _line(text: str) -> str:
    text = re.split(r"\n\s*\d+ \| |\n<state>|\n\nBacktrace", text)[0]
    return " ".join(text.split())[:400].rstrip(". ")
