"""Heartbeats of the engine process: whether it runs at all, whatever it computes.

:func:`answer` starts a thread there that echoes messages. It is libzmq's own loop, in C: it does not need
Python's lock, so it answers within milliseconds while a pass, a capture or a compilation lasts, and stops when the
process is stopped. :class:`Watch` is the API process's side.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from threading import Thread

import zmq

BEAT_SECONDS = 1.0
"""Between two heartbeats, at most."""
START_SECONDS = 120.0
"""A new process gets at least this long before its first answer: it has to import its libraries."""


def answer(address: str) -> None:
    """Echo what comes to the socket at ``address``, in a thread, for as long as this process lives."""

    def echo() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            while True:
                with suppress(InterruptedError):  # stopped, and continued
                    zmq.proxy(socket, socket)

    Thread(target=echo, name="heartbeat", daemon=True).start()


class Watch:
    """Sends heartbeats through a socket bound to ``address``. patience: seconds without an answer that are too many."""

    def __init__(self, address: str, patience: float) -> None:
        self.patience = patience
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    async def silent(self) -> None:
        """Return when no answer has come for ``patience`` seconds."""
        beat = min(BEAT_SECONDS, self.patience / 4)
        now = time.monotonic()
        limit = now + max(self.patience, START_SECONDS)
        while now < limit:
            with suppress(zmq.Again):
                self._socket.send(b"", zmq.NOBLOCK)
            await asyncio.sleep(beat)
            before, now = now, time.monotonic()
            limit += max(0.0, now - before - 2 * beat)  # while this process did not run it heard nothing
            if self._heard():
                limit = now + self.patience

    def _heard(self) -> bool:
        heard = False
        with suppress(zmq.Again):
            while True:
                self._socket.recv(zmq.NOBLOCK)
                heard = True
        return heard

    def close(self) -> None:
        """Free the socket. May be called more than once."""
        self._socket.close(0)
        self._context.term()
