"""Processes that may be killed: a template of them that has imported what they need, and the forks of it.

What runs code or data that is not trusted (grammars of clients, chat templates of checkpoints) runs in such a process,
under limits that the kernel enforces, and dies alone. A fork costs milliseconds where a new process costs seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.sandbox.channel import Channel, Gone, pair

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""A template has one thread, or its forks would miss the others' locks."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


class Template:
    """A process that forks. module: what it runs, by ``module.main(descriptor)``. first: its first message."""

    def __init__(self, module: str, first: Sequence[Any], patience: float | None = None) -> None:
        """patience: seconds that a fork may take, the first with its imports; then TimeoutError. None: no limit."""
        self._channel, theirs = pair()
        self._channel.socket.settimeout(patience)
        self._ready = False
        code = "import sys; sys.path.insert(0, sys.argv[1]); from unisono.sandbox.forks import run; run(*sys.argv[2:])"
        arguments = [str(Path(__file__).parents[2]), module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **QUIET},
            )
        self._channel.send(list(first))

    def wait(self) -> None:
        """Wait till it has imported what it needs. Raises Gone."""
        if not self._ready:
            self._channel.receive()
            self._ready = True

    def fork(self, message: Any = None) -> tuple[Channel, int]:
        """A channel to a new fork, and its process id; waits till it can fork. Raises Gone."""
        self.wait()
        ours, theirs = pair()
        with theirs:
            self._channel.send([message], [theirs.fileno()])
            pid, _ = self._channel.receive()
        return ours, pid

    def close(self) -> None:
        """End it. Forks end by themselves, when their channels do."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


# ---- in the template --------------------------------------------------------------------------------


def run(module: str, descriptor: str) -> None:
    """What the new process does."""
    importlib.import_module(module).main(int(descriptor))


def serve(descriptor: int, begin: Callable[[list[Any]], Callable[[Channel, Any], None]]) -> None:
    """What a template does: prepare by ``begin(first message)``, then fork for each message; ends with the channel.

    What ``begin`` returns is called in each fork, with its channel and the message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = Channel.of(descriptor)
    with suppress(Gone):
        first, _ = channel.receive()
        work = begin(first)
        channel.send("ready")
        while True:
            (message,), (end,) = channel.receive()
            child = os.fork()
            if not child:
                channel.close()
                in_child(work, Channel.of(end), message)
            os.close(end)
            channel.send(child)


def in_child(work: Callable[..., None], *given: Any) -> None:
    """Do ``work`` and end, whatever comes: nothing of the parent's stack may run in its child."""
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # what the C++ runtime says of a std::bad_alloc is no news
        os.close(quiet)
        with suppress(Gone):
            work(*given)
        status = 0
    finally:
        os._exit(status)


def limit_memory(size: int) -> None:
    """At most ``size`` bytes more than now. What a process cannot get is a MemoryError or std::bad_alloc."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))


def keep_freed_memory() -> None:
    """Keep memory of large arrays for the next ones: faulting pages in anew can take longer than computing.

    With other C libraries than glibc it does nothing.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def limit_time(seconds: float) -> None:
    """End this process after this processor time of all its threads; 0: not any more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
