"""Handle of one engine process: the process, the socket to it, its heartbeats, its end.

:class:`unisono.cluster.client.EngineClient` makes a handle for each process that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from unisono import types
from unisono.cluster import curve, engine_process, ipc
from unisono.cluster.heartbeat import Watch
from unisono.cluster.ledger import Ledger
from unisono.types import ConfigError, EngineDead, UnisonoError

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Heard = Callable[[ipc.FromEngine], None]
Ended = Callable[[UnisonoError], None]


LOOK, STOPPED = 0.2, 2.0
"""Seconds between two checks of a rank 0's process, and the longest time that it may be stopped."""


def is_stopped(pid: int) -> bool:
    """True if a process was stopped, for example by ``kill -STOP``; False if the system does not tell."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Handle(Protocol):
    """Handle of an engine at any location; see the methods of :class:`EngineHandle`."""

    ready: asyncio.Future[dict[str, Any]]
    over: bool

    @property
    def where(self) -> str: ...
    def start(self) -> None: ...
    def send(self, message: bytes) -> None: ...
    def hide(self) -> None: ...
    def started(self) -> list[str]: ...
    async def stop(self, gently: bool) -> None: ...
    def kill(self) -> None: ...


Launcher = Callable[[str, Any, float, Heard, Ended, Progress], Handle]
"""Makes a handle; the arguments are those of :class:`EngineHandle`."""

MAX_SOCKET_PATH = 95
"""Bytes of a Unix socket's path; five more for the heartbeats'. The limits are 104 (macOS) and 108 (Linux)."""
READ_LIMIT = 0.05
"""Seconds of reading the engine's messages before responses are sent."""
LAST_WORDS = 0.2
"""Seconds to wait for the last message of an engine process that has exited."""
SHUTDOWN_LIMIT = 10.0
"""Seconds that an engine gets to free everything before it is killed."""
KILL_LIMIT = 30.0
"""Seconds that the system gets to end a killed process: it frees the device's memory first."""


def socket_directory() -> str:
    """Make a directory for the engine's sockets, of mode 0700: other users cannot connect.

    It lies in the temporary directory, or in ``/tmp`` if a socket's path would be longer than the system permits.
    Raises ConfigError if neither will do.
    """
    usual = os.path.join(tempfile.gettempdir(), "unisono-12345678", "engine")
    parent = None if len(os.fsencode(usual)) <= MAX_SOCKET_PATH else "/tmp"
    try:
        return tempfile.mkdtemp(prefix="unisono-", dir=parent)
    except OSError as error:
        why = f", and TMPDIR gives socket paths above {MAX_SOCKET_PATH} bytes" if parent else ""
        raise ConfigError(
            f"No directory for sockets in {parent or tempfile.gettempdir()}: {error.strerror}{why}."
        ) from None


class EngineHandle:
    """An engine process, from its start to its end.

    factory: ``"module:Class"`` called with ``config`` in that process. patience: seconds without a heartbeat after
    which it is killed; 0: never. heard: called with each message of a loaded engine. ended: called once, with the
    reason, if it ends after it was loaded. progress: called with a stage and its completed fraction, 0 … 1, while it
    loads. environment: further variables of the process.

    ``ready`` becomes ``Engine.info()``, or the error that kept it from loading. ``over``: True once it has ended.
    """

    def __init__(
        self,
        factory: str,
        config: Any,
        patience: float,
        heard: Heard,
        ended: Ended,
        progress: Progress,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._factory, self._config, self._patience = factory, config, patience
        self._heard, self._ended, self._progress = heard, ended, progress
        self._environment = dict(environment or {})
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.over = False
        self._directory = ""
        self._ledger: Ledger | None = None
        self._process: Any = None
        self._watch: Watch | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Open the sockets and start the process; ``ready`` waits for it."""
        loop = asyncio.get_running_loop()
        self._directory = socket_directory()
        address = f"ipc://{self._directory}/engine"
        try:
            self._ledger = Ledger(address)
            self._bind(address, f"{address}.beat")
            self._spawn(address, self._watch.endpoint if self._watch is not None else None)
        except BaseException:
            self._free()
            self.hide()
            raise
        loop.add_reader(self._process.sentinel, self._exited)
        self._tasks.append(loop.create_task(self._read()))
        if self._watch is not None:
            self._tasks.append(loop.create_task(self._guard(self._watch)))
        if getattr(self._config, "tensor_parallel_size", 1) > 1:
            self._tasks.append(loop.create_task(self._notice_a_stop()))

    def _bind(self, address: str, heartbeats: str, secret: bytes = b"") -> None:
        """Open the sockets. secret: encrypts them."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        curve.guard(self._socket, secret)
        self._socket.bind(address)
        if self._patience:
            self._watch = Watch(heartbeats, self._patience, secret)

    def _spawn(self, address: str, heartbeats: str | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        arguments = (address, self._factory, self._config, heartbeats)
        process = spawn.Process(target=engine_process.main, args=arguments, name="unisono-engine", daemon=True)
        # Both are inherited. Ctrl-C during the child's imports prints no traceback.
        with _interrupts_ignored(), _environment(self._environment):
            process.start()
        self._process = process

    def _free(self) -> None:
        """Close the sockets."""
        self._socket.close(linger=0)
        self._context.term()
        if self._ledger is not None:
            self._ledger.close()
        if self._watch is not None:
            self._watch.close()

    def send(self, message: bytes) -> None:
        """Send an encoded message to the engine."""
        self._socket.send(message)  # no high-water mark: it is queued at once, so no await

    def started(self) -> list[str]:
        """Return the ids of the requests that the engine began last, as far as it could record them."""
        return [] if self._ledger is None else self._ledger.read()

    def hide(self) -> None:
        """Remove the sockets' names. The engine is connected, so they are no longer needed."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self, gently: bool) -> None:
        """End the process, by force if necessary, and free this handle's resources."""
        self.over = True
        if self._process is None:
            return
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if gently:
            self.send(ipc.encode(ipc.Shutdown()))
            await asyncio.to_thread(self._process.join, SHUTDOWN_LIMIT)
        self.kill()
        await asyncio.to_thread(self._process.join, KILL_LIMIT)
        if self._process.is_alive():
            logger.error("The engine process %d was killed %g s ago and has not ended.", self._process.pid, KILL_LIMIT)
        await self._close()
        process, self._process = self._process, None
        with contextlib.suppress(ValueError):  # it lives on
            process.close()

    async def _close(self) -> None:
        """End the tasks and close the sockets."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._free()

    def kill(self) -> None:
        """End the process at once and leave nothing on disk. For a second Ctrl-C."""
        if self._process is not None:
            self._process.kill()
        self.hide()

    async def _read(self) -> None:
        """Handle messages as they come: all waiting ones, then the event loop's other tasks run once.

        A ``recv`` that has a message does not yield to the event loop, so an engine that is ahead would keep every
        response from being sent. Reading one message per turn would send an event for each token and never catch up.
        """
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while True:
            self._receive(await self._socket.recv())
            until = time.monotonic() + READ_LIMIT
            with suppress(zmq.Again):
                while time.monotonic() < until:
                    self._receive(waiting.recv(zmq.NOBLOCK))
            await asyncio.sleep(0)

    def _receive(self, data: bytes) -> None:
        """Handle an encoded message of the engine."""
        match message := ipc.decode_from_engine(data):
            case ipc.Loading(stage, share):
                self._progress(stage, share)
            case ipc.Ready(info):
                if self._watch is not None:
                    self._watch.lives()
                if not self.ready.done():
                    self.ready.set_result(info)
            case ipc.Fatal(error, text):
                self._end(rebuild(error, text))
            case _:
                self._heard(message)

    async def _guard(self, watch: Watch) -> None:
        await watch.silent()
        if self.over:
            return
        why = (
            f"the engine process has answered no heartbeat for {self._patience:g} s (--heartbeat-timeout): it was "
            "stopped, or gets no processor"
        )
        logger.error("Watchdog: %s. Killing %s.", why, self.where)
        self._end(EngineDead(why))
        self._end_process()

    async def _notice_a_stop(self) -> None:
        """End an engine whose process was stopped, sooner than heartbeats would: its other ranks wait for it."""
        since = None
        while not self.over:
            await asyncio.sleep(LOOK)
            now, stopped = time.monotonic(), is_stopped(self._process.pid)
            since = (since or now) if stopped else None
            if since is not None and now - since > STOPPED and not self.over:
                why = f"rank 0 of the model (process {self._process.pid}) was stopped for {STOPPED:g} s"
                logger.error("%s. Killing it.", why)
                self._end(EngineDead(why))
                self._end_process()

    @property
    def where(self) -> str:
        """Location of the engine, in words."""
        return "nowhere" if self._process is None else f"process {self._process.pid}"

    def _end_process(self) -> None:
        """End the process of the engine, even a stopped one."""
        self._process.kill()

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        loop.call_later(LAST_WORDS, self._end, EngineDead(f"the engine process {how}"))

    def _end(self, error: UnisonoError) -> None:
        if self.over:
            return
        self.over = True
        if self.ready.done():
            self._ended(error)
        else:
            self.ready.set_exception(error)
            self.ready.exception()


def rebuild(error: str, message: str) -> UnisonoError:
    """Rebuild an engine's error: the same class if ``types`` has it, EngineDead otherwise."""
    kind = getattr(types, error, None)
    if isinstance(kind, type) and issubclass(kind, UnisonoError):
        return kind(message)
    return EngineDead(f"the engine failed: {error}: {message}")


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process while a child starts, which copies them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
