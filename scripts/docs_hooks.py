"""Hooks of ``mkdocs build``: links that leave docs/, and references in docstrings.

* Links from pages to files outside docs/ become text and a path, since the site does not hold these files.
* ``:class:`unisono.types.SamplingParams``` in a docstring becomes ``SamplingParams`` in code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([^`]+)`")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace each link that leaves the docs folder by its text and the file's path in the repository."""
    docs = Path(config["docs_dir"]).resolve()

    def replaced(link: re.Match[str]) -> str:
        target = (Path(page.file.abs_src_path).parent / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        return f"{link[1]} (`{target.relative_to(docs.parent)}`)"

    return LINK.sub(replaced, markdown)


class Roles(griffe.Extension):
    """Writes references of docstrings as code: the last part of their names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
