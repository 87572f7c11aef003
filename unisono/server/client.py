"""The API process's side of the engine: starts its process, sends requests, delivers deltas, detects its death.

Owns the engine process and the socket to it. Runs in one event loop; ``server`` alone uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from unisono import types
from unisono.server import engine_process, ipc
from unisono.server.commands import CommandError
from unisono.types import BadRequest, ConfigError, EngineDead, EngineRequest, FinishReason, TokenDelta, UnisonoError

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

MAX_SOCKET_PATH = 100
"""Bytes of a Unix socket's path; the kernels' limits are 104 (macOS) and 108 (Linux)."""
LAST_WORDS = 0.2
"""Seconds to wait for the last message of an engine process that has exited."""
SHUTDOWN_LIMIT = 10.0
"""Seconds that an engine gets to free everything before it is killed."""


class TokenStream:
    """Deltas of one request. ``take`` waits for the next; deltas that pile up come as one."""

    def __init__(self, client: EngineClient, request_id: str, prompt_tokens: int) -> None:
        self._client = client
        self._request_id = request_id
        self.prompt_tokens, self.begun = prompt_tokens, False
        self._pending: TokenDelta | None = None
        self._error: UnisonoError | None = None
        self._news = asyncio.Event()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(self) -> TokenDelta:
        """The tokens since the last call. Raises EngineDead if the engine died."""
        await self._news.wait()
        self._news.clear()
        delta, self._pending = self._pending, None
        if delta is not None:
            if self._error is not None:
                self._news.set()
            return delta
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Abort the request unless it has finished. May be called at any time, more than once."""
        self._client._abort(self._request_id)

    def _push(self, delta: TokenDelta) -> None:
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.absorb(delta)
        self._news.set()

    def _fail(self, error: UnisonoError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # a caller that is gone leaves it unread
        self._error = error
        self._news.set()


class EngineClient:
    """An engine in a process of its own.

    factory: ``"module:Class"`` called with ``config`` in that process. progress: called with a stage and its share
    done, 0 … 1, while it loads. ``stepped`` is called with the tokens of each step that brought some. ``death`` is why
    the engine is dead, or None. ``samples`` are the metrics of the last :meth:`inspect`.
    """

    def __init__(self, factory: str, config: Any, progress: Progress = lambda stage, share: None) -> None:
        self._factory = factory
        self._config = config
        self._progress = progress
        self._streams: dict[str, TokenStream] = {}
        self._inspections: list[asyncio.Future[ipc.Stats]] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._closing = False
        self.stepped: Callable[[int], None] = lambda tokens: None
        self.death: str | None = None
        self.samples: list[ipc.MetricSample] = []

    def start(self) -> None:
        """Open the socket and start the process; :meth:`ready` waits for it."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._directory = tempfile.mkdtemp(prefix="unisono-")  # mode 0700: other users cannot connect
        path = Path(self._directory) / "engine"
        if len(bytes(path)) > MAX_SOCKET_PATH:
            shutil.rmtree(self._directory)
            raise ConfigError(
                f"The temporary directory gives a socket path of {len(bytes(path))} bytes; "
                f"{MAX_SOCKET_PATH} fit. Set TMPDIR to a shorter one."
            )
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{path}")
        spawn = multiprocessing.get_context("spawn")
        arguments = (f"ipc://{path}", self._factory, self._config)
        self._process = spawn.Process(target=engine_process.main, args=arguments, name="unisono-engine", daemon=True)
        with _interrupts_ignored():  # inherited: Ctrl-C during the child's imports prints no traceback
            self._process.start()
        loop.add_reader(self._process.sentinel, self._exited)
        self._reader = loop.create_task(self._read())

    async def ready(self) -> dict[str, Any]:
        """``Engine.info()`` once the engine is loaded. Raises the error that kept it from loading."""
        info = await asyncio.shield(self._ready)
        shutil.rmtree(self._directory, ignore_errors=True)  # connected: the name is not needed any more
        return info

    async def submit(self, request: EngineRequest) -> TokenStream:
        """Hand ``request`` to the engine. Raises BadRequest if it refuses, EngineDead if it is dead."""
        if self.death is not None:
            raise EngineDead(self.death)
        if request.request_id in self._streams:
            raise BadRequest(f"request_id={request.request_id!r} is running already; give another.", "request_id")
        stream = TokenStream(self, request.request_id, len(request.prompt_token_ids))
        message = _encoded(request)
        self._streams[request.request_id] = stream
        self._socket.send(message)  # no high-water mark: it is queued at once, so no await
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    async def inspect(self, limit: float) -> ipc.Stats:
        """Fresh info and metrics. Raises TimeoutError after ``limit`` seconds, EngineDead if the engine died."""
        if self.death is not None:
            raise EngineDead(self.death)
        answer: asyncio.Future[ipc.Stats] = asyncio.get_running_loop().create_future()
        self._inspections.append(answer)
        self._send(ipc.Inspect())
        return await asyncio.wait_for(answer, limit)

    async def call(self, command: str, limit: float, **arguments: Any) -> Any:
        """Run a command of ``commands.py`` in the engine process.

        Raises CommandError if it cannot run, TimeoutError after ``limit`` seconds, EngineDead if the engine died.
        """
        if self.death is not None:
            raise EngineDead(self.death)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send(ipc.Call(number, command, arguments))
        try:
            return await asyncio.wait_for(answer, limit)
        finally:
            self._calls.pop(number, None)

    def cancel(self, request_id: str) -> None:
        """End a request early, with the finish reason ``abort``; unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._abort(request_id)
        if not stream.accepted.done():
            stream.accepted.set_result(None)
        stream._push(TokenDelta(request_id, [], FinishReason.ABORT))

    def fail_all(self, error: UnisonoError) -> None:
        """End every request with ``error``."""
        for request_id, stream in list(self._streams.items()):
            self._abort(request_id)
            stream._fail(error)

    async def shutdown(self) -> None:
        """End the process, by force if it does not end by itself, and remove the socket."""
        if self._closing:
            return
        self._closing = True
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if self._ready.done() and self.death is None:
            self._send(ipc.Shutdown())
            await asyncio.to_thread(self._process.join, SHUTDOWN_LIMIT)
        self.kill()
        self._process.join()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close(linger=0)
        self._context.term()

    def kill(self) -> None:
        """End the process at once and leave nothing on disk. For a second Ctrl-C."""
        self._process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ipc.ToEngine) -> None:
        self._socket.send(ipc.encode(message))  # no high-water mark: it is queued at once, so no await

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None and self.death is None and not self._closing:
            self._send(ipc.Abort(request_id))

    async def _read(self) -> None:
        while True:
            self._handle(ipc.decode_from_engine(await self._socket.recv()))

    def _handle(self, message: ipc.FromEngine) -> None:
        match message:
            case ipc.Deltas(deltas):
                self.stepped(sum(self._tokens(delta) for delta in deltas))
                for delta in deltas:
                    self._deliver(delta)
            case ipc.Accepted(request_id):
                if (stream := self._streams.get(request_id)) is not None and not stream.accepted.done():
                    stream.accepted.set_result(None)
            case ipc.Rejected(request_id, text, param, code, failed):
                if (stream := self._streams.pop(request_id, None)) is not None:
                    stream._fail(UnisonoError(text) if failed else BadRequest(text, param, code))
            case ipc.Stats():
                self.samples = message.samples
                for answer in self._inspections:
                    if not answer.done():
                        answer.set_result(message)
                self._inspections.clear()
            case ipc.Called(number, value, problem):
                if (call := self._calls.get(number)) is not None and not call.done():
                    if problem is None:
                        call.set_result(value)
                    else:
                        call.set_exception(CommandError(problem))
            case ipc.Loading(stage, share):
                self._progress(stage, share)
            case ipc.Ready(info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case ipc.Fatal(error, text):
                self._die(_rebuild(error, text))

    def _tokens(self, delta: TokenDelta) -> int:
        """The tokens that a delta stands for: its own and, with a request's first, those of the prompt."""
        prompt = 0
        if (stream := self._streams.get(delta.request_id)) is not None and not stream.begun:
            stream.begun = True
            prompt = stream.prompt_tokens - delta.cached_tokens
        return len(delta.token_ids) + prompt

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:  # aborted; the engine had not heard of it yet
            return
        if delta.finish is not FinishReason.RUNNING:
            del self._streams[delta.request_id]
        stream._push(delta)

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        loop.call_later(LAST_WORDS, self._die, EngineDead(f"the engine process {how}"))

    def _die(self, error: UnisonoError) -> None:
        if self.death is not None or self._closing:
            return
        self.death = str(error)
        if self._ready.done():
            logger.error("The engine is dead: %s. Every request is refused until the server is restarted.", error)
        else:
            self._ready.set_exception(error)
            self._ready.exception()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream._fail(EngineDead(self.death))
        for answer in (*self._inspections, *self._calls.values()):
            if not answer.done():
                answer.set_exception(EngineDead(self.death))
        self._inspections.clear()


def _encoded(request: EngineRequest) -> bytes:
    """The message that adds a request. Raises BadRequest for what no message can carry: no check has found it."""
    try:
        return ipc.encode(ipc.Add(request))
    except (ValueError, OverflowError, TypeError) as error:
        raise BadRequest(f"the request cannot be sent to the engine: {error}.") from None


def _rebuild(error: str, message: str) -> UnisonoError:
    """An engine's error as what it was there if ``types`` knows it, as EngineDead otherwise."""
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
