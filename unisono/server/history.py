"""What the server remembers of the last requests: what they waited for, never what they said."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

REMEMBERED = 100
"""How many sequences the server remembers."""


@dataclass
class Times:
    """What is known of a sequence when it has ended, in seconds; None where it never came so far."""

    total: float
    first_token: float | None
    queue: float | None
    prefill: float | None
    decode: float | None


class RequestRecord(msgspec.Struct, kw_only=True):
    """One sequence that has ended: a choice of an answer.

    Times are seconds: ``preparation`` from the HTTP request's arrival to the engine's queue, ``queue`` until its first
    pass, ``prefill`` until its first token, ``decode`` until its last. They are null where it never had a token.
    ended: seconds since 1970. key: the name of the key that it came with. accept_length: mean tokens of its rounds,
    null without rounds.
    """

    id: str
    key: str
    ended: float
    finish_reason: str
    total: float
    preparation: float | None
    queue: float | None
    prefill: float | None
    decode: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    accept_length: float | None

    @classmethod
    def of(cls, times: Times, **facts: Any) -> RequestRecord:
        """A record of a sequence that has ended now. facts: the fields that are no times."""
        preparation = None
        if times.first_token is not None and times.queue is not None and times.prefill is not None:
            preparation = max(0.0, times.first_token - times.queue - times.prefill)
        return cls(
            ended=round(time.time(), 3),
            total=round(times.total, 6),
            preparation=_rounded(preparation),
            queue=_rounded(times.queue),
            prefill=_rounded(times.prefill),
            decode=_rounded(times.decode),
            **facts,
        )


def _rounded(value: float | None) -> float | None:
    """To microseconds."""
    return None if value is None else round(value, 6)


class History:
    """The last :data:`REMEMBERED` sequences."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=REMEMBERED)

    def add(self, record: RequestRecord) -> None:
        """Remember a sequence; the oldest is forgotten where there is no room."""
        self._records.append(record)

    def latest(self) -> list[RequestRecord]:
        """The remembered sequences, the latest first."""
        return list(reversed(self._records))
