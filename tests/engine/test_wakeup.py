"""What callers of one engine wait for: it rings from any thread, and Ctrl-C may end a wait at any place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from unisono.engine.loop import Wakeup


class Interrupt(Exception):
    pass


class Interrupts:
    """SIGINT raises Interrupt in the main thread, once after each time that ``armed`` is set."""

    armed = False

    def __call__(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise Interrupt


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def test_a_ring_is_kept_for_the_next_wait() -> None:
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    wakeup.wait()  # both were one
    threading.Timer(0.05, wakeup.set).start()
    wakeup.wait()
    wakeup.set()
    wakeup.clear()
    waited = threading.Thread(target=wakeup.wait, daemon=True)
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()  # what was cleared ends no wait
    wakeup.set()
    waited.join(20)
    assert not waited.is_alive()


def test_an_interrupted_wait_breaks_no_ring(interrupts: Interrupts) -> None:
    """The main thread waits while two threads ring without a pause, and is interrupted 40 times. (``threading.Event``
    fails after some five: its wait lets go of the lock of a thread that sets it.)"""
    wakeup, errors, caught = Wakeup(), list[BaseException](), 0
    enough, ended = threading.Event(), threading.Event()

    def ring() -> None:
        try:
            while not ended.is_set():
                wakeup.set()
        except BaseException as error:
            errors.append(error)

    def interrupt() -> None:
        for _ in range(40):
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        enough.set()

    ringing = [threading.Thread(target=ring, daemon=True) for _ in range(2)]
    for thread in (*ringing, threading.Thread(target=interrupt, daemon=True)):
        thread.start()
    while not enough.is_set():
        try:
            interrupts.armed = True
            wakeup.clear()
            wakeup.wait()
            interrupts.armed = False
        except Interrupt:
            caught += 1
    ended.set()
    for thread in ringing:
        thread.join(20)
    assert not errors
    assert caught > 10
