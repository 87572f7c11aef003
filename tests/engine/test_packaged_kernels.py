"""Kernels that travel with the package: starts that read them compile nothing, and serve no kernel of other code."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from unisono.cli.main import app
from unisono.engine.startup import kernel_archives
from unisono.engine.startup.compile_processes import forks_for
from unisono.engine.startup.kernel_archives import KernelArchive, archive_name, pack, portable_key
from unisono.engine.startup.packaged_kernels import (
    CHANGED,
    CONFIGURATION,
    PACKAGED,
    UNKNOWN,
    PackagedKernels,
    installed_kernels,
)

ROOT = Path(__file__).parents[2]
ARCHIVE = archive_name(triton.__version__, 90)

SCRIPT = """
import json, os, sys
from pathlib import Path
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, compiler
from triton.runtime.driver import driver
from unisono.engine.startup.compile_processes import CompileProcesses
from unisono.engine.startup.packaged_kernels import PackagedKernels
from unisono.engine.startup.warmup import compiling_only
from unisono.kernels.norm import activation

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Hopper())
root, found = Path(sys.argv[1]), {}
make_ir, kernel = compiler.ASTSource.make_ir, activation._silu_mul_kernel
plain = kernel.src

def start(mode):
    os.environ["TRITON_CACHE_DIR"] = str(root / mode)
    kernel.device_caches.clear()
    kernel._unsafe_update_src(plain.replace("gate / (1.0", "gate / (2.0") if mode == "changed" else plain)
    kernel.hash = None
    packaged, made = PackagedKernels.at(root / "archives", 80 if mode == "card" else 90), []

    def counted(source, *args, **options):
        made.append(source.name)
        return make_ir(source, *args, **options)

    packaged.install()
    with mock.patch.object(compiler.ASTSource, "make_ir", counted), mock.patch.object(torch.cuda, "set_device"), \\
            mock.patch.object(CompiledKernel, "_init_handles"), CompileProcesses(0) as processes:
        with compiling_only(torch.device("cpu"), processes):
            activation.launch_silu_mul(torch.zeros(4, 256, dtype=torch.bfloat16))
            activation.launch_gelu_mul(torch.zeros(4, 254 if mode == "sizes" else 256, dtype=torch.bfloat16))
            if mode == "kernels":
                activation.launch_sigmoid_gate(torch.zeros(4, 64), torch.zeros(4, 512), 1)
    found[mode] = [packaged.restored, packaged.cached, dict(packaged.missing), len(made), packaged.decision()[1]]

for mode in sys.argv[2:]:
    start(mode)
print(json.dumps(found))
"""


def starts(root: Path, *modes: str) -> dict[str, list]:
    """Run the script: (restored, cached, missing by reason, compiled, decision) of each start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(root), *modes]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a start without an archive filled, and the archive packed from it."""
    root = tmp_path_factory.mktemp("starts")
    reason = f"there is no {ARCHIVE}"
    assert starts(root, "first") == {
        "first": [0, 0, {reason: 2}, 2, "0 from the archive, 0 from Triton's cache, 2 compiled"]
    }
    run = kernels("pack", str(root / "first"), "--out", str(root / "archives"))
    assert run.returncode == 0, run.stderr
    assert "2 kernels, 0 C extensions" in run.stdout
    return root


def kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/kernels.py without Triton's interpreter, whose kernels have no digest."""
    command = [sys.executable, str(ROOT / "scripts" / "kernels.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_starts_with_an_archive_compile_nothing(root: Path) -> None:
    found = starts(root, "empty", "sizes", "changed", "kernels", "card")
    assert found["empty"] == [2, 0, {}, 0, "2 from the archive, 0 from Triton's cache, 0 compiled"]
    assert found["sizes"][:4] == [1, 0, {CONFIGURATION: 1}, 1]
    assert found["changed"][:4] == [0, 0, {CHANGED: 2}, 2]
    assert found["kernels"][:4] == [2, 0, {UNKNOWN: 1}, 1]
    assert found["card"][:4] == [0, 0, {f"there is no {archive_name(triton.__version__, 80)}": 2}, 2]
    assert starts(root, "empty")["empty"][:4] == [0, 2, {}, 0], "the second start finds them in Triton's cache"


def test_restored_kernels_have_the_bytes_of_compiled_ones(root: Path) -> None:
    starts(root, "restored")
    compiled = {path.parent.name: path for path in (root / "first").glob("*/*.cubin")}
    restored = {path.parent.name: path for path in (root / "restored").glob("*/*.cubin")}
    assert len(restored) == 2
    assert restored.keys() == compiled.keys()
    assert all(path.read_bytes() == compiled[key].read_bytes() for key, path in restored.items())


def rewritten(path: Path, into: Path, **fields: Any) -> None:
    """Copy an archive, with other values of its manifest's fields."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(into, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, json.dumps({**json.loads(data), **fields}) if name == "manifest.json" else data)


def test_check_fails_for_kernels_of_other_code(root: Path, tmp_path: Path) -> None:
    assert f"{ARCHIVE}: 1 kernels are those of this code" in kernels("check", "--out", str(root / "archives")).stdout
    archive = KernelArchive(root / "archives" / ARCHIVE)
    (kernel,) = archive.manifest.sources
    rewritten(archive.path, tmp_path / ARCHIVE, sources={kernel: "another digest"})
    run = kernels("check", "--out", str(tmp_path))
    assert run.returncode == 1
    assert f"kernels of other code: {kernel}. Run make kernels" in run.stderr
    rewritten(archive.path, tmp_path / ARCHIVE, triton="1.0", sources={kernel: "another digest"})
    run = kernels("check", "--out", str(tmp_path))
    assert run.returncode == 0
    assert "not checked" in run.stdout


def test_the_packages_archives_are_sound() -> None:
    """A damaged or misnamed archive fails. Every change of a kernel makes one stale, which starts cope with: told as an
    expected failure here, and an error of ``make wheel``."""
    for path in PACKAGED.glob("*"):
        manifest = KernelArchive(path).manifest
        assert path.name == archive_name(manifest.triton, manifest.arch)
        assert manifest.kernels
        assert path.stat().st_size <= kernel_archives.MOST_BYTES
    if (run := kernels("check")).returncode:
        pytest.xfail(run.stderr.strip())


def test_damaged_members_are_compiled(root: Path, tmp_path: Path) -> None:
    (tmp_path / "archives").mkdir()
    with zipfile.ZipFile(root / "archives" / ARCHIVE) as whole:
        place = next(each for each in whole.infolist() if each.filename.endswith(".cubin"))
        at = place.header_offset + 30 + len(place.filename) + place.compress_size // 2
    data = bytearray((root / "archives" / ARCHIVE).read_bytes())
    data[at : at + 64] = bytes(64)
    (tmp_path / "archives" / ARCHIVE).write_bytes(data)
    assert starts(tmp_path, "empty")["empty"][:4] == [1, 0, {"damaged in the archive": 1}, 1]


def test_truncated_archives_are_not_used(root: Path, tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes((root / "archives" / ARCHIVE).read_bytes()[:-100])
    packaged = PackagedKernels.at(tmp_path, 90)
    assert not packaged.serves
    assert packaged.why.startswith(f"{ARCHIVE} is unreadable")


def test_archives_of_other_formats_are_not_used(root: Path, tmp_path: Path) -> None:
    manifest = KernelArchive(root / "archives" / ARCHIVE).manifest
    with zipfile.ZipFile(tmp_path / ARCHIVE, "w") as file:
        file.writestr("manifest.json", json.dumps({**manifest.__dict__, "format": 2}))
    assert "format 2" in PackagedKernels.at(tmp_path, 90).why


def test_archives_can_be_disabled(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("UNISONO_KERNELS", str(root / "archives"))
    assert PackagedKernels.of(torch.device("cuda")).serves
    monkeypatch.setenv("UNISONO_KERNELS", "0")
    assert not PackagedKernels.of(torch.device("cuda")).serves


@pytest.fixture
def compiled_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of this process may be interpreted, which have no digest: use those of the archive."""
    sources = KernelArchive(root / "archives" / ARCHIVE).manifest.sources
    monkeypatch.setattr(kernel_archives, "current_source", sources.get)


@pytest.mark.usefixtures("compiled_here")
def test_equal_caches_make_equal_archives(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "first", tmp_path / "cache")
    (path,) = pack(tmp_path / "cache", tmp_path / "out", KernelArchive(root / "archives" / ARCHIVE).manifest.unisono)
    assert path.read_bytes() == (root / "archives" / ARCHIVE).read_bytes()


@pytest.mark.usefixtures("compiled_here")
def test_a_command_packs_what_starts_compiled(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root / "first"))
    result = CliRunner().invoke(app, ["pack-kernels", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"{len(KernelArchive(tmp_path / ARCHIVE).manifest.kernels)} kernels" in result.output
    monkeypatch.setattr(kernel_archives, "MOST_BYTES", 1000)
    for cache, why in ((root / "first", "the limit is 1,000"), (tmp_path, "start a model on the GPU first")):
        result = CliRunner().invoke(app, ["pack-kernels", str(tmp_path / "out"), "--cache", str(cache)])
        assert result.exit_code == 2, result.output
        assert why in result.output.replace("\n", " ")


def test_kernels_of_other_code_are_not_packed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_archives, "current_source", lambda kernel: "another digest")
    assert pack(root / "first", tmp_path, "1") == []


@pytest.mark.usefixtures("compiled_here")
def test_archives_have_a_largest_size(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_archives, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"the limit is 1,000"):
        pack(root / "first", tmp_path, "1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("compiled_here")
def test_extensions_of_this_python_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    suffix, key = sysconfig.get_config_var("EXT_SUFFIX"), "ab" * 32
    cache = tmp_path / "cache"
    shutil.copytree(root / "first", cache)
    home = cache / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
    home.mkdir()
    for name in (f"cuda_utils{suffix}", "cuda_utils.cpython-399-none.so", f"other{suffix}"):
        (home / name).write_bytes(name.encode())
    pack(cache, tmp_path, "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    PackagedKernels.at(tmp_path, 90).restore_modules()
    (restored,) = (tmp_path / "new").glob("*/*")
    assert (restored.parent.name, restored.name) == (home.name, f"cuda_utils{suffix}")
    assert restored.read_bytes() == f"cuda_utils{suffix}".encode()


def test_keys_of_another_triton_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{kernel_archives.triton_key()}-source-target"
    own = portable_key(key)
    assert own is not None
    assert portable_key("something else") is None
    monkeypatch.setattr(kernel_archives.triton, "__version__", "0.0")
    assert portable_key(key) != own


def test_engines_on_a_cpu_have_no_archive_and_no_decision() -> None:
    packaged, config = installed_kernels(torch.device("cpu")), object()
    assert not packaged.serves
    assert packaged.decided(config) is config  # type: ignore[arg-type]
    assert forks_for(torch.device("cpu"), 1) == 0
