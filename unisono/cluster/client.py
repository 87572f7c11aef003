"""Client of one engine: sends requests, delivers deltas, restarts the engine after its death.

Runs in one event loop; ``http`` alone uses it. :mod:`unisono.cluster.engine_handle` has the process itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from unisono.cluster import ipc
from unisono.cluster.commands import CommandError
from unisono.cluster.engine_handle import EngineHandle, Handle, Launcher, Progress
from unisono.cluster.engines import ANYWHERE, Observer, Placement
from unisono.cluster.restarts import BACKOFF, Restarts
from unisono.cluster.token_stream import TokenStream
from unisono.types import BadRequest, EngineDead, EngineRequest, FinishReason, TokenDelta, UnisonoError

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT = 30.0
"""Default seconds without a heartbeat after which an engine process counts as dead."""


class EngineClient:
    """An engine in a process of its own.

    factory: ``"module:Class"`` called with ``config`` in that process. progress: called with a stage and its completed
    fraction, 0 … 1, while it loads. restarts: limits restarts after a death; None: no restart. heartbeat_timeout:
    seconds without a heartbeat after which it counts as dead; 0: never. number: the engine's, among several. launcher:
    starts the engine, by default as a process of this machine. observer: notified of its requests. name: in the log.

    ``stepped`` is called with the number of tokens of each step that brought some, ``restarted`` with ``Engine.info()``
    of a restarted engine, both with ``number``; ``amended`` derives its config from the first one's. ``start_seconds``:
    duration of the last start. ``infos``: the last known ``Engine.info()``. ``death``: the reason why the engine is
    dead, or None; ``restarting``: True if it will be back.
    """

    def __init__(
        self,
        factory: str,
        config: Any,
        progress: Progress = lambda stage, share: None,
        restarts: Restarts | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        number: int = 0,
        launcher: Launcher | None = None,
        observer: Observer | None = None,
        name: str = "The engine",
    ) -> None:
        self._factory = factory
        self._config = config
        self._progress = progress
        self._restarts, self._heartbeat_timeout = restarts, heartbeat_timeout
        self._number, self._name = number, name
        self._launcher, self._observer = launcher or EngineHandle, observer or Observer()
        self._streams: dict[str, TokenStream] = {}
        self._inspections: list[asyncio.Future[ipc.Stats]] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._closing = False
        self._restart: asyncio.Task[None] | None = None
        self._restarted = self._retried = 0
        self._samples: list[ipc.MetricSample] = []
        self.stepped: Callable[[int, int], None] = lambda tokens, number: None
        self.restarted: Callable[[dict[str, Any], int], None] = lambda info, number: None
        self.amended: Callable[[Any], Any] = lambda config: config
        self.infos: Sequence[dict[str, Any]] = ()
        self.start_seconds = 1.0
        self.death: str | None = None

    def start(self) -> None:
        """Start the process; :meth:`ready` waits for it."""
        self._begun = time.monotonic()
        self._handle = self._new_handle(self._progress)
        self._handle.start()

    async def ready(self) -> dict[str, Any]:
        """Return ``Engine.info()`` once the engine is loaded. Raises the error that kept it from loading."""
        try:
            info = await asyncio.shield(self._handle.ready)
        except UnisonoError as error:
            self.death = str(error)
            raise
        self._handle.hide()
        self.start_seconds = time.monotonic() - self._begun
        self.infos = (info,)
        return info

    @property
    def restarting(self) -> bool:
        """True if the engine has died and is being restarted."""
        return self._restart is not None

    @property
    def restart_count(self) -> int:
        """Number of restarts."""
        return self._restarted

    @property
    def where(self) -> str:
        """Location of the engine, in words."""
        return self._handle.where

    @property
    def samples(self) -> list[ipc.MetricSample]:
        """The metrics of the last :meth:`inspect`, and this client's own."""
        own = (
            ("engine_up", "gauge", float(self.death is None), "1 while the engine serves, 0 while it is dead."),
            ("engine_restarts", "counter", float(self._restarted), "Starts of the engine process after its death."),
            ("request_retries", "counter", float(self._retried), "Requests that ran again after an engine restart."),
        )
        return [*self._samples, *(ipc.MetricSample(name, kind, {}, value, text) for name, kind, value, text in own)]

    async def submit(self, request: EngineRequest, placement: Placement = ANYWHERE) -> TokenStream:
        """Send ``request`` to the engine. Raises BadRequest if it refuses, EngineDead if it is dead for good.

        placement: ignored, since there is one engine.
        """
        if self.death is not None and not self.restarting:
            raise EngineDead(self.death)
        if request.request_id in self._streams:
            raise BadRequest(f"request_id={request.request_id!r} is running already; give another.", "request_id")
        stream = TokenStream(request, self._abort, self._number)
        message = _encoded(request)
        self._streams[request.request_id] = stream
        if self.death is None:
            self._handle.send(message)
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def adopt(self, stream: TokenStream) -> None:
        """Run a request that was waiting for another engine, which died."""
        self._streams[stream.request.request_id] = stream
        stream.moved(self._abort, self._number)
        self._retried += 1
        self._handle.send(_encoded(stream.request))

    def replicas(self) -> list[dict[str, Any]]:
        """Return the state of each replica; empty for a single engine."""
        return []

    async def inspect(self, limit: float) -> ipc.Stats:
        """Return fresh info and metrics. Raises TimeoutError after ``limit`` seconds, EngineDead if the engine died."""
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
        self._send(ipc.OperatorCall(number, command, arguments))
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
        stream.push(TokenDelta(request_id, [], FinishReason.ABORT))

    def fail_all(self, error: UnisonoError) -> None:
        """End every request with ``error``."""
        for request_id, stream in list(self._streams.items()):
            self._abort(request_id)
            stream.fail(error)

    async def shutdown(self) -> None:
        """End the process, by force if it does not end by itself, and remove the socket."""
        if self._closing:
            return
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart
        await self._handle.stop(gently=self.death is None and self._handle.ready.done())

    def kill(self) -> None:
        """End the process at once and leave nothing on disk. For a second Ctrl-C."""
        self._handle.kill()

    def _new_handle(self, progress: Progress) -> Handle:
        patience = self._heartbeat_timeout
        return self._launcher(self._factory, self.amended(self._config), patience, self._heard, self._ended, progress)

    def _send(self, message: ipc.ToEngine) -> None:
        self._handle.send(ipc.encode(message))

    def _abort(self, request_id: str) -> None:
        if self._forget(request_id) is not None and self.death is None and not self._closing:
            self._send(ipc.Abort(request_id))

    def _forget(self, request_id: str, ended: bool = False) -> TokenStream | None:
        """Remove a request that the engine has finished; return its stream, or None. ended: it was not aborted."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self._observer.left(stream, ended)
        return stream

    def _heard(self, message: ipc.FromEngine) -> None:
        match message:
            case ipc.Started(request_ids):
                self._have_started(request_ids)
            case ipc.Deltas(deltas):
                self.stepped(sum(self._tokens(delta) for delta in deltas), self._number)
                for delta in deltas:
                    self._deliver(delta)
            case ipc.Accepted(request_id):
                if (stream := self._streams.get(request_id)) is not None and not stream.accepted.done():
                    stream.accepted.set_result(None)
            case ipc.Rejected(request_id, text, param, code, reason, failed):
                if (stream := self._forget(request_id)) is not None:
                    stream.fail(UnisonoError(text) if failed else BadRequest(text, param, code, reason))
            case ipc.Stats():
                self._samples, self.infos = message.samples, (message.info,)
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

    def _have_started(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (stream := self._streams.get(request_id)) is not None:
                stream.started = True

    def _tokens(self, delta: TokenDelta) -> int:
        """Return the tokens of a delta: its own and, for a request's first, those of the prompt."""
        prompt = 0
        if (stream := self._streams.get(delta.request_id)) is not None and not stream.begun:
            stream.begun = True
            prompt = stream.prompt_tokens - delta.cached_tokens
        return len(delta.token_ids) + prompt

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:  # aborted before the engine had received it
            return
        self._observer.brought(stream, delta)
        stream.push(delta)
        if delta.finish is not FinishReason.RUNNING:
            self._forget(delta.request_id, ended=True)

    def _ended(self, error: UnisonoError) -> None:
        """Handle the engine's death: end requests with ``error`` unless they can run again on the next one."""
        if self._closing or self.restarting:
            return
        self._samples = [one for one in self._samples if one.kind == "counter"]  # it holds nothing any more
        self._have_started(self._handle.started())
        restart = self._may_restart()
        if restart:
            self.death = str(error)
        else:
            self._give_up(error)
        again = "; a request that was running is not run again by itself: send it again" if restart else ""
        dead = EngineDead(f"{self.death}{again}")
        self._observer.died()
        ending, moved = self._part(restart)
        for stream in ending:
            stream.fail(dead)
        for answer in (*self._inspections, *self._calls.values()):
            if not answer.done():
                answer.set_exception(dead)
        self._inspections.clear()
        if restart:
            logger.error(
                "%s is dead: %s. It is started again; %d requests ended, %d will run again.%s",
                self._name, error, len(ending), len(self._streams), moved and f" {moved} run again on other engines.",
            )  # fmt: skip
            self._restart = asyncio.get_running_loop().create_task(self._start_again())

    def _part(self, restart: bool) -> tuple[list[TokenStream], str]:
        """Divide a dead engine's requests: return those that end now, and the number that another engine takes over.

        Requests that had not run stay and wait for the next engine, since they did not cause the death. The number is
        text, empty for 0.
        """
        ending, moved = [], 0
        for request_id, stream in list(self._streams.items()):
            if not stream.may_retry:
                ending.append(stream)
            elif self._observer.rescue(stream):
                moved += 1
            elif restart:
                stream.retry()
                continue
            else:
                ending.append(stream)
            self._forget(request_id)
        return ending, str(moved or "")

    def _may_restart(self) -> bool:
        return self._restarts is not None and self._restarts.begin()

    def _give_up(self, error: Exception) -> None:
        """Give up: the engine is dead for good."""
        self.death = str(error)
        if self._restarts is not None:
            self.death += f"; {self._restarts.exhausted()}"
        logger.error("%s is dead: %s. It takes no request until the server is restarted.", self._name, self.death)

    async def _start_again(self) -> None:
        """Start engines until one is loaded or the limit is reached; then continue with the waiting requests."""
        begun, failed = time.monotonic(), 0
        try:
            while True:
                problem, info = await self._next_engine(BACKOFF[min(failed, len(BACKOFF) - 1)])
                if problem is None:
                    break
                failed += 1
                self.death = str(problem)
                if not self._may_restart():
                    self._give_up(problem)
                    break
                logger.error("%s could not be started again: %s. Another try follows.", self._name, problem)
        finally:
            self._restart = None
        if problem is not None:
            for stream in list(self._streams.values()):
                self._forget(stream.request.request_id)
                stream.fail(EngineDead(str(self.death)))
            return
        self.death, self.start_seconds, self.infos = None, time.monotonic() - begun, (info,)
        again = list(self._streams.values())
        retried = sum(stream.retried for stream in again)
        self._retried += retried
        logger.warning("%s is back after %.1f s; %d requests run again.", self._name, self.start_seconds, retried)
        self.restarted(info, self._number)
        for stream in again:
            self._handle.send(_encoded(stream.request))

    async def _next_engine(self, delay: float) -> tuple[Exception | None, dict[str, Any]]:
        """End the rest of the engine process and start another; return its error, or None and its info."""
        await self._handle.stop(gently=False)
        await asyncio.sleep(delay)
        self._restarted += 1
        self._handle = self._new_handle(lambda stage, share: None)
        try:
            self._handle.start()
            info = await asyncio.shield(self._handle.ready)
        except (UnisonoError, OSError, zmq.ZMQError) as error:
            return error, {}
        self._handle.hide()
        if self._handle.over:
            return EngineDead("it died as soon as it was loaded"), {}
        return None, info


def _encoded(request: EngineRequest) -> bytes:
    """Encode the message that adds a request. Raises BadRequest for values that cannot be encoded and passed all
    checks.
    """
    try:
        return ipc.encode(ipc.Add(request))
    except (ValueError, OverflowError, TypeError) as error:
        raise BadRequest(f"the request cannot be sent to the engine: {error}.") from None
