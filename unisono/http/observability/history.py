"""Times and token counts of the last requests, and latency percentiles over them. Texts are not stored."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

REMEMBERED = 1000
"""Sequences in memory; latency percentiles are over these."""
LISTED = 100
"""Sequences that ``GET /requests`` lists."""
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}


@dataclass
class Times:
    """Times of an ended sequence, in seconds; None for stages that it did not reach."""

    total: float
    first_token: float | None
    queue: float | None
    prefill: float | None
    decode: float | None


class RequestRecord(msgspec.Struct, kw_only=True):
    """One sequence that has ended: a choice of an answer.

    Times are seconds: ``preparation`` from the HTTP request's arrival to the engine's queue, ``queue`` until its first
    pass, ``prefill`` until its first token, ``decode`` until its last; ``first_token`` from the arrival to the first
    token.
    They are null if it never had a token. ended: seconds since 1970. key: name of its API key. accept_length: mean
    tokens per round, null without rounds.
    """

    id: str
    key: str
    ended: float
    finish_reason: str
    total: float
    first_token: float | None
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
        """A record of a sequence that ends now. facts: the fields beside the times."""
        preparation = None
        if times.first_token is not None and times.queue is not None and times.prefill is not None:
            preparation = max(0.0, times.first_token - times.queue - times.prefill)
        return cls(
            ended=round(time.time(), 3),
            total=round(times.total, 6),
            first_token=_rounded(times.first_token),
            preparation=_rounded(preparation),
            queue=_rounded(times.queue),
            prefill=_rounded(times.prefill),
            decode=_rounded(times.decode),
            **facts,
        )


def _rounded(value: float | None) -> float | None:
    """``value`` rounded to microseconds."""
    return None if value is None else round(value, 6)


def _between_tokens(record: RequestRecord) -> float | None:
    """Mean seconds between a sequence's tokens; None with fewer than two."""
    if record.decode is None or record.completion_tokens < 2:
        return None
    return record.decode / (record.completion_tokens - 1)


LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "first_token": lambda record: record.first_token,
    "between_tokens": _between_tokens,
    "queue": lambda record: record.queue,
    "prefill": lambda record: record.prefill,
    "decode": lambda record: record.decode,
    "total": lambda record: record.total,
}
"""Latencies of a record, in seconds, by name."""
ENDED_EARLY = ("abort", "error")


class History:
    """The last :data:`REMEMBERED` sequences."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=REMEMBERED)

    def add(self, record: RequestRecord) -> None:
        """Add a sequence; the oldest one is dropped if there are too many."""
        self._records.append(record)

    def latest(self) -> list[RequestRecord]:
        """The last :data:`LISTED` sequences, the latest first."""
        return list(reversed(self._records))[:LISTED]

    def latencies(self) -> dict[str, dict[str, float | int | None]]:
        """Measured values by the names of :data:`LATENCIES`: ``count``, ``last`` and :data:`PERCENTILES`, in seconds.

        All rows are over the same sequences: those with a token that were neither aborted nor failed. So a percentile
        of the first token is never above that of the whole request.
        """
        done = [one for one in self._records if one.first_token is not None and one.finish_reason not in ENDED_EARLY]
        table: dict[str, dict[str, float | int | None]] = {}
        for name, latency in LATENCIES.items():
            values = [value for one in done if (value := latency(one)) is not None]
            row = {"count": len(values), "last": values[-1] if values else None}
            values.sort()
            table[name] = row | {title: percentile(values, share) for title, share in PERCENTILES.items()}
        return table


def percentile(values: list[float], share: int) -> float | None:
    """The nearest-rank percentile: the smallest value that ``share`` per cent of ``values`` do not exceed.

    values: ascending. None if there are fewer than 100 / (100 - share) values, for example 10 for the 90th.
    """
    if len(values) * (100 - share) < 100:
        return None
    return values[math.ceil(len(values) * share / 100) - 1]
