"""Garbage collection in a process that serves or measures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
    them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
