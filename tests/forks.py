"""Processes that are forks of one that has made the imports: ranks and servers of tests start in milliseconds.

A new interpreter takes 0.6 to 2.5 s of CPU time for its imports, and the suite starts hundreds of processes. Tests of
what a start imports, or of a program's own command line, start new interpreters.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MOST = 1 << 17
"""Bytes of a message: arguments and an environment."""
_NUMBER = struct.Struct("i")


class Fork:
    """A process, with the methods of ``subprocess.Popen`` that tests and the engine call."""

    def __init__(self, told: int) -> None:
        """told: a pipe that carries the process id, and then the exit status."""
        self._told = told
        self.returncode: int | None = None
        (self.pid,) = _NUMBER.unpack(os.read(told, _NUMBER.size))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            (self.returncode,) = _NUMBER.unpack(os.read(self._told, _NUMBER.size))
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Starts forks of one process, which starts with the first of them. imports: modules, or ``module:function`` for
    one to call.
    """

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None

    def run(self, module: str, *arguments: str, log: int, environment: Mapping[str, str]) -> Fork:
        """``python -m module arguments`` in the root of the repository; its messages go to the descriptor ``log``."""
        return self._start(("run", module, list(arguments)), [log], environment)

    def call(self, module: str, *descriptors: int) -> Fork:
        """``module.main(*descriptors)`` in this process's environment."""
        return self._start(("call", module, []), [2, *descriptors], os.environ)

    def _start(self, what: tuple[str, str, list[str]], descriptors: list[int], environment: Mapping[str, str]) -> Fork:
        told, tell = os.pipe()
        try:
            with self._lock:
                channel = self._channel = self._channel or self._begin()
                message = pickle.dumps((*what, dict(environment)))
                socket.send_fds(channel, [message], [tell, *descriptors])
        finally:
            os.close(tell)
        return Fork(told)

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *self._imports],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return ours


# ---- in the process that forks ----------------------------------------------------------------------


def serve(descriptor: int, imports: Sequence[str]) -> None:
    """Fork for each message, and tell how each fork ended, until the other end closes."""
    gc.disable()
    for name in imports:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
    gc.enable()
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    tell: dict[int, int] = {}
    with socket.socket(fileno=descriptor) as channel:
        while True:
            ready = select.select([channel, ended], [], [])[0]
            if ended in ready:
                os.read(ended, 4096)
                _reap(tell)
            if channel in ready:
                message, given, *_ = socket.recv_fds(channel, MOST, 8)
                if not message:
                    return
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for each in (ended, wake, given[0], *tell.values()):
                        os.close(each)
                    channel.close()
                    _exit(lambda: _work(pickle.loads(message), given[1:]))  # noqa: B023
                tell[pid] = given[0]
                os.write(given[0], _NUMBER.pack(pid))
                for each in given[1:]:
                    os.close(each)


def _reap(tell: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pipe = tell.pop(found[0])
            with suppress(BrokenPipeError):
                os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(found[1])))
            os.close(pipe)


def _work(message: tuple[str, str, list[str], dict[str, str]], given: list[int]) -> Any:
    kind, module, arguments, environment = message
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log, *descriptors = given
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if kind == "call":
        importlib.import_module(module).main(*descriptors)
        return
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.close(quiet)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exit(work: Callable[[], object]) -> None:
    """Call ``work`` and end this process as an interpreter ends."""
    code: Any = 0
    try:
        try:
            work()
        except SystemExit as error:
            code = error.code
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
