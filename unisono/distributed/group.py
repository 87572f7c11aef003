"""The ranks of one engine as they agree on numbers at the start: what all hold, or what rank 0 decides.

Nothing here is on the way of a pass. A rank that cannot go on tells rank 0 why, which raises that error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono import types
from unisono.distributed.gather import ALONE, Ranks
from unisono.types import EngineDead


class Group(Protocol):
    """This rank among the others."""

    ranks: Ranks

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in their order; all ranks call it in the same places. Values are plain data."""
        ...


class Alone:
    """The group of a process that holds the whole model."""

    ranks = ALONE

    def exchange(self, value: Any) -> list[Any]:
        """The value."""
        return [value]


def decided(group: Group, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return group.exchange(value if group.ranks.index == 0 else None)[0]


def agreement(group: Group) -> Callable[[bool], bool] | None:
    """Says whether a proof holds on every rank; None where there is one."""
    return None if group.ranks.count == 1 else lambda holds: all(group.exchange(bool(holds)))


@dataclass(frozen=True)
class Refused:
    """What a rank says instead of a value: its error's class and text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Refused:
        """What a rank says of an error of its own."""
        return cls(type(error).__name__, " ".join(str(error).split()))

    def error(self, index: int) -> Exception:
        """The error for rank 0 to raise."""
        kind = getattr(types, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, types.UnisonoError):
            return kind(self.text)
        return EngineDead(f"rank {index} of the model failed: {self.kind}: {self.text}")


def first_error(values: Sequence[Any]) -> Exception | None:
    """The error of the first rank that refused, if any did."""
    return next((value.error(index) for index, value in enumerate(values) if isinstance(value, Refused)), None)
