"""Reading compiled kernels of the package's archive into Triton's cache, before Triton looks for them there.

Triton computes a key for each kernel that it needs. :class:`PackagedKernels` sees the key first. If Triton's cache has
no such kernel and the archive (``kernel_archives.py``) does, its files are written into the cache, and Triton loads
them as if an earlier start had compiled them. All other kernels are compiled, and the reason is counted.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import compiler
from triton.runtime import jit
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key

from unisono.config import ResolvedConfig, env
from unisono.engine.startup.kernel_archives import SIDECAR, UNREADABLE, KernelArchive, archive_name, portable_key

PACKAGED = Path(__file__).parents[2] / "bundled" / "kernels"
"""Directory of the package's archives. A checkout has none; ``make wheel`` puts them there."""

CHANGED = "changed since the archive was made"
CONFIGURATION = "not in the archive with these sizes"
UNKNOWN = "not in the archive"
DAMAGED = "damaged in the archive"


class PackagedKernels:
    """Kernels of one device. archive: None if all kernels are compiled, for the reason ``why``.

    ``restored`` and ``cached``: numbers of kernels that the archive and Triton's cache had. ``missing``: numbers of
    kernels that neither had, by reason. Kernels of other packages are not counted.
    """

    def __init__(self, archive: KernelArchive | None, why: str = "") -> None:
        self._archive, self.why = archive, why
        self.restored, self.cached, self.missing = 0, 0, Counter[str]()
        self._seen, self._lock = set[str](), threading.Lock()

    @classmethod
    def of(cls, device: torch.device) -> PackagedKernels:
        """Open the archive for a CUDA device and the installed Triton, if there is one."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls.at(env.kernel_archives(PACKAGED), 10 * major + minor)

    @classmethod
    def at(cls, directory: Path | None, arch: int) -> PackagedKernels:
        """Open the archive for a compute capability × 10 in a directory. None: use none."""
        name = archive_name(triton.__version__, arch)
        if directory is None:
            return cls(None, "UNISONO_KERNELS=0")
        if not (path := directory / name).is_file():
            return cls(None, f"there is no {name}")
        try:
            return cls(KernelArchive(path))
        except UNREADABLE as error:
            return cls(None, f"{name} is unreadable: {error}")

    @property
    def serves(self) -> bool:
        """True if there is an archive for this device."""
        return self._archive is not None

    def install(self) -> None:
        """Write the archive's C extensions into Triton's cache, and serve all later compilations of this process."""
        global _serving
        self.restore_modules()
        _serving = self
        compiler.get_cache_key = jit.get_cache_key = _get_cache_key

    def prepare(self, key: str, src: Any) -> None:
        """Write a kernel into Triton's cache, unless it is there; count it. key: Triton's, before hashing."""
        kernel = getattr(src, "fn", None)
        if kernel is None or not str(getattr(kernel, "module", "")).startswith("unisono."):
            return
        digest = hashlib.sha256(key.encode()).hexdigest()
        with self._lock:
            if digest in self._seen or (portable := portable_key(key)) is None:
                return
            self._seen.add(digest)
            name = f"{kernel.module}:{kernel.__name__}"
            metadata, cache = f"{src.name[:150]}.json", get_cache_manager(digest)
            if (cache.get_group(metadata) or {}).get(metadata):
                self.cached += 1
                return
            side = {"key": portable, "kernel": name, "source": kernel.cache_key}
            cache.put(json.dumps(side), SIDECAR, binary=False)
            if (why := self._restore(portable, name, kernel.cache_key, cache, metadata)) is None:
                self.restored += 1
            else:
                self.missing[why] += 1

    def _restore(self, key: str, name: str, source: str, cache: Any, metadata: str) -> str | None:
        """Write a kernel's files into Triton's cache. Return the reason if that fails."""
        if self._archive is None:
            return self.why
        try:
            files = self._archive.kernel(key)
        except UNREADABLE:
            return DAMAGED
        if metadata not in files:
            known = self._archive.manifest.sources.get(name)
            return UNKNOWN if known is None else CONFIGURATION if known == source else CHANGED
        cache.put_group(metadata, {each: cache.put(content, each) for each, content in files.items()})
        return None

    def restore_modules(self) -> None:
        """Write the C extensions for this Python into Triton's cache, unless they are there."""
        if self._archive is None:
            return
        try:
            for key, name, content in self._archive.modules(sysconfig.get_config_var("EXT_SUFFIX")):
                cache = get_cache_manager(key)
                if cache.get_file(name) is None:
                    cache.put(content, name)
        except UNREADABLE as error:
            self._archive, self.why = None, f"the archive is unreadable: {error}"

    def decision(self) -> tuple[str, str, str]:
        """Return (name, value, reason) for the engine's decisions."""
        missing = sum(self.missing.values())
        value = f"{self.restored} from the archive, {self.cached} from Triton's cache, {missing} compiled"
        reasons = [f"{count} {why}" for why, count in sorted(self.missing.items())]
        usual = "the archive has all that Triton's cache lacked" if self.restored else "all were cached"
        return "compiled kernels", value, ", ".join(reasons) or usual

    def decided(self, config: ResolvedConfig) -> ResolvedConfig:
        """Add :meth:`decision` to an engine's configuration, unless no kernel was needed."""
        needed = self.restored or self.cached or self.missing
        return config.decide(*self.decision()) if needed else config


_serving: PackagedKernels | None = None


def installed_kernels(device: torch.device) -> PackagedKernels:
    """Open and install the archive for a device; on a CPU, where nothing is compiled, there is none.

    Triton's files are hashed meanwhile, which takes 0.3 s without the GIL: every kernel's key has the hash.
    """
    if device.type != "cuda":
        return PackagedKernels(None, "a CPU compiles no kernels")
    threading.Thread(target=triton_key, name="triton-key", daemon=True).start()
    packaged = PackagedKernels.of(device)
    packaged.install()
    return packaged


def _get_cache_key(src: Any, backend: Any, backend_options: Any, env_vars: Any) -> str:
    """Return Triton's key of a kernel, and put the kernel into Triton's cache if the package has it."""
    key: str = get_cache_key(src, backend, backend_options, env_vars)
    if _serving is not None:
        _serving.prepare(key, src)
    return key
