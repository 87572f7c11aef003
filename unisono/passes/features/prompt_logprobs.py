"""Log-probabilities of prompt tokens: a prompt pass *scores* each token by the logits of the position before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unisono.graphs import Features, Field, Logits, selected_rows
from unisono.kernels.sampling.logprobs import WORDS
from unisono.passes.features.base import (
    Committed,
    Computed,
    Feature,
    FeatureContext,
    HostPass,
    PassKind,
    RequestState,
    Row,
)
from unisono.sampling.logprobs import unpack_logprobs
from unisono.sampling.pipeline import report_prompt_logprobs
from unisono.types import EngineRequest, TokenDelta, TokenLogprobs

SCORED = Features(logits=Logits.SELECTED)

TOKENS_AT_ONCE = 256
"""Prompt tokens whose logits exist at one time if all of them are scored."""


class PromptLogprobs(Feature):
    """Fields: ``score_rows``, tokens whose logits score the prompt token after them (-1: none), and the reported
    values.

    Passes that score use graphs of their own program (``extend.prompt_program``).
    """

    name = "prompt_logprobs"
    requested_by = ("params.prompt_logprobs",)
    reads_all_tokens = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._padding = context.slots.length.shape[0] - 1

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind != "extend":
            return ()
        return (
            Field("score_rows", torch.int32, ("scored",), pad=-1, feature=SCORED),
            Field("prompt_logprobs", torch.int32, ("scored", WORDS), output=True, feature=SCORED),
        )

    def begin(self, request: EngineRequest) -> RequestState | None:
        return None if request.params.prompt_logprobs is None else PromptLogprobsState(request)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        if host.kind != "extend":
            return self.needs, {}
        parts = [row.first - row.start + np.array(row.state.scored_by(row)) for row in host.rows]
        rows = np.concatenate(parts).astype(np.int32)
        if not len(rows):
            return self.needs, {}
        logits = Logits.SELECTED if len(rows) <= selected_rows(host.tokens) else Logits.ALL
        return Features(logits=logits), {"score_rows": rows}

    def report(self, computed: Computed) -> None:
        b, out = computed.buffers, computed.outputs.find("prompt_logprobs")
        if out is None:
            return
        slots, rows = self.context.slots, b.score_rows
        token = rows.clamp_min(0)
        row = torch.searchsorted(b.query_start[1:], token, right=True).clamp_max(b.slots.shape[0] - 1)
        scored_slots = b.slots.index_select(0, row).masked_fill(rows < 0, self._padding)
        next_ids = b.next_ids.index_select(0, token)
        for part in (slice(i, i + TOKENS_AT_ONCE) for i in range(0, token.shape[0], TOKENS_AT_ONCE)):
            logits = self.context.logits(computed.hidden.index_select(0, token[part]))
            report_prompt_logprobs(logits, scored_slots[part], next_ids[part], slots, self.context.reported, out[part])

    def read_prompt(self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
        at = 0
        for row in rows:
            scored = row.state.scored_by(row)
            if scored:
                with row.alone():
                    row.state.take(scored, outputs["prompt_logprobs"][at : at + len(scored)])
                at += len(scored)


class PromptLogprobsState(RequestState):
    """Scores read so far, by position. ``_positions``: prompt positions to report; empty after they were delivered."""

    def __init__(self, request: EngineRequest) -> None:
        alternatives = request.params.prompt_logprobs
        assert alternatives is not None
        self._alternatives = alternatives
        self._positions = range(request.first_scored, len(request.prompt_token_ids))
        self._read: dict[int, TokenLogprobs] = {}

    def reusable(self, known: int) -> int:
        return min(known, self._positions.start - 1) if self._positions else known

    def scored_by(self, row: Row) -> range:
        """Positions of the row whose logits score the prompt token after them."""
        positions = self._positions
        return range(max(row.start, positions.start - 1), min(row.end, positions.stop - 1))

    def take(self, scored: range, words: np.ndarray) -> None:
        """Read ``words [n, WORDS]`` of the tokens after these n positions."""
        self._read |= zip((p + 1 for p in scored), unpack_logprobs(words, self._alternatives), strict=True)

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        if committed.first:
            delta.prompt_logprobs = [self._read[position] for position in self._positions]
            self._positions = range(0)
