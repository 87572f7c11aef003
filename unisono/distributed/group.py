"""Agreement of ranks at the start: values of all ranks, or decisions of rank 0.

Not used by passes. A rank that cannot go on reports its error to rank 0, which raises it.
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
        """Return every rank's value, in their order; all ranks call it in the same places. Values are plain data."""
        ...


class Alone:
    """The group of a process that holds the whole model."""

    ranks = ALONE

    def exchange(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def decided(group: Group, value: Any) -> Any:
    """Return rank 0's value, on every rank."""
    return group.exchange(value if group.ranks.index == 0 else None)[0]


def agreement(group: Group) -> Callable[[bool], bool] | None:
    """Return a function that tells if a proof holds on every rank; None for a single rank."""
    return None if group.ranks.count == 1 else lambda holds: all(group.exchange(bool(holds)))


@dataclass(frozen=True)
class RankError:
    """Error of a rank in place of a value: the error's class and text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        """Make the report of an error of this rank."""
        return cls(type(error).__name__, " ".join(str(error).split()))

    def error(self, index: int) -> Exception:
        """Return the error for rank 0 to raise."""
        kind = getattr(types, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, types.UnisonoError):
            return kind(self.text)
        return EngineDead(f"rank {index} of the model failed: {self.kind}: {self.text}")


def first_error(values: Sequence[Any]) -> Exception | None:
    """Return the error of the first rank that failed; None if none did."""
    return next((value.error(index) for index, value in enumerate(values) if isinstance(value, RankError)), None)
