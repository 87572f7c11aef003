"""Proofs of bits among ranks: a proof must hold on all of them, or none uses it.

Every function that proves passes its result through :func:`agreed`, whether it has just compared or remembers. With
one rank that is nothing. The engine's start says how ranks agree (:func:`agreeing`), and all ranks prove the same
things in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

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


def rehearsed(known: dict[Key, bool], key: Key, holds: Callable[[], bool]) -> None:
    """Ask what :func:`proven` will ask and learn nothing from it: this compiles what it launches ahead of time."""
    if key not in known:
        holds()
        known.pop(key, None)


def alike(known: dict[Key, bool], key: Key, run: Callable[[], torch.Tensor]) -> bool:
    """Whether a pass has the same bits without and with what ``known`` lets serve. Leaves it served."""
    seen = []
    for serves in (False, True):
        known[key] = serves
        seen.append(run())
    return torch.equal(*seen)


@contextmanager
def agreeing(agree: Callable[[bool], bool] | None) -> Iterator[None]:
    """In this context proofs are agreed upon so; None: this rank is alone."""
    global _agree
    before, _agree = _agree, agree
    try:
        yield
    finally:
        _agree = before
