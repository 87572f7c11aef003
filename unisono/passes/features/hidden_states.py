"""Final hidden states returned to the caller, of prompt tokens and of all generated ones but the last.

The token at p + 1 is sampled from the hidden state of position p. A request that resumes after preemption computes some
of them again; these are skipped. Vectors travel as the int32 words of their bits.
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
    FeatureContext,
    HostPass,
    PassKind,
    RequestState,
    Row,
    words_of,
)
from unisono.types import EngineRequest, TokenDelta, Vectors


class ReturnedHiddenStates(Feature):
    """Field: ``hidden``, for all tokens of a prompt pass and all positions of a round."""

    name = "hidden_states"
    requested_by = ("params.return_hidden_states",)
    needs = Features(returned=True)
    reads_all_tokens = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        if context.pools:
            self.expected = self.needs

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        words = words_of(self.context.hidden_size, self.context.dtype)
        rows = ("rows",) if kind == "extend" else ("rows", "width")
        return (Field("hidden", torch.int32, (*rows, words), output=True, feature=self.needs),)

    def begin(self, request: EngineRequest) -> RequestState | None:
        if not request.params.return_hidden_states:
            return None
        prompt_len = len(request.prompt_token_ids)
        # For several sequences of one prompt, the first returns the prompt's hidden states.
        known = 0 if request.shares_with is None else prompt_len
        return HiddenStates(known, prompt_len, str(self.context.dtype).removeprefix("torch."), self.context.hidden_size)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        needed = host.kind != "extend" or any(row.end > row.state.known for row in host.rows)
        return self.needs if needed else NO_FEATURES, {}

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
    """State of one request. known: positions read so far, from 0 on. prompt_len: end of the prompt's positions.

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
        """Take the hidden states ``rows [n, words]`` of ``position`` and the positions after it; none may be
        skipped."""
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
        """Hidden states read since the last call."""
        data = b"".join(parts)
        parts.clear()
        return Vectors(self._dtype, self._size, data)
