"""Final hidden states for the caller, of prompt tokens and of generated ones but the last.

Position p's hidden state is the one that the token at p + 1 was sampled from. A request that resumes after preemption
computes some of them again; they are passed over. Vectors travel as the int32 words of their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unisono.graphs import NO_FEATURES, Features, Field
from unisono.passes.features.base import (
    Committed,
    Computed,
    Feature,
    HostPass,
    PassKind,
    RequestState,
    Row,
    words_of,
)
from unisono.types import EngineRequest, TokenDelta, Vectors


class ReturnedHiddenStates(Feature):
    """Field: ``hidden``, of all tokens of a prompt pass, and of all positions of a round."""

    name = "hidden_states"
    asks_by = ("params.return_hidden_states",)
    asks = Features(returned=True)
    reads_all_tokens = True

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        words = words_of(self.context.hidden_size, self.context.dtype)
        rows = ("rows",) if kind == "extend" else ("rows", "width")
        return (Field("hidden", torch.int32, (*rows, words), output=True, feature=self.asks),)

    def begin(self, request: EngineRequest) -> RequestState | None:
        if not request.params.return_hidden_states:
            return None
        prompt_len = len(request.prompt_token_ids)
        # Those of a prompt with several sequences come with the first of them.
        known = 0 if request.shares_with is None else prompt_len
        return HiddenStates(known, prompt_len, str(self.context.dtype).removeprefix("torch."), self.context.hidden_size)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        wanted = host.kind != "extend" or any(row.end > row.state.known for row in host.rows)
        return self.asks if wanted else NO_FEATURES, {}

    def report(self, computed: Computed) -> None:
        out = computed.outputs.find("hidden")
        if out is not None:
            out = out.view(computed.hidden.dtype)
            out.copy_(computed.hidden.view_as(out))

    def read_prompt(self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
        if "hidden" in outputs:
            for row in rows:
                with row.alone():
                    row.state.read(row.start, outputs["hidden"][row.first : row.first + row.end - row.start])


class HiddenStates(RequestState):
    """Of one request. known: positions read so far, from 0 on. prompt_len: where those of the prompt end.

    dtype, size: of a hidden state.
    """

    def __init__(self, known: int, prompt_len: int, dtype: str, size: int) -> None:
        self.known = known
        self._prompt_len, self._dtype, self._size = prompt_len, dtype, size
        self._prompt: list[bytes] = []
        self._output: list[bytes] = []

    def reusable(self, known: int) -> int:
        return min(known, self.known)

    def read(self, position: int, rows: np.ndarray) -> None:
        """Take the hidden states ``rows [n, words]`` of ``position`` and those after it; none may be left out."""
        if position > self.known:
            raise RuntimeError(f"hidden states from position {position} on, and only {self.known} are known")
        edge = max(0, self._prompt_len - position)
        first = self.known - position
        self._prompt.append(rows[first:edge].tobytes())
        self._output.append(rows[max(first, edge) :].tobytes())
        self.known = max(self.known, position + len(rows))

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        if committed.kind != "extend":
            self.read(committed.position - 1, committed.outputs["hidden"][committed.index, : committed.count])
        if committed.first:
            delta.prompt_hidden_states = self._take(self._prompt)
        delta.hidden_states = self._take(self._output)

    def _take(self, parts: list[bytes]) -> Vectors:
        """What was read since the last call."""
        data = b"".join(parts)
        parts.clear()
        return Vectors(self._dtype, self._size, data)
