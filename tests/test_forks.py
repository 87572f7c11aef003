"""Tests of tests/forks.py: a fork behaves as a new interpreter does."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.forks import GPU, Forks


@pytest.fixture(scope="module")
def forks() -> Forks:
    return Forks("json")


def test_output_arguments_and_environment(forks: Forks, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['A'], sys.stdin.read(), __name__); sys.exit(7)"
    done = forks.finished("-c", code, "x", at=tmp_path, environment={"A": "b"}, text="in")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"['-c', 'x'] {tmp_path} b in __main__\n"


def test_scripts_and_modules_find_what_lies_beside_them(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("said = 'found'")
    (tmp_path / "script.py").write_text("import atexit, beside; atexit.register(print, 'end'); print(beside.said)")
    assert forks.finished(str(tmp_path / "script.py")).stdout == "found\nend\n"
    assert forks.finished("-m", "script", at=tmp_path).stdout == "found\nend\n"


def test_exits(forks: Forks) -> None:
    """As ``subprocess.run`` has them for a new interpreter."""
    for code, status in (("1/0", 1), ("import sys; sys.exit('why')", 1), ("import os; os.abort()", -signal.SIGABRT)):
        assert forks.finished("-c", code).returncode == status
    assert "ZeroDivisionError" in forks.finished("-c", "1/0").stderr
    assert forks.finished("-c", "import sys; sys.exit('why')").stderr == "why\n"
    interrupted = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    assert forks.finished("-c", interrupted).returncode == -signal.SIGINT
    with pytest.raises(subprocess.TimeoutExpired):
        forks.finished("-c", "import time; time.sleep(60)", timeout=0.1)


@pytest.mark.skipif(GPU, reason="programs are new interpreters")
def test_forks_are_no_children_of_this_process(forks: Forks) -> None:
    """Some tests count and kill the children of theirs."""
    said = forks.finished("-c", "import os; print(os.getppid())").stdout
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert children.exists()
    assert said.strip() not in children.read_text().split()


@pytest.mark.skipif(GPU, reason="programs are new interpreters")
@pytest.mark.parametrize(("lazy", "shown"), [(True, "lazy start"), (False, "start start")])
def test_engines_of_lazy_programs_capture_on_demand(forks: Forks, lazy: bool, shown: str) -> None:
    code = """
from unisono.config.engine import EngineConfig
print(*(EngineConfig("tiny", **flags).graph_capture for flags in ({}, {"graph_capture": "start"})))"""
    assert forks.finished("-c", code, lazy=lazy).stdout == f"{shown}\n"
