"""One engine, many callers: threads and event loops share one loop of :meth:`Engine.step`.

There is no thread that owns the engine. A caller that waits for tokens takes the lead, if nobody has it: it steps the
engine, puts every delta into its owner's inbox, and leaves the lead when its own tokens are there. Others who wait
are woken and one of them leads on. So a caller that is alone steps the engine in its own thread, as fast as without
this module, and nothing runs while nobody waits. What others want of the engine meanwhile (add, abort) is a job: the
leader does it between two steps.

``llm`` and ``async_llm`` use this; the server's engine process has a loop of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from unisono.engine.engine import Engine
from unisono.types import EngineDead, EngineRequest, FinishReason, TokenDelta

T = TypeVar("T")

NO_MODEL = "This model was shut down and its memory freed (shutdown(), or the end of its `with`); make a new one."


class Bell:
    """What one caller waits for, and any thread rings. Ctrl-C may end a wait.

    A ``threading.Event`` is none: where Ctrl-C comes while it wakes up, it lets go of the lock of a thread that sets it
    at that moment, and there ``set`` raises RuntimeError (CPython 3.11).
    """

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """End the present or the next :meth:`wait`."""
        if self._rung.empty():
            self._rung.put(None)

    def clear(self) -> None:
        """Forget that it rang."""
        with contextlib.suppress(Empty):
            while True:
                self._rung.get_nowait()

    def wait(self) -> None:
        """Return once it has rung since :meth:`clear` or the last wait."""
        self._rung.get()


class Inbox:
    """The deltas of one caller's requests, in order, each with the time when its step ended (``time.monotonic``).

    open: ids of the requests that have not ended. error: why no more deltas come. notify: called, in any thread, when
    there is news.
    """

    def __init__(self, requests: Sequence[EngineRequest], notify: Callable[[], object] | None = None) -> None:
        self.bell = Bell()
        self.deltas: deque[tuple[TokenDelta, float]] = deque()
        self.open = {request.request_id for request in requests}
        self.error: BaseException | None = None
        self.notify = notify or self.bell.ring

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would tell something: deltas, an error, or that all requests have ended."""
        return bool(self.deltas) or self.error is not None or not self.open

    def take(self) -> list[tuple[TokenDelta, float]]:
        """What has come since the last call, without waiting. Raises the error once everything before it is taken."""
        if not self.deltas and self.error is not None:
            raise self.error
        return [self.deltas.popleft() for _ in range(len(self.deltas))]


class _Job:
    """A call that the leader makes between two steps."""

    def __init__(self, work: Callable[[Engine], Any]) -> None:
        self._work = work
        self.done = False
        self.bell = Bell()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, engine: Engine | None, error: BaseException | None) -> None:
        try:
            if engine is None:
                raise error or EngineDead(NO_MODEL)
            self._result = self._work(engine)
        except Exception as failure:
            self._error = failure
        self.done = True
        self.bell.ring()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class EngineLoop:
    """Shares ``engine`` among callers. Every method may be called in any thread.

    The first error of a step ends the loop: every caller, now and later, gets an EngineDead that names it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._device = engine.config.device
        self._home = threading.get_ident()
        self._lead = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: set[Bell] = set()
        self._error: BaseException | None = None

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineDead after :meth:`shutdown`. Only for callers that know that no other one runs."""
        if self._engine is None:
            raise EngineDead(NO_MODEL)
        return self._engine

    @property
    def alive(self) -> bool:
        """False after :meth:`shutdown`."""
        return self._engine is not None

    @property
    def error(self) -> BaseException | None:
        """What ended the loop; None while it lives."""
        return self._error

    @property
    def busy(self) -> bool:
        """Whether some caller's request has not ended."""
        return bool(self._inboxes)

    def call(self, work: Callable[[Engine], T]) -> T:
        """``work(engine)``, while no step runs. Raises what it raises, and EngineDead."""
        job = _Job(work)
        self._jobs.append(job)
        self.wait(lambda: job.done, job.bell)
        return job.result()

    def submit(self, requests: Sequence[EngineRequest], notify: Callable[[], object] | None = None) -> Inbox:
        """Add requests to the engine, all or none. Raises BadRequest for one that it refuses.

        A grammar is compiled first, in the calling thread's time: nobody else waits for it.
        """
        self._prepare(requests)
        inbox = Inbox(requests, notify)

        def add(engine: Engine) -> None:
            if self._error is not None:
                raise self._error
            done: list[str] = []
            try:
                for request in requests:
                    engine.add(request)
                    done.append(request.request_id)
            except BaseException:
                for request_id in done:
                    engine.abort(request_id)
                raise
            self._inboxes.update(dict.fromkeys(done, inbox))

        try:
            self.call(add)
        except Exception:
            raise
        except BaseException:  # Ctrl-C while another caller leads, who may add the requests yet
            self.abort(*inbox.open)
            raise
        return inbox

    def check(self, request: EngineRequest) -> None:
        """Raises BadRequest for a request that the engine cannot run. One with an adapter is checked between two steps,
        for other ranks may have to read the adapter again."""
        if request.adapter is None:
            return self.engine.check(request)
        self._prepare([request])
        return self.call(lambda engine: engine.check(request))

    def _prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Wait for what requests need before the engine can take them."""
        for request in requests:
            if (prepared := self.engine.prepare(request)) is not None:
                with contextlib.suppress(Exception):  # adding the request raises it again, in words for the caller
                    prepared.result()

    def read(self, inbox: Inbox) -> list[tuple[TokenDelta, float]]:
        """Wait for news of ``inbox``, stepping the engine if nobody else does. Empty once all its requests ended."""
        if not inbox.has_news:
            self.wait(lambda: inbox.has_news, inbox.bell)
        return inbox.take()

    def abort(self, *request_ids: str) -> None:
        """Forget requests; unknown ids are ignored. It does not wait, so a generator's end may call it anywhere."""
        if self._engine is None or not request_ids:
            return

        def work(engine: Engine) -> None:
            for request_id in request_ids:
                engine.abort(request_id)
                if (inbox := self._inboxes.pop(request_id, None)) is not None:
                    inbox.open.discard(request_id)
                    inbox.notify()

        self._jobs.append(_Job(work))
        self._do_jobs()

    def wait(self, ready: Callable[[], bool], bell: Bell) -> None:
        """Return once ``ready()``. ``bell`` is this caller's own; it rings when ``ready`` may have changed."""
        self._waiting.add(bell)
        try:
            while True:
                bell.clear()
                if ready():
                    return
                if not self._led(ready):
                    bell.wait()
        finally:
            self._waiting.discard(bell)

    def shutdown(self) -> None:
        """Free the device. Requests of other callers end with an error."""

        def work(engine: Engine) -> None:
            self._engine = None
            self._fail(EngineDead(NO_MODEL))
            engine.shutdown()

        if self._engine is not None:
            self.call(work)

    # ---- the leader ---------------------------------------------------------------------------

    def _led(self, ready: Callable[[], bool]) -> bool:
        """Lead until ``ready()`` or Ctrl-C; False if somebody else has the lead."""
        with _interrupts_deferred() as interrupted:
            if not self._lead.acquire(blocking=False):
                return False
            try:
                with self._on_device():
                    self._drain()
                    while not (ready() or interrupted):
                        self._turn()
            finally:
                self._hand_over()
        return True

    def _turn(self) -> None:
        """One step, and its deltas to their owners."""
        engine = self._engine
        if engine is None:
            return self._fail(EngineDead(NO_MODEL))
        idle = not engine.has_work() and not self._jobs
        try:
            deltas = engine.step()
        except BaseException as error:
            dead = EngineDead(f"the engine failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._fail(dead)
            if not isinstance(error, Exception):
                raise
            return None
        if idle and self._inboxes and not deltas:
            return self._fail(EngineDead("the engine has no work, and requests are open: it has lost them."))
        now = time.monotonic()
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                continue  # aborted, or added by somebody who reads the engine directly
            inbox.deltas.append((delta, now))
            if delta.finish is not FinishReason.RUNNING:
                del self._inboxes[delta.request_id]
                inbox.open.discard(delta.request_id)
            inbox.notify()
        if self._jobs:
            self._drain()
        return None

    def _drain(self) -> None:
        """Do the jobs that wait."""
        while self._jobs:
            self._jobs.popleft().run(self._engine, self._error)

    def _do_jobs(self) -> None:
        """Do the jobs that wait, unless a leader is there to do it."""
        while self._jobs:
            with _interrupts_deferred():
                if not self._lead.acquire(blocking=False):
                    return
                try:
                    with self._on_device():
                        self._drain()
                finally:
                    self._hand_over()

    def _hand_over(self) -> None:
        """Leave the lead. Callers that wait try to take it; a job that came too late for the leader is done now."""
        self._lead.release()
        for bell in tuple(self._waiting):
            bell.ring()
        if self._jobs and not self._waiting:
            self._do_jobs()

    def _fail(self, error: EngineDead) -> None:
        """End every request with ``error``, and refuse new ones."""
        if self._error is None:
            self._error = error
        inboxes, self._inboxes = set(self._inboxes.values()), {}
        for inbox in inboxes:
            inbox.error = error
            inbox.notify()

    def _on_device(self) -> AbstractContextManager[object]:
        """Every thread has a current device of its own; the thread that made the engine has the right one."""
        if self._device.type != "cuda" or threading.get_ident() == self._home:
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[list[Any]]:
    """Keep Ctrl-C for the end of the block, so that it never cuts a step off. The list has it as soon as it comes.

    A second Ctrl-C is not kept. Only the main thread gets interrupts; in others this does nothing.
    """
    pressed: list[Any] = []
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield pressed
        return

    def keep(number: int, frame: Any) -> None:
        pressed.append((number, frame))
        if len(pressed) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(pressed) == 1:
            handler(*pressed[0])
