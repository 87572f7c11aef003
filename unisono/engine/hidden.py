"""Hidden states on their way to the caller: which positions are known, and what is not handed out yet.

Position p's hidden state is the one that the token at p + 1 was picked from. The engine reads them from passes in
order; a request that resumes computes some of them again, which are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unisono.types import Vectors


@dataclass
class HiddenStates:
    """Of one request. known: positions read so far, from 0 on. prompt_len: where those of the prompt end.

    dtype, size: of a hidden state.
    """

    known: int
    prompt_len: int
    dtype: str
    size: int
    _prompt: list[bytes] = field(default_factory=list)
    _output: list[bytes] = field(default_factory=list)

    def read(self, position: int, rows: np.ndarray) -> None:
        """Take the hidden states ``rows [n, words]`` of ``position`` and those behind it; none may be left out."""
        if position > self.known:
            raise RuntimeError(f"hidden states from position {position} on, and only {self.known} are known")
        edge = max(0, self.prompt_len - position)
        first = self.known - position
        self._prompt.append(rows[first:edge].tobytes())
        self._output.append(rows[max(first, edge) :].tobytes())
        self.known = max(self.known, position + len(rows))

    def take_prompt(self) -> Vectors:
        """Those of prompt tokens that were read since the last call."""
        return self._take(self._prompt)

    def take_output(self) -> Vectors:
        """Those of generated tokens that were read since the last call."""
        return self._take(self._output)

    def _take(self, parts: list[bytes]) -> Vectors:
        data = b"".join(parts)
        parts.clear()
        return Vectors(self.dtype, self.size, data)
