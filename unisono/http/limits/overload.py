"""Admission control: a bounded queue, limits per client, and a fair order of preparation.

A request that generates or tokenizes gets a :class:`Ticket` after its key has been checked, and returns it after its
answer. :class:`Admission` refuses it if the queue is full (503) or its client is beyond its limits (429), both with
Retry-After. After its body has been read, it waits in a :class:`Turnstile`, round-robin over clients, to be parsed and
tokenized, so that a burst of one client delays another by one request; the engine's queue does the same
(``engine/scheduling/waiting.py``). Runs in the API process's event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from unisono.cluster.heap import TRIMMER
from unisono.http.errors import ApiError
from unisono.http.security.auth import ApiClient, ClientLimits
from unisono.types import ConfigError

PLACES = 2
"""Long requests that are prepared at once: one in the tokenizer's thread, one in the event loop."""
LARGE_BODY = 2**18
"""Bytes of a body after which its freed memory is returned to the system."""
SHORT_BODY, SHORT_PLACES = 16 * 2**10, 64
"""Largest body of a short request, in bytes, and short requests that are prepared at once.

Each takes some milliseconds, most of them waiting for the event loop: with two places, a server with full streams takes
200 requests a second.
"""
MAX_RETRY_AFTER = 60
"""Largest Retry-After for a full queue, seconds."""
BYTES_RETRY_AFTER = 5
"""Retry-After for too many bytes of waiting bodies, seconds."""
REMEMBERED = 1024
"""Rate-limited clients in memory before full buckets are removed."""


@dataclass(frozen=True)
class LoadLimits:
    """Limits of the server's load.

    max_queued_requests: sequences beyond those that run at once. max_waiting_bytes: bodies of requests before their
    preparation. client: default limits of a client.

    Raises ConfigError.
    """

    max_queued_requests: int = 4096
    max_waiting_bytes: int = 1 << 30
    client: ClientLimits = field(default_factory=ClientLimits)

    @staticmethod
    def of(
        max_queued_requests: int,
        max_concurrent_requests_per_key: int | None,
        max_requests_per_minute_per_key: int | None,
    ) -> LoadLimits:
        """Limits from the flags of these names."""
        client = ClientLimits(max_concurrent_requests_per_key, max_requests_per_minute_per_key)
        return LoadLimits(max_queued_requests, client=client)

    def __post_init__(self) -> None:
        if self.max_queued_requests < 0:
            raise ConfigError(
                f"--max-queued-requests {self.max_queued_requests}: give a whole number from 0 on; 0 refuses what "
                "cannot run at once."
            )
        for one in fields(self.client):
            value = getattr(self.client, one.name)
            if value is not None and value < 1:
                flag = "--max-" + one.name.replace("_", "-") + "-per-key"
                raise ConfigError(f"{flag} {value}: give a whole number from 1 on, or leave it out for no limit.")


@dataclass
class _ClientUsage:
    """Usage of one client: requests and sequences in progress, and bytes of bodies before their preparation."""

    requests: int = 0
    sequences: int = 0
    bytes: int = 0


@dataclass
class _Bucket:
    """A token bucket: requests that a client may send at once, as of ``when``."""

    left: float
    when: float


class Admission:
    """Admission of requests. slots: sequences that the engine runs at once."""

    def __init__(self, limits: LoadLimits | None = None, slots: int = 1, clock: Callable[[], float] = time.monotonic):
        self._limits, self._slots, self._clock = limits or LoadLimits(), slots, clock
        self._usage: dict[str, _ClientUsage] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._remembered, self._total, self._bytes = REMEMBERED, 0, 0
        self._left: deque[tuple[float, int]] = deque(maxlen=256)  # (time, number) of ended sequences
        self.long, self.short = Turnstile(PLACES), Turnstile(SHORT_PLACES)

    def enter(self, client: ApiClient) -> Ticket:
        """Admit a request of ``client``. Raises ApiError 429 and 503."""
        limits, usage = client.limits or self._limits.client, self._usage.get(client.label, _ClientUsage())
        self._check_concurrency(client, limits, usage)
        self._check_queue(usage)
        self._check_rate(client, limits)
        self._usage[client.label] = usage
        usage.requests += 1
        ticket = Ticket(self, client)
        ticket.resize(1)
        return ticket

    @property
    def sequences(self) -> int:
        """Number of running and waiting sequences."""
        return self._total

    def _check_concurrency(self, client: ApiClient, limits: ClientLimits, usage: _ClientUsage) -> None:
        most = limits.concurrent_requests
        if most is not None and usage.requests >= most:
            message = (
                f"{_who(client)} has {usage.requests} requests under way, and may have {most} at once; send this one "
                "when one of them has been answered."
            )
            raise ApiError(429, message, "rate_limit_error", code="too_many_concurrent_requests", retry_after=1)

    def _check_queue(self, usage: _ClientUsage) -> None:
        """Refuse a request if the queue is full.

        Clients below their share may exceed it, by as many sequences again.
        """
        queued = self._limits.max_queued_requests
        room = self._slots + queued
        if self._total < room:
            return
        clients = len(self._usage) + (usage.requests == 0)
        if self._total < room + queued and usage.sequences * clients < room:
            return
        message = (
            f"The queue is full: {self._total} sequences run or wait, {self._slots} run at once and {queued} may wait "
            "(--max-queued-requests). Send it again later."
        )
        after = self._seconds_until_room(self._total - room + 1)
        raise ApiError(503, message, "service_unavailable_error", code="queue_full", retry_after=after)

    def _grow(self, ticket: Ticket, count: int) -> None:
        """Count bytes of a body. Beyond the limit, clients with more than a fair share are refused."""
        usage, most = self._usage[ticket.client.label], self._limits.max_waiting_bytes
        total, own = self._bytes + count, usage.bytes + count
        if total > most and (total > 2 * most or own * len(self._usage) > most):
            message = (
                f"Bodies of {self._bytes >> 20} MiB wait to be read, and {most >> 20} MiB may. Send it again later."
            )
            error, code = "service_unavailable_error", "too_many_bytes"
            raise ApiError(503, message, error, code=code, retry_after=BYTES_RETRY_AFTER)
        self._bytes, usage.bytes, ticket.bytes = total, own, ticket.bytes + count

    def _shrink(self, ticket: Ticket) -> None:
        if not ticket.bytes:
            return
        if ticket.bytes > LARGE_BODY:
            TRIMMER.request()
        self._bytes -= ticket.bytes
        self._usage[ticket.client.label].bytes -= ticket.bytes
        ticket.bytes = 0

    def _seconds_until_room(self, needed: int) -> int:
        """Estimated seconds until ``needed`` sequences have ended, at the recent rate."""
        if len(self._left) < 2:
            return 1
        seconds = self._clock() - self._left[0][0]
        ended = sum(count for _, count in self._left)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(needed * seconds / max(1, ended))))

    def _check_rate(self, client: ApiClient, limits: ClientLimits) -> None:
        """Refuse a request beyond the rate: a token bucket holds a minute's requests."""
        most, now = limits.requests_per_minute, self._clock()
        if most is None:
            return
        bucket = self._buckets.get(client.label)
        left = float(most) if bucket is None else min(most, bucket.left + (now - bucket.when) * most / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / most)
            message = f"{_who(client)} may send {most} requests in a minute; send this one in {wait} s."
            raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=wait)
        self._buckets[client.label] = _Bucket(left - 1, now)
        if len(self._buckets) > self._remembered:  # a bucket is full after a minute
            self._buckets = {label: one for label, one in self._buckets.items() if now - one.when < 60}
            self._remembered = max(REMEMBERED, 2 * len(self._buckets))

    def _resize(self, ticket: Ticket, sequences: int) -> None:
        change = sequences - ticket.sequences
        if change < 0:
            self._left.append((self._clock(), -change))
        self._usage[ticket.client.label].sequences += change
        self._total += change
        ticket.sequences = sequences

    def _leave(self, ticket: Ticket) -> None:
        self._resize(ticket, 0)
        self._shrink(ticket)
        usage = self._usage[ticket.client.label]
        usage.requests -= 1
        if not usage.requests:
            del self._usage[ticket.client.label]


class Ticket:
    """An admitted request. Each holder returns it once: its HTTP request, and background work."""

    def __init__(self, admission: Admission, client: ApiClient) -> None:
        self._admission, self.client, self.sequences, self.bytes = admission, client, 0, 0
        self._holders = 1
        self._has_place, self._turnstile = False, admission.short

    def resize(self, sequences: int) -> None:
        """Set the number of the request's sequences."""
        if self._holders:
            self._admission._resize(self, sequences)

    def grow(self, count: int) -> None:
        """Count ``count`` more bytes of the body. Raises ApiError 503 if too many wait."""
        self._admission._grow(self, count)

    def hold(self) -> None:
        """Add a holder, which must call :meth:`leave`, too."""
        self._holders += 1

    def take_turn(self) -> bool:
        """Take a place for the preparation if one is free; returns True then. ``turn_over`` returns it."""
        if self.bytes > SHORT_BODY:  # it stays long after its bytes have been released
            self._turnstile = self._admission.long
        self._has_place = self._has_place or self._turnstile.enter()
        return self._has_place

    async def turn(self) -> bool:
        """Wait for a place, in the client's turn. Returns True."""
        await self._turnstile.wait(self.client.label)
        self._has_place = True
        return True

    def step_aside(self) -> None:
        """Release the place while this request waits for its media. Its bytes still count: they are in memory."""
        if self._has_place:
            self._has_place = False
            self._turnstile.leave()

    def turn_over(self) -> None:
        """End the preparation: release the place and the bytes of the body. May be called more than once."""
        self._admission._shrink(self)
        self.step_aside()

    def leave(self) -> None:
        """Remove a holder; the last one ends the request."""
        self.turn_over()
        self._holders -= 1
        if self._holders == 0:
            self._admission._leave(self)


class Turnstile:
    """A semaphore of ``places``; waiters are served round-robin over labels, in order of arrival within one."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # in round-robin order

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return sum(len(line) for line in self._lines.values())

    def enter(self) -> bool:
        """Take a place if one is free; there are no waiters then."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def wait(self, label: str) -> None:
        """Wait for a place."""
        if self.enter():
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(label, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it got the place while it was cancelled
                self.leave()
            raise

    def leave(self) -> None:
        """Pass the place to the next waiter."""
        while self._lines:
            label = next(iter(self._lines))
            line = self._lines.pop(label)
            while line and line[0].done():  # it was cancelled
                line.popleft()
            if not line:
                continue
            line.popleft().set_result(None)
            if line:
                self._lines[label] = line  # move this label behind the others
            return
        self._free += 1


def _who(client: ApiClient) -> str:
    return f"The key {client.name}" if client.name else "This client"
