"""The generated part of docs/guide/structure.md: enforced keywords of structured outputs.

A test compares it with the page.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.structured_output.json_schema.formats import FORMATS, REFUSED
from unisono.structured_output.json_schema.keywords import markdown
from unisono.structured_output.syntax.structural_tag import KINDS
from unisono.structured_output.syntax.xml_parameters import STYLES


def tables() -> str:
    """Keywords, formats and parts of structural tags, as Markdown."""
    rows = [
        ("Formats that are enforced", _names(FORMATS)),
        ("Formats that are refused; other names of `format` are annotations", _names(REFUSED)),
        ("Parts of structural tags", _names(sorted(KINDS))),
        ("Styles of `json_schema` in structural tags", f"`json`, `python`, {_names(STYLES)}"),
    ]
    lists = "\n".join(["| List | Names |", "| --- | --- |", *(f"| {name} | {names} |" for name, names in rows)])
    return f"{markdown()}\n\n{lists}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
