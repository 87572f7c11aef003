"""The loop over :meth:`Engine.step`, shared by every caller of an engine in this process.

One thread at a time owns the engine: it steps, hands out the deltas, and runs the calls that other threads have queued
(add, abort, metrics) between two steps. Who owns it depends on the entrance:

* ``LLM``: the caller that waits for tokens. It owns the engine until its own tokens are there; then another waiting
  caller takes over. A lone caller therefore steps in its own thread, and nothing runs while nobody waits.
* ``AsyncLLM``: an :class:`EngineThread`, while there are requests. An event loop must not block.
* The engine process (``cluster/engine_process.py``): its main thread, for the life of the process.

A lone ``LLM`` caller keeps stepping in its own thread for three reasons. A thread switch per token is not free (tiny on
a CPU: step time 1.03 times the caller's own, quartiles 0.91 to 1.13 on a busy machine; CPU time 1.00). Streams that are
read in turn would run ahead of their consumers. A process that forks between two calls must not have a thread that
steps.

This module does not import torch, because the engine process imports it before its engine.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from unisono.types import EngineDead, EngineRequest, FinishReason, TokenDelta

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
E = TypeVar("E", bound="EngineLike")

NO_MODEL = "This model was shut down and its memory freed (shutdown(), or the end of its `with`); make a new one."


class EngineLike(Protocol):
    """Engine interface of the loop and the engine process: ``unisono.engine.engine.Engine``, or a fake in tests."""

    admitted: Callable[[list[str]], None]
    """Called with the ids of requests that got slots, before the first pass that may compute them."""

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
    def update_weights(self, directory: str, draft_directory: str, version: str | None) -> dict[str, Any]: ...
    def check_ranks(self) -> None: ...
    def command(self, command: str, arguments: Mapping[str, Any]) -> Any: ...
    def shutdown(self) -> None: ...


class Wakeup:
    """A thread-safe event for one waiting caller. Ctrl-C may end a wait.

    ``threading.Event`` cannot be used: where Ctrl-C arrives while its wait returns, the wait releases the lock of a
    thread that sets the event at that moment, and ``set`` raises RuntimeError there (CPython 3.11).
    """

    def __init__(self) -> None:
        self._signals: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """End the present or the next :meth:`wait`."""
        if self._signals.empty():
            self._signals.put(None)

    def clear(self) -> None:
        """Discard earlier calls of :meth:`set`."""
        with contextlib.suppress(Empty):
            while True:
                self._signals.get_nowait()

    def wait(self) -> None:
        """Return once :meth:`set` was called since the last wait or :meth:`clear`."""
        self._signals.get()


class Inbox:
    """Deltas of one caller's requests in order, each with the ``time.monotonic()`` at the end of its step.

    open: ids of unfinished requests. error: the reason why no more deltas come. notify: called after each change, in
    the thread that owns the engine.
    """

    def __init__(self, requests: Sequence[EngineRequest], notify: Callable[[], object] | None = None) -> None:
        self.wakeup = Wakeup()
        self.deltas: deque[tuple[TokenDelta, float]] = deque()
        self.open = {request.request_id for request in requests}
        self.error: BaseException | None = None
        self.notify = notify or self.wakeup.set

    @property
    def has_output(self) -> bool:
        """True if there are deltas or an error, or if all requests have ended."""
        return bool(self.deltas) or self.error is not None or not self.open

    def take(self) -> list[tuple[TokenDelta, float]]:
        """Return the deltas since the last call, without waiting. Raises the error once all deltas are taken."""
        if not self.deltas and self.error is not None:
            raise self.error
        return [self.deltas.popleft() for _ in range(len(self.deltas))]


class _EngineCall:
    """A function call that the owner of the engine makes between two steps."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self.done = False
        self.wakeup = Wakeup()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, engine: EngineLike | None, error: BaseException | None) -> None:
        try:
            if engine is None:
                raise error or EngineDead(NO_MODEL)
            self._result = self._work(engine)
        except Exception as failure:
            self._error = failure
        self.done = True
        self.wakeup.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class EngineLoop(Generic[E]):
    """Share ``engine`` among callers. Every method may be called in any thread.

    device: the engine's; each thread that owns a CUDA engine makes it current. deliver: receives the deltas of each
    step in place of the inboxes. The first error of a step ends the loop: all callers, now and later, get an EngineDead
    that names it.
    """

    def __init__(
        self,
        engine: E,
        device: torch.device | None = None,
        deliver: Callable[[list[TokenDelta]], None] | None = None,
    ) -> None:
        self._engine: E | None = engine
        self._device = device
        self._home = threading.get_ident()
        self._owned = threading.Lock()
        self._calls: deque[_EngineCall] = deque()
        self._inboxes: dict[str, Inbox] = {}
        self._deliver = deliver or self._to_inboxes
        self._waiting: set[Wakeup] = set()
        self._error: BaseException | None = None

    @property
    def engine(self) -> E:
        """The engine, for callers that know that no other thread runs. Raises EngineDead after :meth:`shutdown`."""
        if self._engine is None:
            raise EngineDead(NO_MODEL)
        return self._engine

    @property
    def alive(self) -> bool:
        """False after :meth:`shutdown`."""
        return self._engine is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the loop; None while it lives."""
        return self._error

    @property
    def busy(self) -> bool:
        """True while a submitted request has not ended."""
        return bool(self._inboxes)

    def call(self, work: Callable[[E], T]) -> T:
        """Return ``work(engine)``, run between two steps. Raises its exceptions, and EngineDead."""
        call = _EngineCall(work)
        self._calls.append(call)
        self.wait(lambda: call.done, call.wakeup)
        result: T = call.result()
        return result

    def submit(self, requests: Sequence[EngineRequest], notify: Callable[[], object] | None = None) -> Inbox:
        """Add requests to the engine, all or none. Raises BadRequest if the engine refuses one.

        Grammars are compiled first, while the calling thread waits; other callers go on.
        """
        self._prepare(requests)
        inbox = Inbox(requests, notify)

        def add(engine: E) -> None:
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
        except BaseException:  # Ctrl-C while another thread owns the engine; it may still add the requests
            self.abort(*inbox.open)
            raise
        return inbox

    def _prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Wait until features have prepared the requests (compiled their grammars)."""
        for request in requests:
            if (prepared := self.engine.prepare(request)) is not None:
                with contextlib.suppress(Exception):  # adding the request raises it again, in words for the caller
                    prepared.result()

    def check(self, request: EngineRequest) -> None:
        """Raise BadRequest for a request that the engine cannot run.

        A request with an adapter is checked between two steps, because other ranks may have to read the adapter again.
        """
        engine: Any = self.engine
        if request.adapter is None:
            engine.check(request)
        else:
            self._prepare([request])
            self.call(lambda engine: engine.check(request))  # type: ignore[attr-defined]

    def read(self, inbox: Inbox) -> list[tuple[TokenDelta, float]]:
        """Wait for deltas of ``inbox``; step the engine if no other thread does. Empty once all its requests ended."""
        if not inbox.has_output:
            self.wait(lambda: inbox.has_output, inbox.wakeup)
        return inbox.take()

    def abort(self, *request_ids: str) -> None:
        """Forget requests; unknown ids are ignored. Never waits, so a generator's end may call it anywhere."""
        if self._engine is None or not request_ids:
            return

        def work(engine: E) -> None:
            for request_id in request_ids:
                engine.abort(request_id)
                if (inbox := self._inboxes.pop(request_id, None)) is not None:
                    inbox.open.discard(request_id)
                    inbox.notify()

        self._calls.append(_EngineCall(work))
        self._run_calls_if_free()

    def wait(self, ready: Callable[[], bool], wakeup: Wakeup) -> None:
        """Return once ``ready()``, stepping the engine if no other thread does.

        wakeup: this caller's own. It is set whenever ``ready`` may have changed.
        """
        self._waiting.add(wakeup)
        try:
            while True:
                wakeup.clear()
                if ready():
                    return
                if not self._step_until(ready):
                    wakeup.wait()
        finally:
            self._waiting.discard(wakeup)

    def own(self, ended: Callable[[], bool]) -> None:
        """Own the engine in this thread until ``ended()``, which is called before each step and may block while idle.

        Raises the error of a step.
        """
        with self._owned, self._on_device():
            while not ended():
                self._step()
                if self._error is not None:
                    raise self._error.__cause__ or self._error

    def shutdown(self) -> None:
        """Free the device. Requests of other callers end with an error."""

        def work(engine: E) -> None:
            self._engine = None
            self._fail(EngineDead(NO_MODEL))
            engine.shutdown()

        if self._engine is not None:
            self.call(work)

    # ---- the owner of the engine --------------------------------------------------------------

    def _step_until(self, ready: Callable[[], bool]) -> bool:
        """Own the engine until ``ready()`` or Ctrl-C. Return False if another thread owns it."""
        with _interrupts_deferred() as interrupted:
            if not self._owned.acquire(blocking=False):
                return False
            try:
                with self._on_device():
                    self._run_calls()
                    while not (ready() or interrupted):
                        self._step()
            finally:
                self._hand_over()
        return True

    def _step(self) -> None:
        """Run one step, deliver its deltas and run the queued calls."""
        engine = self._engine
        if engine is None:
            return self._fail(EngineDead(NO_MODEL))
        idle = bool(self._inboxes) and not engine.has_work() and not self._calls
        try:
            deltas = engine.step()
        except BaseException as error:
            dead = EngineDead(f"the engine failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._fail(dead)
            if not isinstance(error, Exception):
                raise
            return None
        if idle and not deltas:
            return self._fail(EngineDead("the engine has no work, and requests are open: it has lost them."))
        self._deliver(deltas)
        if self._calls:
            self._run_calls()
        return None

    def _to_inboxes(self, deltas: list[TokenDelta]) -> None:
        """Put each delta into the inbox of its request."""
        now = time.monotonic()
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                continue  # aborted, or added by a caller that uses the engine directly
            inbox.deltas.append((delta, now))
            if delta.finish is not FinishReason.RUNNING:
                del self._inboxes[delta.request_id]
                inbox.open.discard(delta.request_id)
            inbox.notify()

    def _run_calls(self) -> None:
        """Run the queued calls."""
        while self._calls:
            self._calls.popleft().run(self._engine, self._error)

    def _run_calls_if_free(self) -> None:
        """Run the queued calls, unless another thread owns the engine and will run them."""
        while self._calls:
            with _interrupts_deferred():
                if not self._owned.acquire(blocking=False):
                    return
                try:
                    with self._on_device():
                        self._run_calls()
                finally:
                    self._hand_over()

    def _hand_over(self) -> None:
        """Release the engine. Waiting callers try to take it; a call that was queued too late is run now."""
        self._owned.release()
        for wakeup in tuple(self._waiting):
            wakeup.set()
        if self._calls and not self._waiting:
            self._run_calls_if_free()

    def _fail(self, error: EngineDead) -> None:
        """End every request with ``error``, and refuse new ones."""
        if self._error is None:
            self._error = error
        inboxes, self._inboxes = set(self._inboxes.values()), {}
        for inbox in inboxes:
            inbox.error = error
            inbox.notify()

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the engine's CUDA device current in a thread other than the one that made the engine."""
        if self._device is None or self._device.type != "cuda" or threading.get_ident() == self._home:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.device(self._device)


class EngineThread:
    """A daemon thread that owns the engine of ``loop`` while it has requests, for callers that must not block.

    Started by the first :meth:`wake`; sleeps without requests.
    """

    def __init__(self, loop: EngineLoop[Any]) -> None:
        self._loop = loop
        self._work, self._stopping = threading.Event(), False
        self._thread: threading.Thread | None = None
        weak = weakref.ref(self)

        def at_exit() -> None:
            if (thread := weak()) is not None:
                thread.stop()

        self._at_exit = at_exit
        atexit.register(at_exit)  # a thread that steps while the interpreter ends would crash it

    def wake(self) -> None:
        """Step the engine: requests were added."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unisono-async", daemon=True)
            self._thread.start()
        self._work.set()

    def stop(self) -> None:
        """End the thread after its step."""
        atexit.unregister(self._at_exit)
        self._stopping = True
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        wakeup = Wakeup()
        while not self._stopping:
            self._work.wait()
            self._work.clear()
            self._loop.wait(lambda: self._stopping or not self._loop.busy, wakeup)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[list[Any]]:
    """Defer Ctrl-C to the end of the block, so that it never interrupts a step. The list holds it as soon as it comes.

    A second Ctrl-C is not deferred. Only the main thread gets interrupts; in others this does nothing.
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
