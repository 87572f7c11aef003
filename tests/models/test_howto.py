"""docs/adding-a-model.md and docs/adding-a-weight-format.md work as written, each with one command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGES = {
    "adding-a-model": ("tides", 2, ("(out * gate.sigmoid())", "(out * gate)")),
    "adding-a-weight-format": ("row_int8", 2, ("* layer.weight_scale)", "* 1)")),
}
"""By page: its module, how many tests pass, and (in the module or in its test) what to break."""


def blocks(page: str, kind: str) -> list[str]:
    found = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    return [text for name, text in found if name == kind]


def install(page: str, directory: Path) -> None:
    """The page's two files and the metadata that installing them would write."""
    module = PAGES[page][0]
    code, test = blocks(page, "python")
    (directory / f"{module}.py").write_text(code)
    (directory / f"test_{module}.py").write_text(test)
    project = tomllib.loads(blocks(page, "toml")[0])["project"]
    info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run(page: str, directory: Path, *more: str) -> str:
    """What the page's one command prints there, with this interpreter and this checkout."""
    (command,) = blocks(page, "sh")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    words = [*command.replace("python ", f"{sys.executable} ", 1).split(), *more]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_the_one_command_passes(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert text.rstrip().endswith(blocks(page, "sh")[0] + "```")
    install(page, tmp_path)
    printed = run(page, tmp_path)
    assert f"{PAGES[page][1]} passed" in printed, printed


@pytest.mark.parametrize("page", PAGES)
def test_the_one_command_fails_what_is_broken(page: str, tmp_path: Path) -> None:
    install(page, tmp_path)
    right, wrong = PAGES[page][2]
    broken = [f for f in tmp_path.glob("*.py") if right in f.read_text()]
    assert len(broken) == 1
    broken[0].write_text(broken[0].read_text().replace(right, wrong))
    assert "1 failed" in run(page, tmp_path, "-x")


def test_the_family_is_a_small_file() -> None:
    assert len(blocks("adding-a-model", "python")[0].splitlines()) <= 150
