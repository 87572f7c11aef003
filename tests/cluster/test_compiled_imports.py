"""The warning of an engine process whose imports compile modules that no later start finds."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from unisono.cluster import compiled_imports, engine_process
from unisono.cluster.compiled_imports import CompiledImports, counted


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module without bytecode that any import compiles."""
    name = f"compiled_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("class Made:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compiled_imports, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    importlib.invalidate_caches()
    return name


@pytest.mark.parametrize("never", [True, False])
def test_lost_bytecode_is_a_warning(
    never: bool, module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", never)
    engine_process.load_factory(f"{module}:Made")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == never
    if never:
        assert "compiled 1 modules in 0.0 s" in lines[0]
        assert "PYTHONDONTWRITEBYTECODE" in lines[0]


def test_unwritable_directories_are_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    warning = CompiledImports([str(tmp_path / "absent.py")], seconds=2.345).warning()
    assert warning is not None
    assert "compiled 1 modules in 2.3 s" in warning
    assert "not writable" in warning


def test_little_compilation_is_none(tmp_path: Path) -> None:
    assert CompiledImports([str(tmp_path / "absent.py")], seconds=0.1).warning() is None
    assert CompiledImports().warning() is None


def test_counting_ends_with_the_block(module: str) -> None:
    inherited = SourceFileLoader.source_to_code
    with counted() as found:
        importlib.import_module(module)
    assert [Path(path).stem for path in found.paths] == [module]
    assert SourceFileLoader.source_to_code is inherited
