"""docs/extend/feature.md works as written: its package is found by its entry point, its one command passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.howto import blocks, install, run, text_of

PAGE, MODULE = "extend/feature", "top_logit_feature"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    install(PAGE, MODULE, tmp_path)
    return tmp_path


def test_howto_command_passes(package: Path) -> None:
    (command,) = blocks(PAGE, "sh")
    assert text_of(PAGE).rstrip().endswith(command + "```")
    said = run(PAGE, package)
    assert "4 passed" in said, said


@pytest.mark.full
def test_howto_command_fails_for_a_broken_feature(package: Path) -> None:
    """One that reports another row's number: a tree's best path is not always the first."""
    feature = package / f"{MODULE}.py"
    text = feature.read_text()
    feature.write_text(text.replace("view_as(out))", "view_as(out).roll(1, 0))"))
    assert text != feature.read_text()
    said = run(PAGE, package, "-k", "tree")
    assert "1 failed, 3 deselected" in said, said
