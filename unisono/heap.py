"""The Python heap of a process that serves, or measures."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LARGE_BLOCK = 1 << 20
"""Bytes of a block that is mapped by itself; see :func:`return_freed_memory`."""

_M_MMAP_THRESHOLD = -3
"""Number of the parameter for ``mallopt``, from malloc.h."""


def freeze_heap() -> None:
    """Collect garbage, and have later collections pass over what is left: a model's and its libraries' objects.

    A collection that goes through all of these takes 0.2 s, in which no request gets a token, at an unforeseeable time.
    For processes of the project's own: objects that exist now are never collected.

    The second collection resets Python's count of long-lived objects. A full collection runs only once the new ones are
    a quarter of that count; with the frozen objects in it, reference cycles of requests would stay for hours.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def return_freed_memory() -> None:
    """Have glibc map each block of LARGE_BLOCK bytes or more by itself, so that freeing it returns it to the system.

    Unless it is set, this limit rises to 32 MiB with the first large blocks that are freed. Bodies of requests then lie
    between small objects, and the process keeps much of the memory of its largest moment. With other C libraries than
    glibc it does nothing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def trim_heap() -> None:
    """Return free memory between blocks in use to the system. Takes some 20 ms; other threads may run Python meanwhile.

    With other C libraries than glibc it does nothing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """:func:`freeze_heap` for a while."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: imports and loading make objects that stay, and collections would walk them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
