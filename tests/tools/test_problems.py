"""The stored held-out problems, and how a final answer is read from a text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.tools.eval.problems import COUNT, FILE, final_answer, held_out_problems
from unisono.types import ConfigError


def test_problems_are_all_there_and_differ() -> None:
    problems = held_out_problems(COUNT)
    assert len(problems) == COUNT == len({p.question for p in problems})
    assert held_out_problems(40) == problems[:40]
    assert all(p.final_answer == final_answer(f"#### {p.final_answer}") for p in problems)
    assert json.loads(FILE.read_text().splitlines()[-1])["question"] == problems[-1].question


def test_more_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f"{COUNT + 1} held-out problems.*only {COUNT}"):
        held_out_problems(COUNT + 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1 + 2 = 3\n#### 3", "3"), ("#### 4\nmore\n#### 1,234.", "1234"), ("no mark 5", None), ("####", None)],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_installed_tools_need_no_checkout(tmp_path: Path) -> None:
    """The package alone, without ``training``, has what ``unisono eval`` and ``bench`` import."""
    (tmp_path / "unisono").symlink_to(FILE.parents[2])
    code = (
        "import sys; import unisono.tools.bench.latency, unisono.tools.eval.command; "
        "import unisono.tools.draft_training.command; "
        "from unisono.tools.eval.problems import held_out_problems; "
        "print(len(held_out_problems(3)), [m for m in sys.modules if m.split('.')[0] == 'training'])"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "3 []", done.stderr
