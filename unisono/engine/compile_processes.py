"""Processes that compile kernels into Triton's cache, beside the threads of this one.

Half of a compilation is Python, which one thread of a process does at a time; a start with an empty cache compiles
dozens of kernels. A compilation that is queued here goes to a process, and this one then finds its result in the cache.
What cannot travel, or has no process that is free yet, is compiled in this process as before.

The processes start at the first kernel that the cache does not have, and end with the context. As a script this module
is such a process: its argument is the descriptor of a connection.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

VARIABLE = "UNISONO_COMPILE_PROCESSES"
"""How many processes; 0, the default until it has been measured on a GPU: none."""

AT_HOME = 2
"""Kernels that this process compiles at once while all others are busy."""

GAVE_UP = (EOFError, OSError)
"""What a connection raises whose process is gone."""


def wanted() -> int:
    """How many processes the environment asks for."""
    text = os.environ.get(VARIABLE, "0")
    return int(text) if text.isdecimal() else 0


class CompileProcesses:
    """``count`` processes for the compilations of a context."""

    def __init__(self, count: int) -> None:
        self._count, self._idle = count, queue.SimpleQueue[Connection]()
        self._at_home = threading.Semaphore(AT_HOME)
        self._lock, self._started = threading.Lock(), list[tuple[subprocess.Popen[bytes], Connection]]()
        self.compiled = 0  # by processes

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process, connection in self._started:
            with suppress(*GAVE_UP):
                connection.close()
            process.kill()
            process.wait()

    def ahead(self, key: str, compile: Callable[[], Any]) -> Callable[[], Any]:
        """The same compilation, which Triton queues under this cache key, by a process first."""

        def by_process_first() -> Any:
            job = job_of(compile)
            if job is None or is_cached(key, job[0]):
                return compile()
            self._start()
            self._send(job[1], compile)
            return compile()

        return by_process_first

    def _send(self, job: bytes, compile: Callable[[], Any]) -> None:
        """Have a process compile a job, or this one where none is free."""
        while True:
            try:
                connection = self._idle.get(timeout=0.05)
            except queue.Empty:
                if self._at_home.acquire(blocking=False):
                    try:
                        compile()
                    finally:
                        self._at_home.release()
                    return
                continue
            with suppress(*GAVE_UP):
                connection.send_bytes(job)
                self.compiled += connection.recv_bytes() == b"compiled"
                self._idle.put(connection)
            return

    def _start(self) -> None:
        """Start the processes, once; each is idle when it says so."""
        with self._lock:
            if self._started:
                return
            for _ in range(self._count):
                ours, theirs = Pipe()
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                theirs.close()
                self._started.append((process, ours))
                threading.Thread(target=self._wait_ready, args=[ours], daemon=True).start()

    def _wait_ready(self, connection: Connection) -> None:
        with suppress(*GAVE_UP):
            connection.recv_bytes()
            self._idle.put(connection)


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


def main(descriptor: int) -> None:
    """Compile what comes until the connection ends."""
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    with suppress(*GAVE_UP):
        while True:
            (kind, module, name, *source), target, options = pickle.loads(connection.recv_bytes())
            try:
                kernel = getattr(import_module(module), name)
                triton.compile(kind(kernel, *source), target=GPUTarget(*target), options=options)
                connection.send_bytes(b"compiled")
            except GAVE_UP:
                raise
            except Exception as error:  # the process that asked compiles it itself and says what is wrong
                connection.send_bytes(repr(error).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
