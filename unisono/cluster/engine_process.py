"""The engine process: one engine and one socket.

Started by :class:`unisono.cluster.engine_handle.EngineHandle`, which alone talks to it. Its main thread owns the engine
(:meth:`unisono.engine.loop.EngineLoop.own`). Between two steps it handles new messages, and it sends a step's deltas in
one message. Without work it sleeps in ``poll``. It ends on ``Shutdown``, with its parent, or with the engine's first
unexpected error.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from unisono.cluster import compiled_imports, curve, heartbeat, ipc
from unisono.cluster.commands import CommandError, OperatorCommands
from unisono.cluster.early_device import start_cuda_context
from unisono.cluster.heap import freeze_heap, uncollected
from unisono.cluster.ledger import Ledger
from unisono.engine.loop import EngineLike, EngineLoop
from unisono.types import BadRequest, EngineRequest, FinishReason, TokenDelta, UnisonoError

logger = logging.getLogger(__name__)

IDLE_MS = 1000
"""Milliseconds without work after which the engine checks its bookkeeping, once, and captures missing graphs."""
PREPARED_MS = 2
"""Milliseconds between two checks of grammars that threads compile, while the engine is idle."""
PARENT_GONE_MS = 1000
"""Milliseconds after which an unread message means that the API process is gone."""


Factory = Callable[[Any, Callable[[str, float], None]], EngineLike]
"""Makes an engine of its config; calls the second argument with a stage and its completed fraction while it loads."""


def load_factory(name: str) -> Factory:
    """Return the factory that ``"module:Class"`` names. Logs a warning if its imports compiled much for nothing."""
    module, _, attribute = name.partition(":")
    if sys.pycache_prefix and "PYTHONDONTWRITEBYTECODE" not in os.environ:
        sys.dont_write_bytecode = False  # multiprocessing hands the parent's first setting on
    with uncollected(), compiled_imports.counted() as compiled:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    if (warning := compiled.warning()) is not None:
        logger.warning("%s", warning)
    return factory


def main(address: str, factory: str, config: Any, heartbeats: str | None = None, key: bytes = b"") -> None:
    """Make an engine of ``config`` and serve it on the socket at ``address``; exit with status 1 after an error.

    heartbeats: address of a socket to answer heartbeats on. key: the API process's public key, if the connections are
    encrypted.
    """
    # The terminal sends Ctrl-C to both processes; the API process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if heartbeats is not None:
        heartbeat.answer(heartbeats, key)
    start_cuda_context(str(getattr(config, "device", "")))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, PARENT_GONE_MS)
        socket.setsockopt(zmq.SNDTIMEO, PARENT_GONE_MS)  # without a peer a send would wait for ever
        curve.join(socket, key)
        socket.connect(address)
        ledger = Ledger(address)
        try:
            engine = load_factory(factory)(config, lambda stage, share: _send(socket, ipc.Loading(stage, share)))
            freeze_heap()
            EngineServer(engine, socket, ledger).run()
            engine.shutdown()
        except BaseException as error:  # the API process must learn of any error
            if not isinstance(error, UnisonoError):
                traceback.print_exc()
            with suppress(zmq.Again):
                _send(socket, ipc.Fatal(type(error).__name__, _one_line(error)))
            sys.exit(1)


def _send(socket: zmq.Socket[bytes], message: ipc.FromEngine) -> None:
    socket.send(ipc.encode(message))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _described(error: Exception) -> str:
    """Describe an error that ends one request: its class and up to 450 characters of its message."""
    return f"{type(error).__name__}: {_one_line(error)[:450]}"


class EngineServer:
    """Serve ``engine`` on ``socket``: handle messages between its steps, and send each step's deltas."""

    def __init__(self, engine: EngineLike, socket: zmq.Socket[bytes], ledger: Ledger | None = None) -> None:
        self.engine = engine
        self.socket = socket
        self.commands = OperatorCommands(engine)
        self.stopping = False
        self.preparing: dict[str, tuple[EngineRequest, Future[Any]]] = {}
        self.ledger = ledger or Ledger("")
        engine.admitted = self.admitted
        self.poller = zmq.Poller()
        self.poller.register(socket, zmq.POLLIN)
        wakeup = getattr(engine, "wakeup_socket", None)  # of an engine that serves other engines
        self.peer_wakeup = self.watch(wakeup.fileno() if wakeup is not None else None)
        parent = multiprocessing.parent_process()
        self.parent = self.watch(parent.sentinel if parent is not None else None)
        self.failing = self.watch(getattr(engine, "failing", None))
        self.idle_ms: int | None = None
        """Milliseconds of idleness before the next idle work; None: no idle work before the next step."""
        self.unchecked = False
        """True from a step until the idle engine has checked its bookkeeping."""

    def watch(self, descriptor: int | None) -> int | None:
        """Add a file descriptor to the poll set."""
        if descriptor is not None:
            self.poller.register(descriptor, zmq.POLLIN)
        return descriptor

    def run(self) -> None:
        """Serve until Shutdown or the API process's death. Raises the error of a step."""
        self.send(ipc.Ready(self.engine.info()))
        EngineLoop(self.engine, deliver=self.send_deltas).own(ended=self.wait_for_work)

    def wait_for_work(self) -> bool:
        """Handle messages until the engine has work. Return True if the process is to end."""
        while True:
            working = self.engine.has_work()
            timeout = 0 if working else PREPARED_MS if self.preparing else self.idle_ms
            events = dict(self.poller.poll(timeout))
            self.add_prepared()
            if self.idle_ms is not None and not working and not events and not self.preparing:
                self.work_idly()
            if self.parent in events:
                return True
            if self.failing in events:
                self.engine.check_ranks()
            if self.socket in events:
                self.receive()
            if self.stopping:
                return True
            if self.engine.has_work() or self.peer_wakeup in events:
                self.unchecked, self.idle_ms = True, IDLE_MS
                return False

    def work_idly(self) -> None:
        """Check the bookkeeping once after the last step, then capture missing graphs.

        One graph at a time: a request that arrives meanwhile waits for one capture at most.
        """
        if self.unchecked:
            self.engine.check_integrity()
            self.unchecked = False
        self.idle_ms = 0 if self.engine.capture_missing() else None

    def admitted(self, request_ids: list[str]) -> None:
        """Report requests that are about to begin to the API process."""
        self.ledger.write(request_ids)
        self.send(ipc.Started(request_ids))

    def send_deltas(self, deltas: list[TokenDelta]) -> None:
        """Send the deltas of a step in one message. A delta that cannot be encoded ends its request."""
        if not deltas:
            return
        try:
            data = ipc.encode(ipc.Deltas(deltas))
        except (TypeError, ValueError, OverflowError):
            data = ipc.encode(ipc.Deltas([self.sendable(delta) for delta in deltas]))
        self.socket.send(data)

    def sendable(self, delta: TokenDelta) -> TokenDelta:
        try:
            ipc.encode(ipc.Deltas([delta]))
        except (TypeError, ValueError, OverflowError) as error:
            traceback.print_exception(error)
            self.engine.abort(delta.request_id)
            return TokenDelta(delta.request_id, [], FinishReason.ABORT, error=f"{_described(error)} (result).")
        return delta

    def receive(self) -> None:
        """Handle every waiting message."""
        inspect = False
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = ipc.decode_to_engine(data)
            except (msgspec.MsgspecError, ValueError, TypeError, UnisonoError) as error:
                self.refuse(ipc.request_in(data), error)
                continue
            match message:
                case ipc.Add(request):
                    self.add(request)
                case ipc.Abort(request_id):
                    if (preparing := self.preparing.pop(request_id, None)) is not None:
                        preparing[1].cancel()  # stop the compilation of an aborted request
                    self.engine.abort(request_id)
                case ipc.Inspect():
                    inspect = True
                case ipc.OperatorCall(number, command, arguments):
                    self.call(number, command, arguments)
                case ipc.Shutdown():
                    self.stopping = True
        if inspect:  # one answer for all waiting queries
            samples = [ipc.MetricSample(*sample) for sample in self.engine.metrics()]
            self.send(ipc.Stats(self.engine.info(), samples))

    def add(self, request: EngineRequest) -> None:
        """Add a request and answer; if its grammar is being compiled, answer once that is done."""
        try:
            prepared = self.engine.prepare(request)
        except Exception as error:
            self.refuse(request.request_id, error)
            return
        if prepared is not None and not prepared.done():
            self.preparing[request.request_id] = request, prepared
        else:
            self.add_now(request)

    def add_prepared(self) -> None:
        for request, prepared in list(self.preparing.values()):
            if prepared.done():
                del self.preparing[request.request_id]
                self.add_now(request)

    def add_now(self, request: EngineRequest) -> None:
        try:
            self.engine.add(request)
        except Exception as error:
            self.refuse(request.request_id, error)
        else:
            self.send(ipc.Accepted(request.request_id))

    def call(self, number: int, command: str, arguments: dict[str, Any]) -> None:
        """Run an operator's command and answer, with its error if it fails."""
        try:
            self.send(ipc.Called(number, self.commands.run(command, arguments)))
        except CommandError as error:
            self.send(ipc.Called(number, None, str(error)))

    def refuse(self, request_id: str | None, error: Exception) -> None:
        """Report that a request cannot run. An error of one request ends that request alone."""
        if not isinstance(error, BadRequest):
            traceback.print_exception(error)
        if request_id is None:
            return
        if isinstance(error, BadRequest):
            self.send(ipc.Rejected(request_id, str(error), error.param, error.code, error.reason))
        else:
            why = f"The engine failed on this request: {_described(error)}"
            self.send(ipc.Rejected(request_id, why, code="internal_error", failed=True))

    def send(self, message: ipc.FromEngine) -> None:
        _send(self.socket, message)
