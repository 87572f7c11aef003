"""Eager breaks: functions in a pass that a graph cannot hold, and the captures that they interrupt."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload


class CaptureError(RuntimeError):
    """Raised when a pass cannot be captured, for example because of a host synchronisation."""


P = ParamSpec("P")
R = TypeVar("R")


class ActiveCapture(Protocol):
    """A capture in progress, as seen by an eager break. ``splits``: take optional breaks too."""

    splits: bool

    def interrupt(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, run ``function`` eagerly, record the call, begin the next segment. Returns the function's
        result."""


class _Local(threading.local):
    capture: ActiveCapture | None = None


_local = _Local()


@contextmanager
def capturing(capture: ActiveCapture | None) -> Iterator[None]:
    """Within the block, eager breaks reached by this thread interrupt ``capture``."""
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

    Outside a capture, the function is unchanged. A capture ends its segment here, runs the function and records the
    call. Every replay calls it again with the arguments of the capture, whose tensors then hold the replay's values,
    and copies its results into the tensors returned during capture. So it may read tensors on the host, plan, and
    synchronise. It must return tensors, None, numbers or strings, or tuples, lists and dicts of them; between calls
    only the tensors' values may change (else CaptureError). It may keep state in non-tensor arguments. A break inside a
    break is part of it.

    optional: break only in segmented captures (``--graphs segmented``); other captures record the function.
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
