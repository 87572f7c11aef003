"""Processes that are forks of one that has made the imports: ranks and servers of tests start in milliseconds.

A new interpreter takes 0.6 to 2.5 s of CPU time for its imports, and the suite starts hundreds of processes. Tests of
what a start imports, or of a program's own command line, start new interpreters.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST = 1 << 17
"""Bytes of a message: arguments and an environment."""
GPU = Path("/proc/driver/nvidia").exists()
"""CUDA, once initialised, is of no use to forks: with a GPU every program is a new interpreter."""
_NUMBER = struct.Struct("i")


class Fork:
    """A process, with the methods of ``subprocess.Popen`` that tests and the engine call."""

    def __init__(self, told: int) -> None:
        """told: a pipe that carries the process id, and then the exit status."""
        self._told = told
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.pid = self._read()

    def __del__(self) -> None:
        os.close(self._told)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        with self._lock:  # other threads may wait, too
            if self.returncode is None:
                self.returncode = self._read()
        return self.returncode

    def _read(self) -> int:
        number = os.read(self._told, _NUMBER.size)
        if not number:
            raise RuntimeError("the process that forks has ended")
        return int(_NUMBER.unpack(number)[0])

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


Process = Fork | subprocess.Popen[bytes]


class Forks:
    """Starts forks of one process, which starts with the first of them.

    imports: modules, or ``module:function`` to call one. channel: to a process that runs.
    """

    def __init__(self, *imports: str, channel: socket.socket | None = None) -> None:
        self._imports = imports
        self._lock = threading.Lock()
        self._channel = channel

    def call(self, module: str, *descriptors: int, environment: Mapping[str, str] | None = None) -> Process:
        """``module.main(*descriptors)``, as :func:`unisono.sandbox.interpreter.interpreter` does it."""
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), 1, 2, *descriptors]
            return self._start("call", [module], Path.cwd(), environment or os.environ, files)

    def python(self, *arguments: str, log: int, environment: Mapping[str, str]) -> Process:
        """``python arguments`` in the root of the repository; its messages go to the descriptor ``log``."""
        with open(os.devnull, "r+") as nothing:
            files = [nothing.fileno(), nothing.fileno(), log]
            return self._start("python", list(arguments), ROOT, environment, files)

    def finished(
        self,
        *arguments: str,
        at: Path = ROOT,
        environment: Mapping[str, str] = os.environ,
        text: str = "",
        timeout: float = 600,
        lazy: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` of ``python arguments`` in the directory ``at``. text: its input.

        lazy: its engines capture graphs on demand, unless they choose otherwise. A start of ``tiny`` takes 1.5 s less.
        """
        with (
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as log,
        ):
            given.write(text)
            files = (given, out, log)
            for file in files:
                file.seek(0)
            kind = "lazy python" if lazy else "python"
            process = self._start(kind, list(arguments), at, environment, [file.fileno() for file in files])
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            out.seek(0)
            log.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), log.read())

    def _start(
        self, kind: str, arguments: list[str], at: Path, environment: Mapping[str, str], descriptors: list[int]
    ) -> Process:
        if GPU and kind != "call":
            given, out, log = descriptors
            command = [sys.executable, *arguments]
            return subprocess.Popen(command, cwd=at, env=dict(environment), stdin=given, stdout=out, stderr=log)
        told, tell = os.pipe()
        try:
            with self._lock:
                channel = self._channel = self._channel or self._begin()
                message = pickle.dumps((kind, arguments, str(at), dict(environment)))
                socket.send_fds(channel, [message], [tell, *descriptors])
        finally:
            os.close(tell)
        return Fork(told)

    def _begin(self) -> socket.socket:
        """Start the process. It is no child of this one, whose children some tests count and kill."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *self._imports]
            subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], check=True)
        return ours


PROGRAMS = Forks(
    "unisono.entrypoints.llm", "unisono.engine.worker.rank", "unisono.cli.main", "tests.forks:import_for_a_start"
)
"""For programs that run a model, and ranks."""
SERVERS = Forks(
    "unisono.cli.main", "tests.http.fake_engine", "unisono.http.server", "unisono.http.build:import_without_torch"
)
"""For servers, and templates of sandboxed processes: no torch."""


# ---- in the process that forks ----------------------------------------------------------------------


def import_for_a_start() -> None:
    """Import what programs import while their engines start: tokenizers, features, structured outputs."""
    import unisono.passes.features
    import unisono.structured_output
    from unisono.config.transformers_names import from_transformers

    from_transformers("AutoTokenizer")
    for package in (unisono.passes.features, unisono.structured_output):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def serve(descriptor: int, imports: Sequence[str]) -> None:
    """Fork for each message, and tell how each fork ended, until the other end closes.

    Forks inherit a channel of their own, by which they have templates forked, too.
    """
    from unisono.sandbox.forks import Template

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
    inner, of_forks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(fileno=descriptor) as outer:
        while True:
            ready = select.select([outer, inner, ended], [], [])[0]
            if ended in ready:
                os.read(ended, 4096)
                _reap(tell)
            for channel in (each for each in (outer, inner) if each in ready):
                message, given, *_ = socket.recv_fds(channel, MOST, 8)
                if not message:
                    return
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for number in (ended, wake, given[0], *tell.values()):
                        os.close(number)
                    outer.close()
                    inner.close()
                    Template.start = staticmethod(template_starter(Forks(channel=of_forks)))
                    _exit(lambda: _work(pickle.loads(message), given[1:]))  # noqa: B023
                tell[pid] = given[0]
                with suppress(BrokenPipeError):
                    os.write(given[0], _NUMBER.pack(pid))
                for number in given[1:]:
                    os.close(number)


def template_starter(forks: Forks) -> Callable[..., Any]:
    """``forks.call``, but a new interpreter for the media worker if this process has torch: it does without, and
    transformers looks for torch once.
    """

    def call(module: str, *descriptors: int, environment: Mapping[str, str] | None = None) -> Any:
        if module == "unisono.media.worker" and "torch" in sys.modules:
            from unisono.sandbox.interpreter import interpreter

            return interpreter(module, *descriptors, environment=environment)
        return forks.call(module, *descriptors, environment=environment)

    return call


def _reap(tell: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pipe = tell.pop(found[0])
            with suppress(BrokenPipeError):
                os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(found[1])))
            os.close(pipe)


def _work(message: tuple[str, list[str], str, dict[str, str]], given: list[int]) -> Any:
    kind, arguments, at, environment = message
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(3):
        os.dup2(given[number], number)
        os.close(given[number])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(at)
    if kind == "call":
        importlib.import_module(arguments[0]).main(*given[3:])
        return
    if kind == "lazy python":
        from unisono.config.engine import EngineConfig

        EngineConfig.__init__ = functools.partialmethod(EngineConfig.__init__, graph_capture="lazy")  # type: ignore
    what, *rest = arguments
    first = {"-c": "", "-m": at}.get(what, str(Path(what).parent))
    extra = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path[:1] = [first, *extra]
    if what == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = [what, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


def _exit(work: Callable[[], object]) -> None:
    """Call ``work`` and end this process as an interpreter ends."""
    code, interrupted = 1, False
    try:
        try:
            work()
            code = 0
        except SystemExit as error:
            if isinstance(error.code, int | None):
                code = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    serve(int(sys.argv[1]), sys.argv[2:])
