"""Experts that the target's MoE layers choose for tokens, returned to the caller for router replay.

Rejected drafts leave no trace: rows are those of committed tokens. The routers' choices of a token have the bits of the
token alone, so no batch, chunk or draft changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from unisono.graphs import NO_FEATURES, Buffers, Features, Field
from unisono.passes.features.base import (
    Computed,
    Feature,
    FeatureContext,
    HostPass,
    PassKind,
    RequestState,
    Row,
    TargetTokens,
)
from unisono.passes.features.token_rows import TokenRows, read_rows
from unisono.types import BadRequest, EngineRequest, TokenDelta
from unisono.types.expert_ids import ExpertIds

FIELD = "routed_experts"


class RoutedExperts(Feature):
    """Field: ``routed_experts``, ids of all tokens of a prompt pass and all positions of a round, padded to words."""

    name = FIELD
    requested_by = ("params.return_routed_experts",)
    needs = Features(extra=frozenset({FIELD}))
    reads_all_tokens = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        routers = context.routers
        dtype = "uint8" if routers.experts <= 256 else "uint16"
        self._form = ExpertIds(dtype, len(routers.layers), routers.top_k)
        self._chosen: list[torch.Tensor] = []

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        rows = ("rows",) if kind == "extend" else ("rows", "width")
        words = -(-self._form.row_bytes // 4)
        return (Field(FIELD, torch.int32, (*rows, words), output=True, feature=self.needs),) if words else ()

    def begin(self, request: EngineRequest) -> RequestState | None:
        params, prompt_len = request.params, len(request.prompt_token_ids)
        if not params.return_routed_experts:
            return None
        if not self._form.row_bytes:
            has = "MoE layers of different top_k" if self.context.routers.layers else "no MoE layers"
            raise BadRequest(f"return_routed_experts: the model has {has}; leave it out.", "return_routed_experts")
        # For several sequences of one prompt, the first returns the prompt's experts.
        known = min(params.routed_experts_prompt_start, prompt_len)
        return RoutedExpertsState(self._form, known if request.shares_with is None else prompt_len, prompt_len)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        needed = host.kind != "extend" or any(row.end > row.state.known for row in host.rows)
        return self.needs if needed else NO_FEATURES, {}

    def around_target(self, buffers: Buffers, tokens: TargetTokens) -> AbstractContextManager[None] | None:
        if buffers.find(FIELD) is None:
            return None
        self._chosen = []
        return self.context.routers.recording(self._chosen)

    def report(self, computed: Computed) -> None:
        out = computed.outputs.find(FIELD)
        if out is None:
            return
        ids = torch.cat(self._chosen, 1)
        self._chosen = []
        if computed.places is not None:
            ids = ids.index_select(0, computed.places.clamp_min(0))
        small = out.view(torch.uint8 if self._form.dtype == "uint8" else torch.int16)
        small = small[..., : ids.shape[1]]
        small.copy_(ids.view(small.shape))

    def read_prompt(self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray]) -> None:
        read_rows(FIELD, rows, outputs)

    def info(self) -> Mapping[str, object]:
        if not self._form.row_bytes:
            return {}
        return {FIELD: {"layers": list(self.context.routers.layers), "top_k": self._form.top_k}}


class RoutedExpertsState(TokenRows):
    """State of one request. form: of the ids, without any."""

    def __init__(self, form: ExpertIds, known: int, prompt_len: int) -> None:
        super().__init__(FIELD, known, prompt_len)
        self._form = form

    def read(self, position: int, rows: np.ndarray) -> None:
        """Take the words [n, words] of ``position`` and the positions after it."""
        super().read(position, rows.view(np.uint8)[:, : self._form.row_bytes])

    def hand_over(self, delta: TokenDelta, prompt: bytes | None, output: bytes) -> None:
        if prompt is not None:
            delta.prompt_routed_experts = self._of(prompt)
        delta.routed_experts = self._of(output)

    def _of(self, data: bytes) -> ExpertIds:
        return ExpertIds(self._form.dtype, self._form.layers, self._form.top_k, data)
