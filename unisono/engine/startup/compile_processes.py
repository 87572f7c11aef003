"""Processes that compile kernels into Triton's cache, beside the threads of this one.

Half of a compilation is Python code under the GIL, and a start with an empty cache compiles dozens of kernels. A
compilation that is queued here runs in another process; this process then finds its result in the cache. One process
(the template) imports the modules that kernels need, and the others are its forks (``unisono/sandbox/forks.py``). It
starts early if the cache is empty, otherwise at the first kernel that the cache does not have, so a warm start has no
such process. Kernels that cannot be pickled, or come before the forks are ready, are compiled in this process.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import TracebackType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager

from unisono import kernels
from unisono.config import env
from unisono.engine.startup.kept_files import keep_extensions
from unisono.sandbox.channel import ForkChannel, Gone
from unisono.sandbox.forks import Template, serve

keep_extensions()

MOST = 16
"""Largest number of forks: a start does not compile more kernels at once for long."""

AT_HOME = 4
"""Kernels that this process compiles at once until the forks are ready. Its own passes need the GIL, too."""


def forks_for(device: torch.device, ranks: int) -> int:
    """Return the number of forks for this process, one of ``ranks`` on this machine: the number of other cores.

    0 without a CUDA device.
    """
    if device.type != "cuda":
        return 0
    if (count := env.compile_processes()) is not None:
        return count
    return min(MOST, len(os.sched_getaffinity(0)) // ranks - 1)


def nothing_is_cached() -> bool:
    """True if Triton's cache is empty, so that many kernels will be compiled."""
    folder = Path(triton.knobs.cache.dir)
    return not folder.is_dir() or next(folder.iterdir(), None) is None


class CompileProcesses:
    """Run ``count`` processes for the compilations of a context. ``compiled`` counts their compilations."""

    def __init__(self, count: int, packaged: bool = False) -> None:
        """packaged: the package's archive has most kernels, so an empty cache does not mean many compilations."""
        self.compiled, self.count = 0, count
        self._template: Template | None = None
        self._idle = queue.SimpleQueue[ForkChannel]()
        self._living, self._lock, self._at_home = 0, threading.Lock(), threading.Semaphore(AT_HOME)
        if count > 0 and not packaged and nothing_is_cached():
            self._begin()

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self.count = 0
            if self._template is not None:
                self._template.close()  # the forks end with their channels
            while not self._idle.empty():
                self._idle.get().close()

    def ahead(self, key: str, compile: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``compile``, preceded by the same compilation in another process. key: Triton's cache key."""

        def by_another_first() -> Any:
            job = job_of(compile) if self.count > 0 else None
            if job is not None and not is_cached(key, job[0]):
                self._begin()
                self._send(job[1], compile)
            return compile()

        return by_another_first

    def _begin(self) -> None:
        """Start the template process, once."""
        with self._lock:
            if self._template is not None or self.count == 0:
                return
            try:
                self._template = Template(__name__, [])
            except (Gone, OSError):
                self.count = 0
                return
            threading.Thread(target=self._fork, args=[self._template, self.count], daemon=True).start()

    def _fork(self, template: Template, count: int) -> None:
        """Make the forks; each is idle at first."""
        with suppress(Gone):
            for _ in range(count):
                channel, _ = template.fork()
                with self._lock:
                    self._living += 1
                self._idle.put(channel)

    def _send(self, job: bytes, compile: Callable[[], Any]) -> None:
        """Send a job to a process; compile in this one if none lives."""
        while True:
            try:
                channel = self._idle.get(timeout=0.02)
            except queue.Empty:
                if not self._living and self._at_home.acquire(blocking=False):
                    try:
                        compile()
                    finally:
                        self._at_home.release()
                    return
                continue
            try:
                channel.send(job)
                done, _ = channel.receive()
                with self._lock:
                    self.compiled += done
                self._idle.put(channel)
            except Gone:
                with self._lock:
                    self._living -= 1
            return


def job_of(compile: Callable[[], Any]) -> tuple[str, bytes] | None:
    """Return the kernel's name in the cache and the pickled job; None if it cannot be pickled.

    compile: the closure that ``triton.runtime.jit`` queues; its variables name the kernel.
    """
    found = inspect.getclosurevars(compile).nonlocals
    try:
        src, target, options = found["src"], found["target"], found["options"]
        kernel = src.fn
        if getattr(import_module(kernel.module), kernel.__name__) is not kernel:
            return None
        source = type(src), kernel.module, kernel.__name__, src.signature, src.constants, src.attrs
        return src.name, pickle.dumps((source, (target.backend, target.arch, target.warp_size), options.__dict__))
    except (KeyError, AttributeError, TypeError, ImportError, pickle.PicklingError):
        return None


def is_cached(key: str, name: str) -> bool:
    """True if Triton's cache has the kernel of this cache key."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool((manager.get_group(f"{name[:150]}.json") or {}).get(f"{name[:150]}.json"))


# ---- in the template and its forks ------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Serve as the template."""
    serve(descriptor, _import_kernels)


def _import_kernels(first: list[Any]) -> Callable[[ForkChannel, Any], None]:
    """Import the modules of kernels before forking; return the forks' main function. first: empty."""
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    return _compile


def _compile(channel: ForkChannel, message: Any) -> None:
    """Compile jobs until the channel ends; answer each with True if it compiles. message: None."""
    while True:
        job, _ = channel.receive()
        (kind, module, name, *source), target, options = pickle.loads(job)
        try:
            kernel = getattr(import_module(module), name)
            _build_launcher(triton.compile(kind(kernel, *source), target=GPUTarget(*target), options=options))
            compiles = True
        except Exception:  # the requesting process compiles it itself and reports the error
            compiles = False
        channel.send(compiles)


def _build_launcher(kernel: CompiledKernel) -> None:
    """Put the kernel's launcher into the cache, too: Triton 3.6 compiles it as C when the kernel is loaded."""
    with suppress(Exception):  # the requesting process builds it when it loads the kernel, and reports the error
        CudaLauncher(kernel.src, kernel.metadata)
