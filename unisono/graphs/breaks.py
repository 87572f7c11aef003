"""Eager breaks: functions in a pass that no graph can hold, and the captures that they interrupt."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload


class CaptureError(RuntimeError):
    """A pass did something that cannot be captured, such as a host synchronisation."""


P = ParamSpec("P")
R = TypeVar("R")


class Capture(Protocol):
    """A capture under way, as an eager break sees it. ``splits``: whether optional breaks are taken."""

    splits: bool

    def interrupt(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """End the segment, run ``function`` eagerly, record the call, begin the next segment; returns its result."""


class _Local(threading.local):
    capture: Capture | None = None


_local = _Local()


@contextmanager
def capturing(capture: Capture | None) -> Iterator[None]:
    """While this is entered, eager breaks that this thread reaches interrupt ``capture``."""
    before, _local.capture = _local.capture, capture
    try:
        yield
    finally:
        _local.capture = before


@overload
def eager_break(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def eager_break(*, optional: bool = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_break(function: Callable[P, R] | None = None, *, optional: bool = False) -> Any:
    """Mark a function that cannot be captured: it runs eagerly, between two captured segments.

    Outside a capture it is the plain function. A capture ends its segment here, runs the function and remembers the
    call; every replay calls it again with the very arguments of the capture, whose tensors then hold the replay's
    values, and copies what it returns into the tensors that the capture's call returned. So it may read tensors on
    the host, plan, synchronise. What it returns must be tensors, None, numbers or strings, or tuples, lists and dicts
    of them; only tensors' values may change from call to call (CaptureError). It may keep state in arguments that are
    no tensors. A break inside a break is part of it.

    optional: break only in segmented captures (``--graphs segmented``); others capture the function.
    """
    if function is None:
        return functools.partial(eager_break, optional=optional)
    plain = function

    @functools.wraps(plain)
    def broken(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _local.capture
        if capture is None or (optional and not capture.splits):
            return plain(*args, **kwargs)
        with capturing(None):
            return cast(R, capture.interrupt(plain, args, kwargs))

    return broken
