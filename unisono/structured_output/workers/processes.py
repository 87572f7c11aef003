"""The engine's side of the processes in ``worker.py``, one per grammar: stopping, killing, joining them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress

from unisono.sandbox.channel import ForkChannel, pair

LANES = 4
"""Most lanes of one grammar. A lane that dies takes its outputs with it; those restart, each in a lane of its own."""

MEMBERS = 4
"""Outputs of a lane before another is forked."""


class CompilerProcess:
    """A process that compiles a grammar and keeps it. ``pause``, ``go_on`` and ``kill`` may be called at any time."""

    def __init__(self, channel: ForkChannel, pid: int) -> None:
        self.channel = channel
        self._process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._pid = pid
        self._members: dict[int, int] = {}
        self._private = 0
        self._lock = threading.Lock()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.close()

    def alive(self) -> bool:
        return self.channel.fileno() >= 0 and not self.channel.ended()

    def close(self) -> None:
        """Release the process: it ends, and its lanes end with their outputs."""
        self.channel.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def __del__(self) -> None:
        self.close()

    def join(self, alone: bool) -> tuple[ForkChannel, int]:
        """A channel to a lane for one more output, and the lane's number, for :meth:`leave`.

        alone: a new lane.

        Raises Gone.
        """
        ours, theirs = pair()
        with self._lock, theirs:
            number = self._number(alone)
            self.channel.send(number, [theirs.fileno()])
            self._members[number] = self._members.get(number, 0) + 1
        return ours, number

    def leave(self, number: int) -> None:
        with self._lock:
            self._members[number] = self._members.get(number, 1) - 1

    def _number(self, alone: bool) -> int:
        if alone:
            self._private += 1
            return LANES + self._private
        counts = [self._members.get(number, 0) for number in range(LANES)]
        for number, count in enumerate(counts):
            if count < MEMBERS:
                return number
        return counts.index(min(counts))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, OSError):
            if self._process is not None:
                signal.pidfd_send_signal(self._process, number)
            elif not hasattr(os, "pidfd_open") and self.channel.fileno() >= 0:
                os.kill(self._pid, number)


def wake_up_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of non-blocking sockets, to wake a thread that waits in a selector."""
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    return one, other
