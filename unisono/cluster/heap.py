"""The Python heap of a process that serves, or measures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
