"""Requests that have to wait for something before they join the queue: files being read, pages from another engine."""

from __future__ import annotations

from typing import Protocol

from unisono.engine.sequence import Sequence


class Gate(Protocol):
    """What a request waits for."""

    @property
    def open(self) -> bool:
        """Whether it need not wait any longer."""
        ...


class Arrivals:
    """Keeps requests in front of the queue; later requests do not wait for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Sequence, list[Gate]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, gates: list[Gate]) -> None:
        """Keep a request until every gate is open."""
        self._waiting[sequence.request.request_id] = sequence, gates

    def remove(self, request_id: str) -> list[Gate] | None:
        """Forget a request; returns what it waited for, None where it is not here."""
        return self._waiting.pop(request_id, (None, None))[1]

    def ready(self) -> list[Sequence]:
        """Take out those that need not wait any longer."""
        found = [s for s, gates in self._waiting.values() if all(gate.open for gate in gates)]
        for sequence in found:
            del self._waiting[sequence.request.request_id]
        return found
