"""docs/adding-a-feature.md works as written: its package is found by its entry point, its one command passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-feature.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's files, installed beside each other as pip would: modules and their metadata."""
    feature, test = blocks("python")
    project = tomllib.loads(blocks("toml")[0])["project"]
    (tmp_path / "top_logit_feature.py").write_text(feature)
    (tmp_path / "test_top_logit_feature.py").write_text(test)
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(command: str, package: Path) -> str:
    """What the page's one command says there, with this interpreter and this checkout."""
    paths = [str(package), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    words = command.replace("python ", f"{sys.executable} ", 1).split()
    done = subprocess.run(words, cwd=package, env=environment, capture_output=True, text=True, timeout=400)
    return done.stdout + done.stderr


def test_the_one_command_passes(package: Path) -> None:
    (command,) = blocks("sh")
    assert PAGE.rstrip().endswith(command + "```")
    said = run(command, package)
    assert "4 passed" in said, said


def test_the_one_command_fails_a_broken_feature(package: Path) -> None:
    """One that reports another row's number: a tree's best path is not always the first."""
    feature = package / "top_logit_feature.py"
    text = feature.read_text()
    feature.write_text(text.replace("view_as(out))", "view_as(out).roll(1, 0))"))
    assert text != feature.read_text()
    said = run(blocks("sh")[0].rstrip() + " -k tree", package)
    assert "1 failed, 3 deselected" in said, said
