"""``python -m benchmarks.restart``: what its starts read, and what its tables say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import restart
from benchmarks.restart import Starts, report

IMPORTS = """import time: self [us] | cumulative | imported package
import time:       300 |        300 |       torch._C
import time:      1000 |       1300 |     torch
import time:      2000 |       3300 |   unisono.kernels.gemm.linear
import time:       500 |        500 |   unisono.kernels.gemm.fp8
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Starts(tmp_path, "tiny", "", "lazy")


def test_restarts_read_caches_of_their_own(starts: Starts, tmp_path: Path) -> None:
    found = starts.environment("kernels")
    assert {name for name, value in found.items() if str(tmp_path) in value} == {
        "TRITON_CACHE_DIR", "UNISONO_START_NOTES", "PYTHONPYCACHEPREFIX",
    }  # fmt: skip
    assert "PYTHONDONTWRITEBYTECODE" not in found, "the first start would not keep bytecode"
    installed = starts.environment("kernels", PYTHONPYCACHEPREFIX=None, PYTHONDONTWRITEBYTECODE="1")
    assert "PYTHONPYCACHEPREFIX" not in installed
    assert installed["PYTHONDONTWRITEBYTECODE"] == "1"


def test_rows_add_up(starts: Starts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"import": 2.5, "load": 0.1, "compile": 1.3, "first_token_since_exec": 5.0}
    monkeypatch.setattr(restart, "report", lambda command, environment: {"seconds": seconds})
    starts.row("again", "kernels")
    assert capsys.readouterr().out == "| again | 5.00 | 2.50 | 0.10 | 1.30 | 0.00 | 0.00 | 1.10 |\n"


def test_imports_by_module_and_package(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "", IMPORTS)
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)
    lines = starts.imports().splitlines()
    assert "| unisono.kernels.gemm.linear | 2 | 3 |" in lines
    assert lines[-4:] == ["| package of 4 ms | ms |", "|---|---|", "| unisono.kernels.gemm | 2 |", "| torch | 1 |"]


def test_a_start_that_fails_is_shown() -> None:
    said: dict[str, Any] = {"seconds": {"import": 1.0}}
    code = f"print('a line'); print({json.dumps(said)!r})"
    assert report([sys.executable, "-c", code], {}) == said
    with pytest.raises(SystemExit, match="no memory"):
        report([sys.executable, "-c", "raise MemoryError('no memory')"], {})
