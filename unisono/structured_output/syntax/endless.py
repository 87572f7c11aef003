"""Finds grammars in Lark's notation that no text matches, because every path through their rules is infinite.

Reads only the shape of rules: names, alternatives, groups and repetitions. Everything else, terminals and llguidance's
extensions, counts as matchable. A grammar that cannot be parsed like this is left to llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<space>\s+)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<token><[^>\n]*>)|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{[\d,\s]*\})
    |(?P<directive>%(?:ignore|import|declare|llguidance)[^\n]*)|(?P<other>@[\w-]+|->\s*\w+)
    |(?P<head>[?!]{0,2}[A-Za-z_][\w-]*(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:(?!:))|(?P<name>[A-Za-z_][\w-]*)
    |(?P<sign>[|()\[\]?*+&~]|\.\.)""",
    re.VERBOSE,
)


class EndlessError(ValueError):
    """A grammar that no text matches."""


def check_ends(text: str) -> None:
    """Raise EndlessError if no text can match the rule ``start``."""
    if "%json" in text or "%regex" in text or "::" in text:
        return  # llguidance's extensions: values and conditions in rules
    tokens = list(_tokens(text))
    if not tokens:
        return
    bodies: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for kind, found in tokens:
        if kind == "head":
            name = re.sub(r"^[?!]+|[.\[:\s].*$", "", found, flags=re.DOTALL)
            bodies[name] = []
        elif name and kind != "directive":
            bodies[name].append((kind, found))
    if "start" not in bodies:
        return
    ending: set[str] = set()
    while more := {rule for rule, body in bodies.items() if rule not in ending and _ends(body, ending, bodies)}:
        ending |= more
    if "start" not in ending:
        raise EndlessError("no text matches it: every way through its rules goes on for ever")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            at += 1
            continue
        at = match.end()
        if match.lastgroup not in ("comment", "space"):
            yield match.lastgroup or "", match[0]


def _ends(body: Sequence[tuple[str, str]], ending: set[str], rules: object) -> bool:
    """True if some text matches a body, by the rules that are known to end."""
    stack: list[tuple[bool, bool]] = []  # per open group: (an alternative before ends, this one does so far)
    some, this, last = False, True, True  # last: the item that a repetition belongs to
    for kind, found in body:
        if found in ("(", "["):
            stack.append((some, this and last))
            some, this, last = False, True, True
        elif found in (")", "]") and stack:
            inner = some or (this and last) or found == "]"
            some, this = stack.pop()
            last = inner
        elif found == "|":
            some, this, last = some or (this and last), True, True
        elif found in ("?", "*") or (kind == "count" and re.search(r"[{~]\s*0?\s*(?:,|\.\.|\})", found)):
            last = True
        elif kind == "name":
            this, last = this and last, found in ending or found not in rules  # type: ignore[operator]
        elif kind in ("string", "regex", "token", "other") and not found.startswith("->"):
            this, last = this and last, True
    return some or (this and last)
