"""Bytecode of packages that have none: where a program keeps it, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KEEP = "from unisono.config.bytecode import keep_bytecode; print(keep_bytecode()); import torch"
"""Imports a package named torch that :func:`package` made."""
CHILD = KEEP + "; import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in place of torch, without bytecode."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    return tmp_path / "site"


def run(code: str, site: Path, **variables: str) -> str:
    """Output of a program in a new interpreter, with a cache directory of its own."""
    inherited: Mapping[str, str] = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "UNISONO_BYTECODE")
    }
    paths = {"PYTHONPATH": f"{site}:{ROOT}", "UNISONO_CACHE": str(site.parent / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**inherited, **paths, **variables}, cwd=site, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(directory: Path) -> list[Path]:
    """Bytecode of the package in a directory."""
    return [path for path in directory.rglob("__init__.*.pyc") if path.parent.name in ("torch", "__pycache__")]


def kept(site: Path) -> list[Path]:
    """Bytecode of the package in the cache directory."""
    cache = site.parent / "cache" / "bytecode"
    return [path for path in cache.rglob("*.pyc") if path.parent.name == "torch"]


@pytest.mark.parametrize("code", [KEEP, CHILD])
def test_bytecode_that_python_would_not_keep_is_kept(code: str, package: Path) -> None:
    cache = package.parent / "cache" / "bytecode"
    assert run(code, package, PYTHONDONTWRITEBYTECODE="1") == str(cache)
    assert len(kept(package)) == 1
    assert cache.stat().st_mode & 0o777 == 0o700
    assert not files(package), "nothing is written beside the sources"
    before = kept(package)[0].stat().st_mtime_ns
    assert run(code, package, PYTHONDONTWRITEBYTECODE="1") == str(cache)
    assert kept(package)[0].stat().st_mtime_ns == before, "the second start reads it"


def test_children_keep_bytecode_too(package: Path) -> None:
    code = "from unisono.config.bytecode import keep_bytecode; keep_bytecode(); import subprocess, sys"
    code += "; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    run(code, package, PYTHONDONTWRITEBYTECODE="1")
    assert len(kept(package)) == 1


@pytest.mark.parametrize(
    "variables",
    [{}, {"PYTHONPYCACHEPREFIX": "elsewhere"}, {"PYTHONDONTWRITEBYTECODE": "1", "UNISONO_BYTECODE": "0"}],
    ids=["python keeps it", "the user has a directory", "off"],
)
def test_nothing_changes_without_need(variables: dict[str, str], package: Path) -> None:
    assert run(KEEP, package, **variables) == "None"
    assert not kept(package)


def test_installed_bytecode_is_used(package: Path) -> None:
    run("import torch", package)
    assert files(package)
    assert run(KEEP, package, PYTHONDONTWRITEBYTECODE="1") == "None"


def test_the_program_keeps_bytecode(package: Path) -> None:
    cache = package.parent / "cache" / "bytecode"
    code = "import runpy, sys; sys.argv = ['unisono', '--version']; runpy.run_module('unisono', run_name='__main__')"
    assert run(code, package, PYTHONDONTWRITEBYTECODE="1").startswith("unisono ")
    assert list(cache.rglob("unisono/cli/main.*.pyc"))


def test_an_engine_process_keeps_bytecode(package: Path) -> None:
    """multiprocessing starts it with -B, because its parent was started with PYTHONDONTWRITEBYTECODE."""
    code = "import sys; from unisono.cluster.engine_process import load_factory; sys.dont_write_bytecode = True"
    code += "\nload_factory('torch:__name__')"
    run(code, package, PYTHONPYCACHEPREFIX=str(package.parent / "cache" / "bytecode"))
    assert len(kept(package)) == 1


def test_directories_that_others_may_write_are_not_trusted(package: Path) -> None:
    cache = package.parent / "shared"
    cache.mkdir()
    cache.chmod(0o777)
    assert run(KEEP, package, PYTHONDONTWRITEBYTECODE="1", UNISONO_BYTECODE=str(cache)) == "None"
    blocked = package.parent / "file"
    blocked.write_text("")
    assert run(KEEP, package, PYTHONDONTWRITEBYTECODE="1", UNISONO_BYTECODE=str(blocked / "below")) == "None"
