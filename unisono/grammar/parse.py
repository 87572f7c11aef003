"""What a structured output asks for, as xgrammar's Grammar. Runs in the process that compiles."""

from __future__ import annotations

import re
from typing import Any

from unisono.grammar.lark_grammar import is_lark, lark_to_ebnf

BLANKS = 20
"""Blanks in a row between the parts of a JSON text: a small model may write nothing else till its tokens are spent."""


def parse(xgrammar: Any, kind: str, given: Any, compact: bool) -> Any:
    """The Grammar of what field ``kind`` of StructuredOutputs asks for. compact: JSON without blanks.

    Raises what xgrammar raises.
    """
    grammar = xgrammar.Grammar
    blanks: dict[str, Any] = {"any_whitespace": not compact}
    if not compact:
        blanks["max_whitespace_cnt"] = BLANKS
    if kind == "json":
        return grammar.from_json_schema(given, **blanks)
    if kind == "json_object":
        return grammar.from_json_schema('{"type": "object"}', strict_mode=False, **blanks)
    if kind == "regex":
        return grammar.from_regex(given)
    if kind == "choice":
        return grammar.from_ebnf("root ::= " + " | ".join(_literal(text) for text in given))
    if kind == "structural_tag":
        return grammar.from_structural_tag(given)
    if is_lark(given):
        given = lark_to_ebnf(given, lambda regex: str(grammar.from_regex(regex)))
    return grammar.from_ebnf(given)


def _literal(text: str) -> str:
    """``text`` as a string of EBNF."""
    return '"' + "".join(c if c.isalnum() or c in " _-" else f"\\U{ord(c):08x}" for c in text) + '"'


def reason(error: Exception) -> str:
    """xgrammar's message without the time and the line of its source that it begins with, and without a full stop."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is \w+: ", "", text).split("The JSON string is:")[0]
    return " ".join(text.split())[:300].rstrip(".") or type(error).__name__
