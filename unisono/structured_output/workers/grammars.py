"""Compilation of structured outputs in separate processes, once for equal forms.

Compiling takes milliseconds to seconds, and a client's grammar may need unbounded time or memory, or crash. So each
grammar is compiled in a process (``worker.py``) with limits. The compiled grammar stays in that process, which also
tracks its outputs.

A thread of the engine's process schedules the compilations. Those that have computed least run, the others are stopped
until there is a slot: a client with hard grammars cannot block those of others. A compilation without waiters is
killed.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.sandbox.channel import Gone
from unisono.sandbox.forks import Template
from unisono.structured_output.vocabulary import describe
from unisono.structured_output.workers.processes import CompilerProcess, wake_up_pair
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, StructuredOutputs

KEPT = 64
"""Compiled grammars in the LRU cache: an idle process each."""

SLOTS = max(2, min(4, (os.cpu_count() or 1) // 4))
"""Compilations that run at once."""

PROCESSES = 8
"""Compilations in progress, the stopped ones included: each may use MEMORY."""

TURN = 0.1
"""Scheduling interval, seconds, while there are more compilations than slots."""

SECONDS = 20.0
"""Processor time of a compilation, seconds."""

PATIENCE = 60.0
"""Wall-clock limit of a compilation, seconds, including the time it was stopped."""

AGING = 0.1
"""Seconds of computation that a second of waiting compensates: newer compilations cannot starve an old one."""

MEMORY = 1 << 30
"""Memory of a compilation, and of each lane, beyond the vocabulary, bytes."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar for this vocabulary, in its own process. eos: the ids that may end a text. words: length of a mask."""

    process: CompilerProcess
    eos: tuple[int, ...]
    words: int


@dataclass(eq=False)
class _CompileJob:
    """One grammar under compilation, and its waiters.

    spent: seconds of computation before ``since``. since: start of the current run; None while stopped.
    """

    outputs: StructuredOutputs
    begun: float
    waiting: list[Future[Compiled]] = field(default_factory=list)
    process: CompilerProcess | None = None
    spent: float = 0.0
    since: float | None = None
    result: Compiled | BadRequest | None = None

    def computed(self, now: float) -> float:
        return self.spent + (now - self.since if self.since is not None else 0.0)

    def rank(self, now: float) -> float:
        return self.computed(now) - AGING * (now - self.begun)


class Grammars:
    """The grammars of one model. ``directory`` has its tokenizer, ``eos`` are its end-of-sequence ids."""

    def __init__(self, directory: str | Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._directory, self._vocab_size, self._eos = Path(directory), vocab_size, tuple(eos)
        self._jobs: OrderedDict[StructuredOutputs, _CompileJob] = OrderedDict()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._template: Template | None = None
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = wake_up_pair()
        self._selector.register(self._ear, selectors.EVENT_READ, None)

    def prepare(self, outputs: StructuredOutputs) -> Future[Compiled]:
        """Start to compile, once.

        The future's exception is a BadRequest.

        Cancel the future when its request has gone: a compilation without waiters ends.
        """
        future: Future[Compiled] = Future()
        with self._lock:
            job = self._jobs.pop(outputs, None)
            if job is not None and isinstance(job.result, Compiled) and not job.result.process.alive():
                job = None
            if job is None:
                job = _CompileJob(outputs, time.monotonic())
            self._jobs[outputs] = job
            self._forget_the_oldest()
            if job.result is None:
                job.waiting.append(future)
                future.add_done_callback(lambda done: self._ring() if done.cancelled() else None)
        if job.result is not None:
            _deliver(future, job.result)
        else:
            self._look_after()
        return future

    def get(self, outputs: StructuredOutputs) -> Compiled:
        """The compiled grammar; waits for it. Raises BadRequest."""
        future = self.prepare(outputs)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End every compilation, and every process."""
        self._closing = True
        self._ring()
        if self._thread is not None:
            self._thread.join()
        for job in self._jobs.values():
            if isinstance(job.result, Compiled):
                job.result.process.close()
        self._jobs.clear()
        for end in (self._bell, self._ear):
            end.close()

    def _forget_the_oldest(self) -> None:
        finished = [outputs for outputs, job in self._jobs.items() if job.result is not None]
        for outputs in finished[: max(0, len(finished) - KEPT)]:
            del self._jobs[outputs]

    def _ring(self) -> None:
        with suppress(OSError):
            self._bell.send(b"!")

    # ---- the thread that looks after compilations ------------------------------------------------

    def _look_after(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        self._ring()

    def _run(self) -> None:
        try:
            while not self._closing:
                crowded = self._arrange()
                for key, _ in self._selector.select(TURN if crowded else None):
                    if key.data is None:
                        with suppress(BlockingIOError):
                            self._ear.recv(4096)
                    else:
                        self._hear(key.data)
        finally:
            for job in self._open_jobs():
                self._stop(job)
                self._finish(job, BadRequest("structured_outputs: the engine ends.", "structured_outputs"), keep=False)
            if self._template is not None:
                self._template.close()
            self._selector.close()

    def _open_jobs(self) -> list[_CompileJob]:
        with self._lock:
            return [job for job in self._jobs.values() if job.result is None]

    def _arrange(self) -> bool:
        """Run the compilations that have computed least. Returns True if there are stopped ones to schedule soon."""
        now = time.monotonic()
        for job in self._open_jobs():
            self._drop(job, now)
        jobs = sorted(self._open_jobs(), key=lambda job: job.rank(now))
        for job in jobs[SLOTS:]:
            if job.process is not None and job.since is not None:
                job.process.pause()
                job.spent, job.since = job.computed(now), None
        for job in jobs[:SLOTS]:
            if job.process is None:
                self._begin(job, jobs)
            elif job.since is None:
                job.process.go_on()
            job.since = job.since or time.monotonic()
        return bool(jobs)

    def _drop(self, job: _CompileJob, now: float) -> None:
        """End a compilation without waiters, or beyond its time."""
        with self._lock:
            job.waiting = [future for future in job.waiting if not future.cancelled()]
            if not job.waiting:
                self._stop(job)
                if self._jobs.get(job.outputs) is job:
                    del self._jobs[job.outputs]
                return
        if now - job.begun > PATIENCE:
            self._stop(job)
            why = f"it was not compiled within {PATIENCE:g} s, for others are being compiled; send it again later"
            self._finish(job, _refusal(job.outputs, why), keep=False)
        elif job.computed(now) > 2 * SECONDS:  # it hangs without computing, so that its own limit did not end it
            self._stop(job)
            self._finish(job, _refusal(job.outputs, f"compiling it takes more than {SECONDS:g} s"))

    def _begin(self, job: _CompileJob, jobs: Sequence[_CompileJob]) -> None:
        """Start a job's process; beyond the limit, in place of the one that has computed most."""
        started = [other for other in jobs if other.process is not None]
        if len(started) >= PROCESSES:
            self._stop(started[-1])
        try:
            if self._template is None:
                self._template = Template("unisono.structured_output.workers.worker", [self._set_up()])
                self._template.wait()
                job.begun = time.monotonic()
            job.process = CompilerProcess(*self._template.fork(MEMORY))
            kind = job.outputs.kind
            job.process.channel.send(
                {
                    "kind": kind,
                    "given": getattr(job.outputs, kind),
                    "compact": job.outputs.disable_any_whitespace,
                    "seconds": SECONDS,
                    "eos": self._ends,
                    "words": self._words,
                }
            )
        except BadRequest as error:
            self._finish(job, error, keep=False)
            return
        except Exception as error:  # the template has died: the next grammar gets another
            if self._template is not None:
                self._template.close()
                self._template = None
            self._finish(job, _refusal(job.outputs, f"its process does not start: {error}"), keep=False)
            return
        self._selector.register(job.process.channel, selectors.EVENT_READ, job)

    def _hear(self, job: _CompileJob) -> None:
        """Handle a finished or dead process."""
        process, computed = job.process, job.computed(time.monotonic())
        if process is None:  # it was stopped in this iteration
            return
        self._selector.unregister(process.channel)
        job.process, job.spent, job.since = None, computed, None
        process.go_on()  # it may have been stopped between its answer and now
        try:
            (kind, text), _ = process.channel.receive()
        except Gone:
            kind, text = "bad", (
                f"compiling it takes more than {SECONDS:g} s or {MEMORY >> 20} MiB"
                if computed > SECONDS / 2
                else f"its compilation fails: it takes more than {MEMORY >> 20} MiB, or is nested too deeply"
            )  # fmt: skip
        self._finish(job, Compiled(process, self._ends, self._words) if kind == "ok" else _refusal(job.outputs, text))

    def _stop(self, job: _CompileJob) -> None:
        if job.process is not None:
            self._selector.unregister(job.process.channel)
            job.process.kill()
            job.spent, job.since, job.process = job.computed(time.monotonic()), None, None

    def _finish(self, job: _CompileJob, result: Compiled | BadRequest, keep: bool = True) -> None:
        with self._lock:
            job.result = result
            waiting, job.waiting = job.waiting, []
            if not keep and self._jobs.get(job.outputs) is job:
                del self._jobs[job.outputs]
        for future in waiting:
            _deliver(future, result)

    def _set_up(self) -> dict[str, Any]:
        """The vocabulary, as a message for the worker. Raises BadRequest if nothing can be compiled."""
        tokenizer = Tokenizer.load(self._directory)
        if tokenizer is None:
            raise BadRequest(
                "structured_outputs needs to know what tokens spell, and this checkpoint has no tokenizer: "
                "serve one with tokenizer files, or leave structured_outputs out.",
                "structured_outputs",
            )
        eos = tuple(i for i in dict.fromkeys((*self._eos, *tokenizer.eos_token_ids)) if i < self._vocab_size)
        if not eos:
            raise BadRequest(
                "structured_outputs ends a text with the model's end-of-sequence token, and this checkpoint "
                "names none: set eos_token_id in its config.json, or leave structured_outputs out.",
                "structured_outputs",
            )
        self._ends, self._words = eos, -(-self._vocab_size // 32)
        return describe(tokenizer, self._vocab_size, eos)


def _deliver(future: Future[Compiled], result: Compiled | BadRequest) -> None:
    with suppress(InvalidStateError):  # it was cancelled concurrently
        if isinstance(result, BadRequest):
            future.set_exception(BadRequest(result.parts, result.param, result.code, result.reason))
        else:
            future.set_result(result)


def _refusal(outputs: StructuredOutputs, why: str) -> BadRequest:
    shown = repr(getattr(outputs, outputs.kind))
    shown = shown if len(shown) <= 80 else shown[:79] + "…"
    message = f"structured_outputs.{outputs.kind}={shown} cannot be compiled: {why}."
    return BadRequest(message, "structured_outputs", reason=f"{why}.")
