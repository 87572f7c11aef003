"""Every script of examples/ runs, and prints what it promises."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.forks import PROGRAMS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PRINTS = {
    "offline_batch.py": r"eagle3: [2-4]\.\d\d tokens a round[\s\S]*same text: True",
    "streaming.py": r"(?=[\s\S]*^code: )[\s\S]*^maths: ",
    "tools.py": r"^add\(\{'a': -?\d+, 'b': -?\d+\}\) = -?\d+$",
    "structured.py": r'^schema: \{"item": ?"(apples|pears)"[\s\S]*^expression: \d+ (apples|pears)$[\s\S]*^count: \d+$',
    "lora.py": r"^adapter: '[\s\S]*^base: '",
    "several_gpus.py": r"same text: True",
    "replicate.py": r"^json: passed: 1[\s\S]*^prefix: passed: [\s\S]*^tools: passed: 1[\s\S]*^parsers: passed: 1",
    "grpo.py": r"step 1: loss \S+[\s\S]*^two runs: the same losses and weights, bit for bit$",
    "grpo_trl.py": r"^step 9: weights step-9, [\s\S]*^two runs: the same losses and weights, bit for bit$",
    "drafter/main.py": r"^(1\.[1-9]|[2-4]\.)\d* tokens a round; same text: True",
    "model/main.py": r"same tokens alone: True",
}
"""By script: an expression that its output has."""
ARGUMENTS = {"replicate.py": ["--count", "1"]}
AT_START = "offline_batch.py"
"""Script whose engines capture graphs and test their drafters at start; those of the others capture on demand."""
LONG = ("grpo_trl.py",)
"""Scripts that only the full suite runs."""


def test_every_example_is_listed() -> None:
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(PRINTS)
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"`python examples/(\S+)`", page)) == scripts


@pytest.mark.parametrize("script", [pytest.param(s, marks=pytest.mark.full) if s in LONG else s for s in PRINTS])
def test_example(script: str, tmp_path: Path) -> None:
    if script == "grpo_trl.py":
        pytest.importorskip("trl", reason="needs the package trl")
    package = (EXAMPLES / script).parent
    paths = [str(ROOT), str(tmp_path)]
    if package != EXAMPLES:
        install(package, tmp_path)
        paths.append(str(package))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [str(EXAMPLES / script), *ARGUMENTS.get(script, ())]
    done = PROGRAMS.finished(*command, at=tmp_path, environment=environment, lazy=script != AT_START)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS[script], done.stdout, re.MULTILINE), done.stdout
    if script == "lora.py":
        adapter, base = (line.partition(": ")[2] for line in done.stdout.splitlines())
        assert adapter != base, "the adapter changes the text"


def install(package: Path, site: Path) -> None:
    """Write the metadata that ``pip install`` would write, so that the entry point is found."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{n} = {w}" for n, w in points.items())]) + "\n")
