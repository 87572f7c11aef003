"""Log-probabilities of the generated tokens and of the most likely alternatives at each position."""

from __future__ import annotations

import numpy as np
import torch

from unisono.graphs import Features, Field
from unisono.kernels.sampling.logprobs import WORDS
from unisono.passes.features.base import Committed, Computed, Feature, HostPass, PassKind, RequestState
from unisono.sampling.logprobs import unpack_logprobs
from unisono.sampling.pipeline import report_logprobs
from unisono.types import EngineRequest, TokenDelta


class OutputLogprobs(Feature):
    """Field: ``logprobs``, present in every pass with whole rows of logits. Rows of other requests cost almost nothing,
    so one graph serves all. Unless ranks divide the logits, these are all passes that sample."""

    name = "output_logprobs"
    requested_by = ("params.logprobs", "params.logprob_token_ids")
    mixes = True

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        shape = (*self.context.sampled(kind), WORDS)
        return (Field("logprobs", torch.int32, shape, output=True, feature=self.context.whole_logits),)

    def begin(self, request: EngineRequest) -> RequestState | None:
        alternatives = request.params.found_logprobs
        return None if alternatives is None else OutputLogprobsState(alternatives)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        return self.context.whole_logits, {}

    def report(self, computed: Computed) -> None:
        c, out = computed, computed.outputs.find("logprobs")
        if out is None:
            return
        report_logprobs(c.logits, c.rows, c.width, c.sampled, self.context.slots, self.context.reported, out)


class OutputLogprobsState(RequestState):
    """State of one request. alternatives: tokens to report at each position."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        words = committed.outputs["logprobs"][committed.index, : committed.count]
        delta.logprobs = unpack_logprobs(words, self._alternatives)
