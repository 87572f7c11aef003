"""What is published: contents, size and metadata of wheel and sdist. scripts/check_wheel.py serves from a wheel."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

from unisono import __version__
from unisono.config import catalog

ROOT = Path(__file__).parent.parent
MOST_BYTES = 80_000_000
"""Of the wheel: package indexes take 100 MB."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    return script("check_wheel").build(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "unisono").rglob("*.py")}
    assert own <= names
    assert {name.split("/")[0] for name in names} == {"unisono", f"unisono-{__version__}.dist-info"}
    for name, home in catalog.bundled.items():
        assert {f"unisono/bundled/{name}/{file.name}" for file in home.iterdir()} <= names
    compiled = (ROOT / "unisono" / "bundled" / "kernels").glob("*.zip")
    assert {str(path.relative_to(ROOT)) for path in compiled} <= names
    assert {"unisono/py.typed", "unisono/tools/eval/problems.jsonl"} <= names
    page = (ROOT / "unisono" / "http" / "page").rglob("*.*")
    assert {str(path.relative_to(ROOT)) for path in page} <= names
    assert {"unisono/http/page/vendor/marked/marked.esm.js", "unisono/http/page/vendor/marked/LICENSE.txt"} <= names
    known = (
        ".py",
        ".json",
        ".jsonl",
        ".jinja",
        ".safetensors",
        ".typed",
        ".html",
        ".css",
        ".js",
        ".svg",
        ".png",
        ".txt",
        ".zip",  # compiled kernels, after make kernels
    )
    assert [name for name in names if name.startswith("unisono/") and not name.endswith(known)] == []
    data = [name for name in names if name.startswith("unisono/") and ("skeleton" in name or "/data/" in name)]
    assert data == []  # of the bundled models' training


def test_the_wheel_is_small_enough(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert wheel.name == f"unisono-{__version__}-py3-none-any.whl"


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"unisono-{__version__}.dist-info/METADATA").decode()
        entries = archive.read(f"unisono-{__version__}.dist-info/entry_points.txt").decode()
        licences = f"unisono-{__version__}.dist-info/licenses"
        vendored = "unisono/http/page/vendor/marked/LICENSE.txt"
        assert {f"{licences}/LICENSE", f"{licences}/{vendored}"} <= set(archive.namelist())
    told = Parser().parsestr(text)
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert set(told.get_all("Provides-Extra") or ()) >= {"ray", "dev"}
    required = told.get_all("Requires-Dist") or []
    assert any(line.startswith("ray>=") and 'extra == "ray"' in line for line in required)
    assert not any(line.startswith("ray") and "extra" not in line for line in required)
    assert "Typing :: Typed" in (told.get_all("Classifier") or ())
    assert told["Description-Content-Type"] == "text/markdown"
    assert "unisono = unisono.__main__:main" in entries
    assert "http" not in "".join(told.get_all("Project-URL") or ())


def test_sdist_contains_build_and_test_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    code = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    copied = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no checkout")
    light = [name for name in files.stdout.splitlines() if not name.endswith(".safetensors")]  # seconds of copying
    for name in light:
        if (ROOT / name).is_file():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            (copied / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=copied, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("unisono-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "LICENSE", "Makefile", "unisono/py.typed", "tests/conftest.py", "docs/index.md"):
        assert needed in names
    assert {"tests/test_package.py", "scripts/check_wheel.py", "training/tiny/train.py"} <= names
    assert [name for name in names if ".venv" in name or "__pycache__" in name or name.startswith("build/")] == []


def test_dependencies_are_named_with_their_least_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(">=" in line for line in project["dependencies"])
