"""Archives of compiled kernels: files that travel with the package, so that a start need not compile.

An archive has the machine code of one version of Triton and one compute capability. It is a zip file:

* ``manifest.json``: :class:`Manifest`
* ``kernels/KEY/``: a kernel's machine code (``.cubin``) and Triton's metadata (``.json``)
* ``modules/KEY/``: C extensions that Triton compiles to launch kernels

KEY of a kernel is a digest of Triton's version and of all that Triton's own key covers (source with callees, types,
constants, options, target, ptxas), except the digest of Triton's files: that differs between Python versions, and the
machine code does not. KEY of a module is Triton's own, which covers the module's source; its file name has the Python
version. ``scripts/kernels.py`` makes archives of the cache that starts have filled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from lzma import LZMAError
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import triton_key

FORMAT = 1
MOST_BYTES = 16 << 20
"""Largest archive. Package indexes take files of 100 MB, and the wheel has other files."""

SIDECAR = "unisono.json"
"""File in a kernel's directory of Triton's cache that names its key here and its source."""

UNREADABLE = (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, LZMAError, NotImplementedError)
"""Errors of damaged archives."""

_MODULES = ("cuda_utils.", "__triton_launcher.")
_STAMP = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Manifest:
    """Contents of an archive.

    arch: compute capability × 10. sources: digest of each kernel's source by ``module:kernel``. kernels: file names by
    key. modules: file names by key, a hexadecimal digest.
    """

    triton: str
    arch: int
    unisono: str
    format: int = FORMAT
    sources: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    modules: dict[str, list[str]] = field(default_factory=dict)


class KernelArchive:
    """A readable archive. Raises one of ``UNREADABLE`` if the file is damaged or has another format."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, zipfile.ZipFile(path)
        self.manifest = Manifest(**json.loads(self._file.read("manifest.json")))
        if self.manifest.format != FORMAT:
            raise ValueError(f"{path} has format {self.manifest.format}; this version reads {FORMAT}")

    def kernel(self, key: str) -> dict[str, bytes]:
        """Return the files of a kernel by name; empty if the archive has none of this key."""
        return {name: self._file.read(f"kernels/{key}/{name}") for name in self.manifest.kernels.get(key, ())}

    def modules(self, suffix: str) -> Iterator[tuple[str, str, bytes]]:
        """Yield (Triton's key, file name, content) of the modules whose names end with ``suffix``."""
        for key, names in self.manifest.modules.items():
            for name in names:
                if name.endswith(suffix):
                    yield key, name, self._file.read(f"modules/{key}/{name}")


def archive_name(version: str, arch: int) -> str:
    """Return the file name of the archive for a version of Triton and a compute capability × 10."""
    return f"triton-{version}-sm_{arch}.zip"


def portable_key(key: str) -> str | None:
    """Return the archives' key of a kernel, from Triton's key before hashing; None if Triton makes keys otherwise."""
    of_files = triton_key()
    if not key.startswith(of_files):
        return None
    return hashlib.sha256(f"{triton.__version__}{key[len(of_files) :]}".encode()).hexdigest()


def pack(cache: Path, out: Path, version: str) -> list[Path]:
    """Write an archive for each Triton and compute capability in a cache of Triton; return their paths.

    cache: a directory that starts of this version of Unisono filled. version: Unisono's. Kernels whose source differs
    from that of this code are left out. Raises ValueError if an archive has more than ``MOST_BYTES`` bytes.
    """
    found: dict[tuple[str, int], tuple[Manifest, dict[str, bytes]]] = {}
    modules: dict[str, dict[str, bytes]] = defaultdict(dict)
    for directory in sorted(cache.iterdir()):
        for file in sorted(directory.glob("*.so")):
            if file.name.startswith(_MODULES):
                modules[_hexadecimal(directory.name)][file.name] = file.read_bytes()
        if (kernel := _compiled(directory)) is None:
            continue
        side, metadata, files = kernel
        kind = metadata["triton_version"], metadata["target"]["arch"]
        manifest, contents = found.setdefault(kind, (Manifest(*kind, version), {}))
        manifest.sources[side["kernel"]] = side["source"]
        manifest.kernels[side["key"]] = sorted(files)
        contents.update({f"kernels/{side['key']}/{name}": content for name, content in files.items()})
    return [_write(out, manifest, contents, modules) for manifest, contents in found.values()]


def _compiled(directory: Path) -> tuple[dict[str, str], dict[str, Any], dict[str, bytes]] | None:
    """Return the sidecar, Triton's metadata and the files of a kernel in Triton's cache.

    None if the directory has no complete kernel of this code.
    """
    sidecar = directory / SIDECAR
    if not sidecar.is_file() or (group := next(directory.glob("__grp__*.json"), None)) is None:
        return None
    side = json.loads(sidecar.read_text())
    name = group.name.removeprefix("__grp__").removesuffix(".json")
    files = {f"{name}.{kind}": directory / f"{name}.{kind}" for kind in ("json", "cubin")}
    if not all(file.is_file() for file in files.values()) or current_source(side["kernel"]) != side["source"]:
        return None
    contents = {name: file.read_bytes() for name, file in files.items()}
    return side, json.loads(contents[f"{name}.json"]), contents


def current_source(kernel: str) -> str | None:
    """Return the digest of the source of ``module:kernel``, callees included; None if this code has no such kernel."""
    module, _, name = kernel.partition(":")
    try:
        digest: str = getattr(import_module(module), name).cache_key
        return digest
    except (ImportError, AttributeError):
        return None


def _write(out: Path, manifest: Manifest, contents: dict[str, bytes], modules: dict[str, dict[str, bytes]]) -> Path:
    """Write one archive. The same contents make the same bytes."""
    manifest.modules.update({key: sorted(files) for key, files in modules.items()})
    of_modules = {f"modules/{key}/{name}": data for key, files in modules.items() for name, data in files.items()}
    described = json.dumps(asdict(manifest), sort_keys=True).encode()
    out.mkdir(parents=True, exist_ok=True)
    path = out / archive_name(manifest.triton, manifest.arch)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, data in sorted({"manifest.json": described, **contents, **of_modules}.items()):
            file.writestr(zipfile.ZipInfo(name, _STAMP), data, zipfile.ZIP_LZMA)
    if (size := path.stat().st_size) > MOST_BYTES:
        path.unlink()
        raise ValueError(f"{path.name} would have {size:,} bytes; the limit is {MOST_BYTES:,}. Pack fewer models")
    return path


def _hexadecimal(name: str) -> str:
    """Return the digest that names a directory of Triton's cache, in hexadecimal."""
    return base64.b32decode(name + "=" * (-len(name) % 8)).hex()
