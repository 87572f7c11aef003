"""Runs a load in one event loop, or in several processes if one cannot read the tokens fast enough."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import resource
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.tools.load.client import ClientOutcome, LoadClient, LoadTarget
from unisono.tools.load.mixes import Conversation
from unisono.tools.load.prompts import PromptSource
from unisono.tools.load.wire import now
from unisono.types import UnisonoError

T = TypeVar("T")


@dataclass(frozen=True)
class ScheduledLoad:
    """Conversations, their start times (seconds after the start), and the concurrency (None: no limit)."""

    target: LoadTarget
    source: PromptSource
    conversations: Sequence[Conversation]
    times: Sequence[float]
    most: int | None = None

    def parts(self, count: int) -> list[ScheduledLoad]:
        """This load, divided into ``count`` loads."""
        count = max(1, min(count, len(self.conversations), self.most or len(self.conversations)))
        most = [None] * count if self.most is None else [(self.most + i) // count for i in range(count)]
        return [
            ScheduledLoad(self.target, self.source, self.conversations[i::count], self.times[i::count], most[i])
            for i in range(count)
        ]


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in an event loop of its own: uvloop's if installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work())


def run_load(load: ScheduledLoad, processes: int = 1) -> list[ClientOutcome]:
    """Run a load in ``processes`` processes; one outcome for each. Raises UnisonoError if one of them died."""
    _raise_file_limit()
    parts = load.parts(processes)
    if len(parts) == 1:
        with _no_collections():
            return [_run_part(parts[0], None)]
    context = multiprocessing.get_context("spawn")
    children = []
    try:
        for part in parts:
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(theirs, part), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        for _, ours in children:
            ours.recv()  # it is ready
        start = now() + 0.05
        for _, ours in children:
            ours.send(start)
        return [ours.recv() for _, ours in children]
    except EOFError:
        raise UnisonoError("a client process died; --client-processes 1 shows its error.") from None
    finally:
        for child, _ in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _child(pipe: Any, part: ScheduledLoad) -> None:
    with _no_collections():
        pipe.send(None)
        pipe.send(_run_part(part, pipe.recv()))


def _run_part(part: ScheduledLoad, start: float | None) -> ClientOutcome:
    """Run a part of the load. start: its start time; None: now."""

    async def work() -> ClientOutcome:
        client = LoadClient(part.target, part.source, part.most)
        return await client.run(part.conversations, part.times, now() if start is None else start)

    return run(work)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Suspend garbage collection: a collection during the load would look like a slow server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _raise_file_limit() -> None:
    """Raise the limit of open files: every connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
