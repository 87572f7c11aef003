"""Processes of the other ranks: rank 0 starts them, sends them its commands, and notices when one dies or hangs.

A rank inherits a socket (commands in order, one message each, sent without waiting) and the descriptor of shared memory
(progress counters of each rank, and on a CPU the gathers). A second socket, for bytes of pages, comes with its first
message. It ends when rank 0 does, in any state.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.distributed.gather import Ranks
from unisono.distributed.group import RankError, first_error
from unisono.distributed.shared_memory import SharedMemory, make_memory
from unisono.sandbox.channel import ForkChannel, pair
from unisono.sandbox.channel import Gone as Gone
from unisono.sandbox.interpreter import Process, interpreter
from unisono.types import EngineDead

logger = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two checks of the ranks."""

LAG = 3.0
"""Seconds that a rank may make no progress, nor use its CPU, while rank 0 is ahead of it."""

BUSY_LAG = 15.0
"""The same limit while it uses its CPU: it may have a small share of a busy machine."""

CAPTURE_LAG = 120.0
"""Both limits during captures, since kernels may be compiled on one rank first, and while files are read."""

LAST_MOMENTS = 1.0
"""Seconds that rank 0's own thread gets to raise after a failure, before its process ends: it may wait for a GPU whose
work will never be done.
"""

CLOSING = 10.0
"""Seconds that ranks get to free everything before they are killed."""


class RankProcess:
    """Process of another rank. first: its first message, pickled. pages: a socket for bytes of pages."""

    start: Callable[..., Process] = staticmethod(interpreter)

    def __init__(self, module: str, index: int, memory: int, first: Any) -> None:
        self.index = index
        self.channel, theirs = pair()
        with theirs:
            self.process = self.start(module, theirs.fileno(), memory)
        self.pages, their_pages = sockets.socketpair()
        with their_pages:
            self.channel.send(pickle.dumps(first), [their_pages.fileno()])

    def stopped(self) -> str | None:
        """Return the reason why it cannot go on: it has ended, or was stopped; None while it runs."""
        code = self.process.poll()
        if code is not None:
            return f"ended with exit code {code}"
        return "was stopped" if (self._stat() or "R")[0] in "Tt" else None

    def processor_time(self) -> int:
        """CPU time of the process so far, in clock ticks."""
        stat = self._stat()
        return int(stat[11]) + int(stat[12]) if stat else 0

    def _stat(self) -> list[str]:
        """Return the fields of /proc/PID/stat from the process's state on; empty without /proc, so that only BUSY_LAG
        applies.
        """
        with suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return []

    def end(self, seconds: float) -> None:
        """Wait so long, then kill it."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.channel.close()
        self.pages.close()


class IdleTime:
    """Idle time of a rank."""

    def __init__(self) -> None:
        self._done, self._ticks = (-1, -1), -1
        self._done_at = self._ran_at = time.monotonic()

    def seconds(self, done: tuple[int, int], ticks: int, late: bool, lag: float) -> float:
        """Return the idle seconds if they exceed the limit: it has done less than rank 0 and makes no progress; else
        0.
        """
        now = time.monotonic()
        if done != self._done or not late:
            self._done, self._done_at, self._ran_at = done, now, now
        if ticks != self._ticks:
            self._ticks, self._ran_at = ticks, now
        if now - self._ran_at > lag or now - self._done_at > max(lag, BUSY_LAG):
            return now - self._done_at
        return 0.0


class RankProcesses:
    """All other ranks, seen from rank 0: a :class:`unisono.distributed.group.Group`.

    module: their code, called as ``module.main(socket, memory)``. first: each one's first message, by its index,
    pickled. ``failure``: the reason why the ranks cannot go on; once it is set every call raises EngineDead, and
    ``failed`` becomes readable.
    """

    def __init__(self, module: str, first: dict[int, Any], ranks: Ranks) -> None:
        self.ranks = ranks
        self.failure: str | None = None
        self.failed, self._tell = os.pipe()
        self.busy = False  # while rank 0's thread may wait for the device
        self.lag: float | None = None
        descriptor = make_memory(ranks.count)
        self.memory = SharedMemory(descriptor, 0, ranks.count)
        self._peers = [RankProcess(module, index, descriptor, message) for index, message in first.items()]
        os.close(descriptor)
        self._closing = threading.Event()
        self._on_failure: list[Any] = []
        self._watch = threading.Thread(target=self._look_after, name="ranks", daemon=True)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [peer.process.pid for peer in self._peers]

    @property
    def pages(self) -> list[sockets.socket]:
        """A socket to each of the other ranks, for bytes of pages."""
        return [peer.pages for peer in self._peers]

    def on_failure(self, call: Any) -> None:
        """Call this from another thread when a rank fails: to free a thread that waits for the device."""
        self._on_failure.append(call)

    def exchange(self, value: Any) -> list[Any]:
        """See :class:`unisono.distributed.group.Group`. Raises the error that ended another rank."""
        values = [value, *(self._hear(peer) for peer in self._peers)]
        if (error := first_error(values)) is not None:
            raise error
        self._send(pickle.dumps(values))
        return values

    def send(self, command: bytes) -> None:
        """Have every other rank execute an encoded command; returns at once."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        self._send(command)

    def replies(self) -> list[Any]:
        """Return every other rank's answer to the last command, which requires one."""
        return [self._hear(peer) for peer in self._peers]

    def _send(self, data: bytes) -> None:
        for peer in self._peers:
            try:
                peer.channel.send(data)
            except Gone:
                self._fail(peer, peer.stopped() or "ended")
                raise EngineDead(self.failure or "") from None

    def _hear(self, peer: RankProcess) -> Any:
        try:
            return pickle.loads(peer.channel.receive()[0])
        except Gone:
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(1.0)
            self._fail(peer, peer.stopped() or "ended")
            raise EngineDead(self.failure or "") from None

    # ---- supervision ---------------------------------------------------------------------------

    def _look_after(self) -> None:
        still = {peer.index: IdleTime() for peer in self._peers}
        while not self._closing.wait(LOOK) and self.failure is None:
            progress = self.memory.progress()
            for peer in self._peers:
                why = peer.stopped()
                if why is None and self.lag is not None:
                    done, seen = progress[peer.index], still[peer.index]
                    seconds = seen.seconds(done, peer.processor_time(), late=done < progress[0], lag=self.lag)
                    why = f"has done nothing for {seconds:.0f} s while rank 0 waits for it" if seconds else None
                if why is not None and not self._closing.is_set():
                    self._fail(peer, why)
                    return

    def _fail(self, peer: RankProcess, why: str) -> None:
        if self.failure is not None or self._closing.is_set():
            return
        self.failure = f"rank {peer.index} of the model (process {peer.process.pid}) {why}."
        logger.error("%s", self.failure)
        os.write(self._tell, b"!")
        self.memory.give_up()
        for each in self._peers:
            each.process.kill()
        for call in self._on_failure:
            with suppress(Exception):
                call()
        threading.Thread(target=self._end_process, name="last moments", daemon=True).start()

    def _end_process(self) -> None:
        time.sleep(LAST_MOMENTS)
        if self.busy and not self._closing.is_set():
            print(f"unisono: {self.failure} This process waits for its device in vain and ends.", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    def begin_closing(self) -> None:
        """Allow ranks to end, and tell them to free their resources."""
        self._closing.set()
        for peer in self._peers:
            with suppress(Gone):
                peer.channel.send(b"")

    def close(self) -> None:
        """Wait until the ranks have ended, by force if necessary."""
        self._closing.set()
        seconds = 0.0 if self.failure else CLOSING
        for peer in self._peers:
            peer.end(seconds)
        self._watch.join()
        self.memory.close()
        os.close(self.failed)
        os.close(self._tell)


class Rank:
    """One of the other ranks, in its own process: the other end of a :class:`RankProcess`. pages: see there."""

    def __init__(self, socket: int, memory: int) -> None:
        self.channel = ForkChannel.of(socket)
        first, (pages,) = self.channel.receive()
        self.first, self.pages = pickle.loads(first), sockets.socket(fileno=pages)
        self.ranks: Ranks = self.first["ranks"]
        self.memory = SharedMemory(memory, self.ranks.index, self.ranks.count)
        os.close(memory)
        self._ends = threading.Thread(target=self._end_with_rank_0, name="rank 0", daemon=True)
        self._ends.start()

    def exchange(self, value: Any) -> list[Any]:
        """See :class:`unisono.distributed.group.Group`."""
        self.answer(value)
        values: list[Any] = pickle.loads(self.channel.receive()[0])
        return values

    def answer(self, value: Any) -> None:
        """Send a value to rank 0."""
        self.channel.send(pickle.dumps(value))

    def refuse(self, error: BaseException) -> None:
        """Report the error that ends this rank to rank 0."""
        with suppress(Gone):
            self.answer(RankError.of(error))

    def commands(self) -> Any:
        """Iterate over encoded commands until the end."""
        while data := self.channel.receive()[0]:
            yield data

    def _end_with_rank_0(self) -> None:
        """End this process if rank 0 is gone, from another thread: this one may wait for a device for ever."""
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(1)
