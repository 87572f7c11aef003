"""Requests that wait for something before they join the queue: files being read, pages from another engine."""

from __future__ import annotations

from typing import Protocol

from unisono.engine.sequence import Sequence


class ArrivalGate(Protocol):
    """A condition that a request waits for."""

    @property
    def open(self) -> bool:
        """True once the request can be queued."""
        ...


class Arrivals:
    """Hold requests in front of the queue; later requests do not wait for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Sequence, list[ArrivalGate]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, gates: list[ArrivalGate]) -> None:
        """Hold a request until every gate is open."""
        self._waiting[sequence.request.request_id] = sequence, gates

    def remove(self, request_id: str) -> list[ArrivalGate] | None:
        """Remove a request and return its gates; None if it is not held here."""
        return self._waiting.pop(request_id, (None, None))[1]

    def ready(self) -> list[Sequence]:
        """Remove and return the requests whose gates are all open."""
        found = [s for s, gates in self._waiting.values() if all(gate.open for gate in gates)]
        for sequence in found:
            del self._waiting[sequence.request.request_id]
        return found
