"""The environment variables: accessors, the page of docs, and no reads elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from unisono.config import env

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "environment.md"
TABLE = re.compile(r"(?<=<!-- environment -->\n).*?(?=<!-- end -->)", re.DOTALL)


def test_the_page_is_the_code() -> None:
    (table,) = TABLE.findall(PAGE.read_text())
    assert table == env.markdown(), "write it again: python scripts/reference.py environment"


def test_the_page_has_variables_of_other_engines() -> None:
    assert f"<!-- others -->\n{env.markdown_of_others()}<!-- end -->" in PAGE.read_text()


def test_unread_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("UNISONO_", "VLLM_", "SGLANG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(env.CACHE.name, "/cache")
    assert env.unread() == []
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("UNISONO_" + "APIKEY", "secret")
    assert env.unread() == [
        "VLLM_API_KEY is set and not read. Here: UNISONO_API_KEY, or --api-key.",
        "UNISONO_" + "APIKEY, VLLM_USE_V1 are set and not read (docs/reference/environment.md).",
    ]


def test_only_env_module_reads_environment_variables() -> None:
    """Others may name variables in messages, but read none: neither by a literal nor by a constant of env.py."""
    reads = re.compile(r"(?:os\.environ|getenv)[^\n]*UNISONO_|(?:os\.environ|getenv)[^\n]*\b(?:env\.)[A-Z_]+")
    files = [path for path in (ROOT / "unisono").rglob("*.py") if path.name != "env.py"]
    assert [str(path) for path in files if reads.search(path.read_text())] == []


def test_every_name_in_the_package_is_documented() -> None:
    names = {variable.name for variable in env.VARIABLES}
    assert len(names) == len(env.VARIABLES)
    found = set()
    for path in (ROOT / "unisono").rglob("*.py"):
        found |= set(re.findall(r"\bUNISONO_[A-Z_]+\b", path.read_text()))
    assert found == names


def test_accessors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (env.api_key(), env.transfer_key(), env.compile_processes()) == (None, b"", None)
    assert (env.gathers_by_nccl(), env.persistent_launches()) == (False, True)
    assert env.cache_directory() == tmp_path / "unisono"
    assert env.kernel_archives(tmp_path) == tmp_path
    for variable, value in ((env.API_KEY, ""), (env.TRANSFER_KEY, "é"), (env.COMPILE_PROCESSES, "0")):
        monkeypatch.setenv(variable.name, value)
    for variable, value in ((env.GATHER, "nccl"), (env.STAYING_LAUNCHES, "0"), (env.CACHE, str(tmp_path / "own"))):
        monkeypatch.setenv(variable.name, value)
    assert (env.api_key(), env.transfer_key(), env.compile_processes()) == ("", "é".encode(), 0)
    assert (env.gathers_by_nccl(), env.persistent_launches()) == (True, False)
    assert env.cache_directory() == tmp_path / "own"
    monkeypatch.setenv(env.KERNELS.name, "/archives")
    assert env.kernel_archives(tmp_path) == Path("/archives")
    monkeypatch.setenv(env.KERNELS.name, "0")
    assert env.kernel_archives(tmp_path) is None
    monkeypatch.setenv(env.COMPILE_PROCESSES.name, "many")
    monkeypatch.setenv(env.STAYING_LAUNCHES.name, "1")
    assert (env.compile_processes(), env.persistent_launches()) == (None, True)
