"""Errors that one request causes: that request ends, and the engine goes on.

An error belongs to a request if it was raised while the host worked on that request alone, or in a feature's code for
the requests of a pass that use the feature: admission to a slot, building a batch, reading a result. Errors of the
device, of other ranks and of shared bookkeeping belong to the engine: they end it, and a server starts another. After
each failed request the engine checks its bookkeeping (``check_integrity``); a breach ends the engine too.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.types import EngineDead, FinishReason, TokenDelta, UnisonoError

STAGES = ("arrival", "slot", "batch", "result")
"""Stages at which a request may fail."""

_DEVICE_ERRORS: tuple[type[BaseException], ...] = tuple(
    found for name in ("AcceleratorError", "OutOfMemoryError") if (found := getattr(torch, name, None)) is not None
)


def is_engine_error(error: BaseException) -> bool:
    """True for an error that leaves the whole engine in doubt, whichever request raised it."""
    if isinstance(error, (EngineDead, *_DEVICE_ERRORS)) or not isinstance(error, Exception):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("CUDA", "NCCL", "cuBLAS", "HIP"))


class RequestErrors(Exception):
    """Some requests of a pass cannot be part of it. states: a feature's state of each of them."""

    def __init__(self, states: Sequence[Any], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.states, self.cause = states, cause


def culprits(rows: Sequence[Any], attempt: Callable[[Any], object]) -> list[Any]:
    """Return the rows for which ``attempt`` fails alone; all of them if it fails for none."""
    found = []
    for row in rows if len(rows) > 1 else ():
        try:
            attempt(row)
        except Exception as error:
            if is_engine_error(error):
                raise
            found.append(row)
    return found or list(rows)


@dataclass
class Failures:
    """Requests that failed since the last :meth:`take`, and counts of failures by stage."""

    counts: Counter[str] = field(default_factory=Counter)
    _deltas: list[TokenDelta] = field(default_factory=list)

    def count(self, stage: str) -> None:
        """Count a failure whose request gets its error elsewhere."""
        self.counts[stage] += 1

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count an error of the block, unless it refuses the request."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, UnisonoError):
                self.count("arrival")
            raise

    def add(self, request_id: str, stage: str, error: Exception) -> None:
        """Record that a request ends with ``error``. Raises ``error`` if it is the engine's own."""
        if is_engine_error(error):
            raise error
        traceback.print_exception(error)
        self.count(stage)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:480]
        self._deltas.append(TokenDelta(request_id, [], FinishReason.ABORT, error=f"{text} ({stage})."))

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def take(self) -> list[TokenDelta]:
        """Return the last deltas of the requests that failed."""
        deltas, self._deltas = self._deltas, []
        return deltas


def kept(rows: Sequence[Any], dropped: Collection[int]) -> Sequence[Any]:
    """Return the rows of a pass except those whose states, by id, were ``dropped`` when it was built."""
    return [row for row in rows if id(row.state) not in dropped] if dropped else rows
