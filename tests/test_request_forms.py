"""The picture of a request's forms names classes that exist, each in its module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design" / "request-forms.md"
NAME = re.compile(r"([a-z_/]+\.py): (\w+)")


def defined(path: Path) -> set[str]:
    """Names of the classes and functions of a module, and of what it imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


def test_a_request_has_few_forms() -> None:
    """Those of the picture, in which an extend and a round are one pass."""
    picture = PAGE.read_text().split("```mermaid")[1].split("```")[0]
    forms = {name for _, name in NAME.findall(picture)} - {"Extend"}
    assert len(forms) <= 12, sorted(forms)


def test_the_forms_exist() -> None:
    named = NAME.findall(PAGE.read_text())
    assert len(named) > 25
    missing = [f"{file}: {name}" for file, name in named if name not in defined(ROOT / "unisono" / file)]
    assert missing == []
