"""The generated part of docs/speculation.md: enforced keywords of structured outputs.

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
    return "\n\n".join(
        [
            markdown(),
            f"Formats that are enforced: {_names(FORMATS)}.",
            f"Formats that are refused: {_names(REFUSED)}. Other names of `format` are annotations.",
            f"Parts of structural tags: {_names(sorted(KINDS))}.",
            f"Styles of `json_schema` in them: `json`, `python`, {_names(STYLES)}.",
        ]
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
