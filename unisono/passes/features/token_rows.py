"""State of requests whose caller gets a row of numbers for each prompt token and each generated one but the last.

A request that resumes after preemption computes some of the rows again; these are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unisono.passes.features.base import Committed, RequestState, Row
from unisono.types import TokenDelta


class TokenRows(RequestState):
    """Rows of one request, as bytes.

    name: of the output field. known: positions that were read, or that the caller does not get; rows start there.
    prompt_len: end of the prompt's positions.
    """

    def __init__(self, name: str, known: int, prompt_len: int) -> None:
        self.known = known
        self._name, self._prompt_len = name, prompt_len
        self._prompt: list[bytes] = []
        self._output: list[bytes] = []

    def reusable(self, known: int) -> int:
        return min(known, self.known)

    def read(self, position: int, rows: np.ndarray) -> None:
        """Take the rows [n, …] of ``position`` and the positions after it; none may be skipped."""
        if position > self.known:
            raise RuntimeError(f"{self._name}: rows from position {position} on, and only {self.known} are known")
        edge = max(0, self._prompt_len - position)
        first = self.known - position
        self._prompt.append(rows[first:edge].tobytes())
        self._output.append(rows[max(first, edge) :].tobytes())
        self.known = max(self.known, position + len(rows))

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        if committed.kind != "extend":
            self.read(committed.position - 1, committed.outputs[self._name][committed.index, : committed.count])
        self.hand_over(delta, _taken(self._prompt) if committed.first else None, _taken(self._output))

    def hand_over(self, delta: TokenDelta, prompt: bytes | None, output: bytes) -> None:
        """Add the rows read since the last call to ``delta``. prompt: only with the first tokens."""
        raise NotImplementedError


def _taken(parts: list[bytes]) -> bytes:
    """All parts, which leave the list."""
    data = b"".join(parts)
    parts.clear()
    return data


def read_rows(name: str, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
    """Have each request's state read its rows of a prompt pass, if the pass has the field."""
    if name in outputs:
        for row in rows:
            with row.alone():
                row.state.read(row.start, outputs[name][row.first : row.first + row.end - row.start])
