"""docs/extend/drafter.md works as written: its package is found by its entry point, its one command passes."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from tests.howto import blocks, install, run, text_of
from unisono.config import catalog
from unisono.drafters.lookup.ngram import NgramDrafter
from unisono.engine.startup.drafter import make_drafter
from unisono.types import ConfigError, SpeculativeConfig

PAGE, MODULE = "extend/drafter", "repeat_drafter"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    install(PAGE, MODULE, tmp_path)
    return tmp_path


def test_howto_command_passes(package: Path) -> None:
    (command,) = blocks(PAGE, "sh")
    assert text_of(PAGE).rstrip().endswith(command + "```")
    printed = run(PAGE, package)
    assert "2 passed" in printed, printed


@pytest.mark.full
def test_howto_command_fails_for_a_broken_drafter(package: Path) -> None:
    drafter = package / f"{MODULE}.py"
    drafter.write_text(drafter.read_text().replace("drafts.copy_(", "drafts.copy_(1 + "))
    printed = run(PAGE, package, "-k", "accepted")
    assert "1 failed, 1 deselected" in printed, printed


def test_the_package_installs(package: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As ``pip install .`` makes it, without the network: into a directory of its own."""
    pytest.importorskip("setuptools")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for file in ("repeat_drafter.py", "test_repeat_drafter.py"):
        (source / file).write_text((package / file).read_text())
    (source / "pyproject.toml").write_text(blocks(PAGE, "toml")[0])
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (site / "repeat_drafter.py").is_file()
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("unisono.drafters", "repeat", "repeat_drafter:RepeatDrafter"),
    ]  # fmt: skip


def declare(monkeypatch: pytest.MonkeyPatch, site: Path, drafters: Mapping[str, str]) -> None:
    """Put a package that declares these drafters, name -> module:class, in a folder of ``sys.path``."""
    info = site / "declared-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    names = "".join(f"{name} = {value}\n" for name, value in drafters.items())
    (info / "entry_points.txt").write_text(f"[unisono.drafters]\n{names}")
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that declares two drafters, one under a name of the catalog."""
    declare(monkeypatch, tmp_path, dict.fromkeys(("repeat", "ngram"), "collections:OrderedDict"))


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


class Incomplete:
    """A drafter without most of its methods."""

    name = "incomplete"

    def __init__(self, spec: SpeculativeConfig, target: object) -> None:
        self.num_drafts = spec.num_speculative_tokens

    def propose(self, slots: object, drafts: object) -> None:
        """Draft nothing."""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (f"{__name__}:Incomplete", "has no features, self_test, bind, state_specs, observe, observe_prompt; docs"),
        ("no_such_module:Drafter", "incomplete = 'no_such_module:Drafter' of unisono.drafters cannot be imported:"),
        (f"{__name__}:Nothing", "has no attribute 'Nothing'. Correct it in the pyproject.toml"),
    ],
)
def test_broken_drafters_of_other_packages_raise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, says: str
) -> None:
    declare(monkeypatch, tmp_path, {"incomplete": value})
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_drafter(SpeculativeConfig("incomplete"), cast(Any, None))
