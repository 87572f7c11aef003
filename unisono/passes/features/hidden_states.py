"""Final hidden states returned to the caller, of prompt tokens and of all generated ones but the last.

The token at p + 1 is sampled from the hidden state of position p. Vectors travel as the int32 words of their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unisono.graphs import NO_FEATURES, Features, Field
from unisono.passes.features.base import (
    Computed,
    Feature,
    FeatureContext,
    HostPass,
    PassKind,
    RequestState,
    Row,
    words_of,
)
from unisono.passes.features.token_rows import TokenRows, read_rows
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
        read_rows("hidden", rows, outputs)


class HiddenStates(TokenRows):
    """State of one request. known, prompt_len: of :class:`TokenRows`. dtype, size: of a hidden state."""

    def __init__(self, known: int, prompt_len: int, dtype: str, size: int) -> None:
        super().__init__("hidden", known, prompt_len)
        self._dtype, self._size = dtype, size

    def hand_over(self, delta: TokenDelta, prompt: bytes | None, output: bytes) -> None:
        if prompt is not None:
            delta.prompt_hidden_states = Vectors(self._dtype, self._size, prompt)
        delta.hidden_states = Vectors(self._dtype, self._size, output)
