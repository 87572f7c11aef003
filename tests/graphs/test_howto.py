"""docs/design/graphs.md works as written: commands run, the drafter breaks the round in two, its test can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.forks import PROGRAMS
from tests.howto import blocks, install, run, text_of
from unisono.graphs import Reason

PAGE, MODULE = "design/graphs", "bigram_drafter"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's files and the entry point that it asks for."""
    install(PAGE, MODULE, tmp_path, f"unisono.drafters:bigram={MODULE}:BigramDrafter")
    return tmp_path


def test_the_example_passes(package: Path) -> None:
    printed = run(PAGE, package)
    assert "2 passed" in printed, printed


@pytest.mark.full
def test_without_the_break_the_example_is_refused(package: Path) -> None:
    drafter = package / f"{MODULE}.py"
    drafter.write_text(drafter.read_text().replace("@eager_break\n", ""))
    printed = run(PAGE, package)
    assert " failed" in printed
    assert torch.cuda.is_available() or "cannot be captured: it reads a tensor's values on the host" in printed


LINES = blocks(PAGE, "sh")[0].splitlines()


@pytest.mark.parametrize("line", [LINES[0], *(pytest.param(line, marks=pytest.mark.full) for line in LINES[1:])])
def test_commands(line: str) -> None:
    program, *words = line.split()
    assert program == ".venv/bin/unisono"
    done = PROGRAMS.finished("-m", "unisono", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_reason_that_can_come_is_explained() -> None:
    told = set(re.findall(r"^\| ([A-Z_]+) \|", text_of(PAGE), re.MULTILINE))
    assert told == {reason.name for reason in Reason}
