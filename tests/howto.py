"""Follows a page of docs that adds something in a package of its own: writes its files, installs them, runs its
command."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from tests.forks import PROGRAMS

ROOT = Path(__file__).parents[1]


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def blocks(page: str, kind: str) -> list[str]:
    """The page's code blocks of a language."""
    found = re.findall(r"```(\w+)\n(.*?)```", text_of(page), re.DOTALL)
    return [text for name, text in found if name == kind]


def install(page: str, module: str, directory: Path, entry_point: str = "") -> None:
    """Write the page's module and its test, and the metadata that installing them would write.

    entry_point: ``group:name=where``, for a page that has no pyproject.toml.
    """
    code, test = blocks(page, "python")
    (directory / f"{module}.py").write_text(code)
    (directory / f"test_{module}.py").write_text(test)
    name, version, groups = module.replace("_", "-"), "0.1", {}
    if entry_point:
        group, _, point = entry_point.partition(":")
        groups[group] = dict([point.split("=")])
    else:
        project = tomllib.loads(blocks(page, "toml")[0])["project"]
        name, version, groups = project["name"], project["version"], project["entry-points"]
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    ((group, points),) = groups.items()
    lines = [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run(page: str, directory: Path, *more: str) -> str:
    """What the page's last command prints there, with this interpreter and this checkout."""
    command = blocks(page, "sh")[-1]
    paths = [str(directory), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program, *words = command.split()
    assert program == "python"
    done = PROGRAMS.finished(*words, *more, at=directory, environment=environment)
    return done.stdout + done.stderr
