"""docs/graphs.md works as written: its commands run, its drafter breaks the round in two, and its test can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono.program import Reason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "graphs.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's files and the entry point that it asks for."""
    drafter, test = blocks("python")
    (tmp_path / "bigram_drafter.py").write_text(drafter)
    (tmp_path / "test_bigram_drafter.py").write_text(test)
    info = tmp_path / "bigram_drafter-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram-drafter\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[unisono.drafters]\nbigram = bigram_drafter:BigramDrafter\n")
    return tmp_path


def run(package: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    command = blocks("sh")[-1].replace("python ", f"{sys.executable} ", 1).split()
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=300)


def test_the_example_passes(package: Path) -> None:
    done = run(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_without_the_break_the_example_is_refused(package: Path) -> None:
    drafter = package / "bigram_drafter.py"
    drafter.write_text(drafter.read_text().replace("@eager_break\n", ""))
    done = run(package)
    assert done.returncode == 1
    assert torch.cuda.is_available() or "cannot be captured: it reads a tensor's values on the host" in done.stdout


@pytest.mark.parametrize("line", blocks("sh")[0].splitlines())
def test_commands(line: str) -> None:
    command = line.replace(".venv/bin/unisono", f"{sys.executable} -m unisono")
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_reason_that_can_come_is_explained() -> None:
    told = set(re.findall(r"^\| ([A-Z_]+) \|", PAGE, re.MULTILINE))
    assert told == {reason.name for reason in Reason}
