"""Sandboxed processes: a template that has imported its modules, and forks of it.

Untrusted code and data (clients' grammars, checkpoints' chat templates) run in such a process, under limits that the
kernel enforces; an error ends that process alone. A fork takes milliseconds, a new process seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from unisono.sandbox.channel import ForkChannel, Gone, pair
from unisono.sandbox.interpreter import Process, interpreter

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""A template has one thread, because its forks would miss the locks of others."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of malloc.h."""


class Template:
    """A process that forks. module: its code, called as ``module.main(descriptor)``. first: its first message."""

    start: Callable[..., Process] = staticmethod(interpreter)

    def __init__(self, module: str, first: Sequence[Any], patience: float | None = None) -> None:
        """patience: seconds that a fork may take, the first including the imports; then TimeoutError. None: no
        limit.
        """
        self._channel, theirs = pair()
        self._channel.socket.settimeout(patience)
        self._ready = False
        with theirs:
            self._process = self.start(module, theirs.fileno(), environment={**os.environ, **QUIET})
        self._channel.send(list(first))

    def wait(self) -> None:
        """Wait until the imports are done. Raises Gone."""
        if not self._ready:
            self._channel.receive()
            self._ready = True

    def fork(self, message: Any = None) -> tuple[ForkChannel, int]:
        """Return a channel to a new fork, and its process id; wait until the template can fork. Raises Gone."""
        self.wait()
        ours, theirs = pair()
        with theirs:
            self._channel.send([message], [theirs.fileno()])
            pid, _ = self._channel.receive()
        return ours, pid

    def close(self) -> None:
        """End the template. Forks end when their channels do."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


# ---- in the template --------------------------------------------------------------------------------


def serve(descriptor: int, begin: Callable[[list[Any]], Callable[[ForkChannel, Any], None]]) -> None:
    """Serve as a template: prepare by ``begin(first message)``, then fork for each message; end with the channel.

    The function that ``begin`` returns is called in each fork, with its channel and the message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = ForkChannel.of(descriptor)
    with suppress(Gone):
        first, _ = channel.receive()
        work = begin(first)
        channel.send("ready")
        while True:
            (message,), (end,) = channel.receive()
            child = os.fork()
            if not child:
                channel.close()
                in_child(work, ForkChannel.of(end), message)
            os.close(end)
            channel.send(child)


def in_child(work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work`` and exit, even after an error: the parent's stack must not run in its child."""
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # hide the C++ runtime's message about std::bad_alloc
        os.close(quiet)
        with suppress(Gone):
            work(*arguments)
        status = 0
    finally:
        os._exit(status)


def limit_memory(size: int) -> None:
    """Limit this process to ``size`` more bytes than now. Larger allocations raise MemoryError or std::bad_alloc."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))


def keep_freed_memory() -> None:
    """Keep freed memory of large arrays for reuse: page faults of new memory can take longer than the computation.

    Does nothing with C libraries other than glibc.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def limit_time(seconds: float) -> None:
    """End this process after this CPU time of all its threads; 0: remove the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
