"""Threads that prepare requests, so that the event loop waits for no template, tokenizer or process.

A :class:`Preparers` has a few threads, shared round-robin by clients. Work beyond its time is abandoned: its client
gets 503 with Retry-After, and another thread replaces the hung one. When too many threads hang, requests are refused
until one of them returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.cluster.heap import TRIMMER
from unisono.http.errors import unavailable
from unisono.http.limits.overload import Turnstile

T = TypeVar("T")

SECONDS = 60.0
"""Timeout of one preparation, seconds."""
MAX_LOST = 4
"""Hung threads of one pool, beside the working ones, before requests are refused."""
RETRY_AFTER = 5
TRIM_SECONDS = 0.5
"""Processor seconds of a preparation after which its freed memory is returned to the system."""


@dataclass(eq=False)
class _PreparationJob:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    thread: threading.Thread | None = None  # the thread that runs it


class Preparers:
    """A pool of ``threads`` threads. waiting: most queued jobs. seconds: timeout of a job."""

    def __init__(self, name: str, threads: int, waiting: int, seconds: float = SECONDS) -> None:
        self._name, self._threads, self._waiting, self._seconds = name, threads, waiting, seconds
        self._jobs: queue.SimpleQueue[_PreparationJob] = queue.SimpleQueue()
        self._turns = Turnstile(threads)
        self._alive = 0
        self._lost: set[threading.Thread] = set()

    async def run(self, label: str, work: Callable[..., T], *args: Any) -> T:
        """The result of ``work``, run in a thread in the turn of the client with this label.

        Raises the errors of ``work``, and ApiError (503) on a timeout or with too many waiting. A cancelled caller does
        not wait for the end of the work.
        """
        if self._turns.waiting >= self._waiting:
            message = f"{self._turns.waiting} requests wait to be prepared ({self._name}). Send it again later."
            raise unavailable(message, "preparation_busy", RETRY_AFTER)
        await self._turns.wait(label)
        try:
            return await self._run(work, *args)
        finally:
            self._turns.leave()

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        self._lost = {thread for thread in self._lost if thread.is_alive()}
        if not self._start_threads():
            message = f"{len(self._lost)} requests have been prepared for more than {self._seconds:g} s ({self._name})."
            raise unavailable(f"{message} Send it again later.", "preparation_stuck", RETRY_AFTER)
        loop = asyncio.get_running_loop()
        job = _PreparationJob(lambda: work(*args), loop, loop.create_future())
        self._jobs.put(job)
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await job.done
        except TimeoutError:
            if not limit.expired():
                raise
            if job.thread is not None:
                self._lost.add(job.thread)
                self._alive -= 1
            message = f"The request was not prepared within {self._seconds:g} s ({self._name}). Send it again later."
            raise unavailable(message, "preparation_timeout", RETRY_AFTER) from None

    def _start_threads(self) -> bool:
        while self._alive < self._threads and len(self._lost) < MAX_LOST:
            self._alive += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return self._alive > 0

    def _work(self) -> None:
        """Run jobs until one was abandoned."""
        own = threading.current_thread()
        while own not in self._lost:
            job = self._jobs.get()
            if job.done.done():
                continue
            job.thread = own
            result, error = None, None
            started = time.thread_time()
            try:
                result = job.work()
            except BaseException as caught:
                error = caught
            if time.thread_time() - started > TRIM_SECONDS:
                TRIMMER.request()
            job.thread = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                job.loop.call_soon_threadsafe(_settle, job.done, result, error)
            del job, result, error


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
