"""Heartbeats of the engine process: they show that it runs, regardless of its computations.

:func:`answer` starts a thread there that echoes messages. It is libzmq's own loop, in C, and does not need the GIL, so
it answers within milliseconds during a pass, a capture or a compilation, and stops when the process is stopped.
:class:`Watch` is the API process's side.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from threading import Thread

import zmq

from unisono.cluster import curve

BEAT_SECONDS = 1.0
"""Largest number of seconds between two heartbeats."""
START_SECONDS = 120.0
"""Least seconds that a new process gets before its first answer: it has to import its libraries."""


def answer(address: str, key: bytes = b"") -> None:
    """Echo messages to the socket at ``address``, in a thread, as long as this process lives.

    key: the other side's public key, if the connection is encrypted.
    """

    def echo() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            curve.join(socket, key)
            socket.connect(address)
            while True:
                with suppress(InterruptedError):  # stopped, and continued
                    zmq.proxy(socket, socket)

    Thread(target=echo, name="heartbeat", daemon=True).start()


class Watch:
    """Send heartbeats through a socket bound to ``address``. patience: seconds without an answer that count as silence.

    secret: encrypts the connection, see ``curve``. ``endpoint``: the address that the other side connects to.
    """

    def __init__(self, address: str, patience: float, secret: bytes = b"") -> None:
        self.patience = patience
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        curve.guard(self._socket, secret)
        self._socket.bind(address)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._limit = time.monotonic() + max(patience, START_SECONDS)

    def lives(self) -> None:
        """Record a sign of life other than a heartbeat, such as the message Ready."""
        self._limit = time.monotonic() + self.patience

    async def silent(self) -> None:
        """Return once no answer has come for ``patience`` seconds."""
        beat = min(BEAT_SECONDS, self.patience / 4)
        now = time.monotonic()
        while now < self._limit:
            with suppress(zmq.Again):
                self._socket.send(b"", zmq.NOBLOCK)
            await asyncio.sleep(beat)
            before, now = now, time.monotonic()
            self._limit += max(0.0, now - before - 2 * beat)  # this process did not run, so it heard nothing
            if self._heard():
                self.lives()

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
