"""Processes that compile kernels into Triton's cache, beside the threads of this one.

Half of a compilation is Python, which one thread of a process does at a time; a start with an empty cache compiles
dozens of kernels. So a compilation that is queued here goes to another process, and this one then finds its result in
the cache. One process imports what kernels need, and the others are forks of it (``unisono/sandbox/forks.py``): each
has the imports at once. It starts early where the cache is empty, else at the first kernel that the cache does not
have, so a warm start has none of them. What cannot travel, or comes before the forks, is compiled in this process.
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

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager

from unisono import kernels
from unisono.sandbox.channel import Channel, Gone
from unisono.sandbox.forks import Template, serve

MOST = 16
"""Forks at most: a start does not have more kernels to compile at once for long."""

AT_HOME = 4
"""Kernels that this process compiles at once until there are forks. Its own passes need its one Python, too."""

VARIABLE = "UNISONO_COMPILE_PROCESSES"
"""How many forks there are, in place of as many as there are other cores; 0: none."""


def forks_for(ranks: int) -> int:
    """How many forks compile for this process, one of ``ranks`` on this machine: as many as there are other cores."""
    asked = os.environ.get(VARIABLE, "")
    if asked.isdecimal():
        return int(asked)
    return min(MOST, len(os.sched_getaffinity(0)) // ranks - 1)


def nothing_is_cached() -> bool:
    """Whether Triton's cache is empty, so that many kernels will be compiled."""
    folder = Path(triton.knobs.cache.dir)
    return not folder.is_dir() or next(folder.iterdir(), None) is None


class CompileProcesses:
    """``count`` processes for the compilations of a context. ``compiled`` counts what they have compiled."""

    def __init__(self, count: int) -> None:
        self.compiled, self.count = 0, count
        self._template: Template | None = None
        self._idle = queue.SimpleQueue[Channel]()
        self._living, self._lock, self._at_home = 0, threading.Lock(), threading.Semaphore(AT_HOME)
        if count > 0 and nothing_is_cached():
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
        """The same compilation, which Triton queues under this cache key, by another process first."""

        def by_another_first() -> Any:
            job = job_of(compile) if self.count > 0 else None
            if job is not None and not is_cached(key, job[0]):
                self._begin()
                self._send(job[1], compile)
            return compile()

        return by_another_first

    def _begin(self) -> None:
        """Start the process that the others are forks of, once."""
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
        """Have the forks made; each is idle at first."""
        with suppress(Gone):
            for _ in range(count):
                channel, _ = template.fork()
                with self._lock:
                    self._living += 1
                self._idle.put(channel)

    def _send(self, job: bytes, compile: Callable[[], Any]) -> None:
        """Have a process compile a job; this one where none lives."""
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
    """(The kernel's name in the cache, what another process needs to compile it); None where that cannot travel.

    compile: what ``triton.runtime.jit`` queues, whose variables say which kernel it is.
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
    """Whether Triton's cache has the kernel of this cache key."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool((manager.get_group(f"{name[:150]}.json") or {}).get(f"{name[:150]}.json"))


# ---- in the template and its forks ------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Serve as the template."""
    serve(descriptor, _import_kernels)


def _import_kernels(first: list[Any]) -> Callable[[Channel, Any], None]:
    """What the template does before it forks; returns what the forks do. first: empty."""
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    return _compile


def _compile(channel: Channel, message: Any) -> None:
    """Compile what comes until the channel ends; each is answered by whether it compiles. message: none."""
    while True:
        job, _ = channel.receive()
        (kind, module, name, *source), target, options = pickle.loads(job)
        try:
            kernel = getattr(import_module(module), name)
            _build_launcher(triton.compile(kind(kernel, *source), target=GPUTarget(*target), options=options))
            compiles = True
        except Exception:  # the process that asked compiles it itself and says what is wrong
            compiles = False
        channel.send(compiles)


def _build_launcher(kernel: CompiledKernel) -> None:
    """Put what launches a kernel into the cache, too: Triton 3.6 compiles it as C when the kernel is loaded."""
    with suppress(Exception):  # the process that asked does it when it loads the kernel, and says what is wrong
        CudaLauncher(kernel.src, kernel.metadata)
