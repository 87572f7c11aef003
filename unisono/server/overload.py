"""What the server takes on: a bounded queue, limits per client, and turns in front of the engine.

A request that generates or tokenizes gets a :class:`Ticket` once its key has been checked, and gives it back when it
has been answered. :class:`Admission` refuses it where the queue is full (503) or its client is beyond its limits (429),
both with Retry-After. When its body has been read it waits for its client's turn (:class:`Turnstile`) to be parsed and
tokenized, so that a burst of one client holds up another by one turn; the engine's queue does the same
(``engine/waiting.py``). Runs in the API process's event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from unisono.server.auth import Client, ClientLimits
from unisono.server.errors import ApiError
from unisono.types import ConfigError

PLACES = 2
"""Long requests that are prepared at once: one in the tokenizer's thread, one in the event loop."""
SHORT_BODY, SHORT_PLACES = 16 * 2**10, 64
"""Bytes of a short request's body, and how many short ones are prepared at once. Each takes some milliseconds, most of
them waiting for the event loop's next turn: through two places a server with full streams takes 200 requests a second.
"""
MAX_RETRY_AFTER = 60
"""Seconds that Retry-After of a full queue says at most."""
BYTES_RETRY_AFTER = 5
"""Seconds that Retry-After says where too many bytes of bodies wait."""
REMEMBERED = 1024
"""Clients with a rate that are remembered, before those are looked for that may send at full rate again."""


@dataclass(frozen=True)
class LoadLimits:
    """max_queued_requests: sequences beyond those that run at once. max_waiting_bytes: of bodies that are not prepared
    yet. client: of each that has no limits of its own.

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
        """From the flags of these names."""
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
class _Usage:
    """Of one client: requests and sequences under way, and the bytes of bodies that are not prepared yet."""

    requests: int = 0
    sequences: int = 0
    bytes: int = 0


@dataclass
class _Bucket:
    """Requests that a client may still send at once, as of ``when``."""

    left: float
    when: float


LARGE_BODY = 1 << 18
"""Bytes of a body after which free memory is returned to the system."""


class Admission:
    """slots: sequences that the engine runs at once."""

    def __init__(self, limits: LoadLimits | None = None, slots: int = 1, clock: Callable[[], float] = time.monotonic):
        self._limits, self._slots, self._clock = limits or LoadLimits(), slots, clock
        self._usage: dict[str, _Usage] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._remembered, self._total, self._bytes = REMEMBERED, 0, 0
        self._left: deque[tuple[float, int]] = deque(maxlen=256)  # when sequences ended, and how many
        self.long, self.short = Turnstile(PLACES), Turnstile(SHORT_PLACES)
        self.large_bodies = 0  # so far, of LARGE_BODY bytes or more

    def enter(self, client: Client) -> Ticket:
        """Count a request of ``client`` from now on. Raises ApiError 429 and 503."""
        limits, usage = client.limits or self._limits.client, self._usage.get(client.label, _Usage())
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
        """Those that run or wait."""
        return self._total

    def _check_concurrency(self, client: Client, limits: ClientLimits, usage: _Usage) -> None:
        most = limits.concurrent_requests
        if most is not None and usage.requests >= most:
            message = (
                f"{_who(client)} has {usage.requests} requests under way, and may have {most} at once; send this one "
                "when one of them has been answered."
            )
            raise ApiError(429, message, "rate_limit_error", code="too_many_concurrent_requests", retry_after=1)

    def _check_queue(self, usage: _Usage) -> None:
        """A full queue takes requests of those who have less than their share of it, as many again at most."""
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
        """Count bytes of a body. Where there are too many, who has more than a fair share of them is refused."""
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
        self.large_bodies += ticket.bytes >= LARGE_BODY
        self._bytes -= ticket.bytes
        self._usage[ticket.client.label].bytes -= ticket.bytes
        ticket.bytes = 0

    def _seconds_until_room(self, wanted: int) -> int:
        """How long it takes until that many sequences have ended, at the rate of the last ones."""
        if len(self._left) < 2:
            return 1
        seconds = self._clock() - self._left[0][0]
        ended = sum(count for _, count in self._left)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(wanted * seconds / max(1, ended))))

    def _check_rate(self, client: Client, limits: ClientLimits) -> None:
        """A token bucket that holds a minute's requests."""
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
        if len(self._buckets) > self._remembered:  # a minute later a bucket is full
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
    """A request that was taken on. It is given back once for each holder: its HTTP request, and what goes on after."""

    def __init__(self, admission: Admission, client: Client) -> None:
        self._admission, self.client, self.sequences, self.bytes = admission, client, 0, 0
        self._holders = 1
        self._has_place, self._turnstile = False, admission.short

    def resize(self, sequences: int) -> None:
        """The request has this number of sequences."""
        if self._holders:
            self._admission._resize(self, sequences)

    def grow(self, count: int) -> None:
        """That many bytes more of the body have come. Raises ApiError 503 where too many wait."""
        self._admission._grow(self, count)

    def hold(self) -> None:
        """Somebody else gives it back too."""
        self._holders += 1

    def take_turn(self) -> bool:
        """Have the request prepared now, if there is nobody to wait for. ``turn_over`` ends the turn."""
        if self.bytes > SHORT_BODY:  # it stays long when its bytes have been given back
            self._turnstile = self._admission.long
        self._has_place = self._has_place or self._turnstile.enter()
        return self._has_place

    async def turn(self) -> bool:
        """Wait for the client's turn to have a request prepared. Returns True."""
        await self._turnstile.wait(self.client.label)
        self._has_place = True
        return True

    def step_aside(self) -> None:
        """Let others be prepared while this request waits for its media. Its bytes still count: they are in memory."""
        if self._has_place:
            self._has_place = False
            self._turnstile.leave()

    def turn_over(self) -> None:
        """End the preparation: give back the place and the bytes of the body. May be called more than once."""
        self._admission._shrink(self)
        self.step_aside()

    def leave(self) -> None:
        """A holder is done with the request."""
        self.turn_over()
        self._holders -= 1
        if self._holders == 0:
            self._admission._leave(self)


class Turnstile:
    """``places`` at once; who waits is served round-robin over labels, and in the order of arrival within one."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns

    @property
    def waiting(self) -> int:
        """Those who wait for a place."""
        return sum(len(line) for line in self._lines.values())

    def enter(self) -> bool:
        """Take a place if one is free, for then nobody waits."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def wait(self, label: str) -> None:
        """Take a place, when it is this label's turn."""
        if self.enter():
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(label, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given the place as it left
                self.leave()
            raise

    def leave(self) -> None:
        """Give the place to whose turn it is."""
        while self._lines:
            label = next(iter(self._lines))
            line = self._lines.pop(label)
            while line and line[0].done():  # it does not wait any more
                line.popleft()
            if not line:
                continue
            line.popleft().set_result(None)
            if line:
                self._lines[label] = line  # at the end: the others come first
            return
        self._free += 1


def _who(client: Client) -> str:
    return f"The key {client.name}" if client.name else "This client"
