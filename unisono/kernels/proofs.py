"""Proofs of bits among ranks: a proof must hold on all of them, or none uses it.

Every function that proves passes its result through :func:`agreed`, whether it has just compared or remembers. With
one rank that is nothing. The engine's start says how ranks agree (:func:`agreeing`), and all ranks prove the same
things in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Key = TypeVar("Key")

_agree: Callable[[bool], bool] | None = None


def agreed(holds: bool) -> bool:
    """Whether a proof that holds, or does not, on this rank holds on all."""
    return holds if _agree is None else _agree(holds)


def proven(known: dict[Key, bool], key: Key, holds: Callable[[], bool]) -> bool:
    """What ``holds`` says, asked once for each key, where it says so on all ranks. known: remembers it."""
    if key not in known:
        known[key] = holds()
    known[key] = agreed(known[key])
    return known[key]


@contextmanager
def agreeing(agree: Callable[[bool], bool] | None) -> Iterator[None]:
    """In this context proofs are agreed upon so; None: this rank is alone."""
    global _agree
    before, _agree = _agree, agree
    try:
        yield
    finally:
        _agree = before
