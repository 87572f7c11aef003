"""docs/adding-a-drafter.md works as written: its package is found by its entry point, its one command passes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from unisono import catalog
from unisono.drafters.ngram import NgramDrafter
from unisono.types import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-drafter.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's files, installed beside each other as pip would: modules and their metadata."""
    drafter, test = blocks("python")
    project = tomllib.loads(blocks("toml")[0])["project"]
    (tmp_path / "repeat_drafter.py").write_text(drafter)
    (tmp_path / "test_repeat_drafter.py").write_text(test)
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {where}" for name, where in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(command: str, package: Path) -> subprocess.CompletedProcess[str]:
    """Run the page's one command there, with this interpreter and this checkout."""
    paths = [str(package), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = command.replace("python ", f"{sys.executable} ", 1)
    return subprocess.run(command.split(), cwd=package, env=environment, capture_output=True, text=True, timeout=300)


def test_the_one_command_passes(package: Path) -> None:
    (command,) = blocks("sh")
    assert PAGE.rstrip().endswith(command + "```")
    done = run(command, package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_one_command_fails_a_broken_drafter(package: Path) -> None:
    drafter = package / "repeat_drafter.py"
    drafter.write_text(drafter.read_text().replace("drafts.copy_(", "drafts.copy_(1 + "))
    done = run(blocks("sh")[0].rstrip() + " -k accepted", package)
    assert "1 failed, 1 deselected" in done.stdout, done.stdout + done.stderr


def test_the_package_installs(package: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As ``pip install .`` makes it, without the network: into a directory of its own."""
    pytest.importorskip("setuptools")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for file in ("repeat_drafter.py", "test_repeat_drafter.py"):
        (source / file).write_text((package / file).read_text())
    (source / "pyproject.toml").write_text(blocks("toml")[0])
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (site / "repeat_drafter.py").is_file()
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("unisono.drafters", "repeat", "repeat_drafter:RepeatDrafter"),
    ]  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares two drafters, one under a name of the catalog."""
    points = [
        EntryPoint("repeat", "collections:OrderedDict", "unisono.drafters"),
        EntryPoint("ngram", "collections:OrderedDict", "unisono.drafters"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "unisono.drafters" else [])


@pytest.mark.usefixtures("installed")
def test_entry_points_are_found_and_the_catalog_wins() -> None:
    from collections import OrderedDict

    assert catalog.drafters.load("repeat") is OrderedDict
    assert "repeat" in catalog.drafters
    assert catalog.drafters.load("ngram") is NgramDrafter
    assert catalog.drafters.names.count("ngram") == 1
    with pytest.raises(ConfigError, match=r"Supported: .*ngram, none, repeat"):
        catalog.drafters.load("crystal-ball")


@pytest.mark.usefixtures("installed")
def test_other_kinds_are_not_open() -> None:
    assert "repeat" not in catalog.models
    assert "repeat" not in catalog.attention
