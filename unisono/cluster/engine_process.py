"""The engine process: one engine, one socket, one loop.

Started by :class:`unisono.cluster.engine_handle.EngineHandle`, which alone talks to it. While the engine has work the
loop reads new messages, steps, and sends the step's deltas in one message. Without work it sleeps in ``poll``. It ends
on ``Shutdown``, with its parent, or with the engine's first unexpected error.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq

from unisono.cluster import curve, heartbeat, ipc
from unisono.cluster.commands import CommandError, Commands
from unisono.cluster.heap import freeze_heap
from unisono.cluster.ledger import Ledger
from unisono.types import BadRequest, EngineRequest, FinishReason, TokenDelta, UnisonoError

IDLE_MS = 1000
"""Milliseconds without work after which the engine checks its bookkeeping, once, and captures missing graphs."""
PREPARED_MS = 2
"""Milliseconds between two looks of an idle engine at the grammars that threads compile."""
PARENT_GONE_MS = 1000
"""Milliseconds after which an unread message means that the API process is gone."""


class EngineLike(Protocol):
    """What this process needs of an engine: ``unisono.engine.engine.Engine``, or a fake in tests."""

    admitted: Callable[[list[str]], None]
    """Called with ids of requests that have got slots, before the first pass that may compute them."""

    def prepare(self, request: EngineRequest) -> Future[Any] | None: ...
    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def has_work(self) -> bool: ...
    def info(self) -> dict[str, Any]: ...
    def metrics(self) -> list[tuple[str, str, dict[str, str], float, str]]: ...
    def check_integrity(self) -> None: ...
    def capture_missing(self) -> int: ...
    def reset_prefix_cache(self) -> int: ...
    def check_ranks(self) -> None: ...
    def command(self, command: str, arguments: Mapping[str, Any]) -> Any: ...
    def shutdown(self) -> None: ...


Factory = Callable[[Any, Callable[[str, float], None]], EngineLike]
"""Makes an engine of its config; calls the second argument with a stage and its share done while it loads."""


def load_factory(name: str) -> Factory:
    """The factory that ``"module:Class"`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(address: str, factory: str, config: Any, heartbeats: str | None = None, key: bytes = b"") -> None:
    """Make an engine of ``config`` and serve it on the socket at ``address``; exits 1 after an error.

    heartbeats: address of a socket to answer heartbeats on. key: the API process's public key, where the connections
    are encrypted.
    """
    # The terminal sends Ctrl-C to both processes; the API process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if heartbeats is not None:
        heartbeat.answer(heartbeats, key)
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
            _Loop(engine, socket, ledger).run()
            engine.shutdown()
        except BaseException as error:  # whatever it is, the API process must learn of it
            if not isinstance(error, UnisonoError):
                traceback.print_exc()
            with suppress(zmq.Again):
                _send(socket, ipc.Fatal(type(error).__name__, _one_line(error)))
            sys.exit(1)


def _send(socket: zmq.Socket, message: ipc.FromEngine) -> None:
    socket.send(ipc.encode(message))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Loop:
    def __init__(self, engine: EngineLike, socket: zmq.Socket, ledger: Ledger | None = None) -> None:
        self.engine = engine
        self.socket = socket
        self.commands = Commands(engine)
        self.stopping = False
        self.preparing: dict[str, tuple[EngineRequest, Future[Any]]] = {}
        self.ledger = ledger or Ledger("")
        engine.admitted = self.admitted
        self.poller = zmq.Poller()
        self.poller.register(socket, zmq.POLLIN)
        wakes = getattr(engine, "wakes", None)  # of an engine that other engines ask for something
        if wakes is not None:
            self.poller.register(wakes.fileno(), zmq.POLLIN)
        self.wakes = wakes.fileno() if wakes is not None else None
        parent = multiprocessing.parent_process()
        self.parent = parent.sentinel if parent is not None else None
        if self.parent is not None:
            self.poller.register(self.parent, zmq.POLLIN)
        self.failing = getattr(engine, "failing", None)
        if self.failing is not None:
            self.poller.register(self.failing, zmq.POLLIN)

    def run(self) -> None:
        self.send(ipc.Ready(self.engine.info()))
        checked, quiet = True, None  # milliseconds without work after which there is something to do
        while True:
            working = self.engine.has_work()
            events = dict(self.poller.poll(0 if working else PREPARED_MS if self.preparing else quiet))
            self.add_prepared()
            if quiet is not None and not working and not events and not self.preparing:
                if not checked:  # prove that nothing has leaked
                    self.engine.check_integrity()
                    checked = True
                # One at a time, so that a request that comes meanwhile waits for one capture at most.
                quiet = 0 if self.engine.capture_missing() else None
            if self.parent in events:
                return
            if self.failing in events:
                self.engine.check_ranks()
            if self.socket in events:
                self.receive()
            if self.stopping:
                return
            if self.engine.has_work() or self.wakes in events:
                deltas = self.engine.step()
                checked, quiet = False, IDLE_MS
                if deltas:
                    self.send_deltas(deltas)

    def admitted(self, request_ids: list[str]) -> None:
        """Tell the API process of requests that are about to begin."""
        self.ledger.write(request_ids)
        self.send(ipc.Started(request_ids))

    def send_deltas(self, deltas: list[TokenDelta]) -> None:
        """Send what a step brought. A delta that no message can carry ends its request."""
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
            why = f"the engine failed on this request (result): {type(error).__name__}: {_one_line(error)}"
            return TokenDelta(delta.request_id, [], FinishReason.ABORT, error=f"{why[:500]}.")
        return delta

    def receive(self) -> None:
        """Handle every message that is waiting."""
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
                        preparing[1].cancel()  # what nobody waits for any more is not compiled any further
                    self.engine.abort(request_id)
                case ipc.Inspect():
                    inspect = True
                case ipc.Call(number, command, arguments):
                    self.call(number, command, arguments)
                case ipc.Shutdown():
                    self.stopping = True
        if inspect:  # one answer for all that wait
            samples = [ipc.MetricSample(*sample) for sample in self.engine.metrics()]
            self.send(ipc.Stats(self.engine.info(), samples))

    def add(self, request: EngineRequest) -> None:
        """Answer at once; for a request whose grammar is being compiled, answer when that is done."""
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
        """Run an operator's command. One that cannot run is answered so."""
        try:
            self.send(ipc.Called(number, self.commands.run(command, arguments)))
        except CommandError as error:
            self.send(ipc.Called(number, None, str(error)))

    def refuse(self, request_id: str | None, error: Exception) -> None:
        """Tell the client that its request cannot run. What fails for one request ends that request alone."""
        if not isinstance(error, BadRequest):
            traceback.print_exception(error)
        if request_id is None:
            return
        if isinstance(error, BadRequest):
            self.send(ipc.Rejected(request_id, str(error), error.param, error.code))
        else:
            why = f"the engine failed on this request: {type(error).__name__}: {_one_line(error)}"
            self.send(ipc.Rejected(request_id, why[:500], code="internal_error", failed=True))

    def send(self, message: ipc.FromEngine) -> None:
        _send(self.socket, message)
