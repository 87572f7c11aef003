"""A hook of mkdocs: links from pages to files outside docs/ become code, since the site does not hold these files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace each link that leaves the docs folder by its text and the file's path in the repository."""
    docs = Path(config["docs_dir"]).resolve()

    def replaced(link: re.Match[str]) -> str:
        target = (Path(page.file.abs_src_path).parent / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        return f"{link[1]} (`{target.relative_to(docs.parent)}`)"

    return LINK.sub(replaced, markdown)
