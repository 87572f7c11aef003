"""Memory of a process that serves or measures: the Python heap, and free memory of the C heap."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LARGE_BLOCK = 1 << 20
"""Bytes of a block that is mapped by itself; see :func:`return_freed_memory`."""

_M_MMAP_THRESHOLD = -3
"""Parameter of ``mallopt`` in malloc.h."""


def freeze_heap() -> None:
    """Freeze the heap so that GC pauses do not delay tokens: collect, then exclude all living objects from collection.

    A full collection over a model's and its libraries' objects takes 0.2 s, in which no request gets a token, at an
    unpredictable time. For the project's own processes only: objects that exist now are never collected.

    The second collection resets Python's count of long-lived objects. A full collection runs only once the new ones are
    a quarter of that count; with the frozen objects in it, reference cycles of requests would stay for hours.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freeze the heap within a block."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within a block: imports and loading make objects that stay, and collections walk
    them. Importing torch takes 0.3 s less.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def return_freed_memory() -> None:
    """Have glibc map each block of LARGE_BLOCK bytes or more by itself, so that freeing it returns it to the system.

    By default this limit rises to 32 MiB when the first large blocks are freed. Bodies of requests then lie between
    small objects, and the process keeps much of its peak memory. Does nothing with other C libraries.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


class HeapTrimmer:
    """Return free memory of the C heap to the system, in a thread of its own.

    glibc keeps memory that was freed below the top of an arena. Tokenizing a text of 4 MiB leaves 0.5 GiB so, for each
    thread that does it. ``seconds``: time from a request to the trim, and the shortest time between two trims.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._requested = self._running = False
        self._malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only

    def request(self) -> None:
        """Trim the heap soon. Call it after large objects were freed, from any thread."""
        if self._malloc_trim is None:
            return
        with self._lock:
            self._requested = True
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, args=(self._malloc_trim,), name="trim-heap", daemon=True).start()

    def _run(self, malloc_trim: Callable[[int], int]) -> None:
        while True:
            time.sleep(self._seconds)
            with self._lock:
                if not self._requested:
                    self._running = False
                    return
                self._requested = False
            malloc_trim(0)


TRIMMER = HeapTrimmer()
"""The trimmer of this process."""
