"""Log-probabilities of more tokens than a kernel finds: of the whole vocabulary, or of tokens that a request names.

The logits of sampled positions go to the host as they are (``processed_logprobs``: as tokens are drawn from them), and
the host normalises and sorts them in float64, so that the numbers depend on the row alone. That is dear, V numbers a
token; ``--max-logprobs`` bounds who may ask for it, and only passes with such a request have the field.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from unisono.graphs import Features, Field
from unisono.kernels.sampling.sampler import GREEDY_BELOW
from unisono.passes.features.base import Committed, Computed, Feature, PassKind, RequestState
from unisono.types import EngineRequest, TokenDelta

WIDE = Features(extra=frozenset({"wide_logprobs"}))


class WideLogprobs(Feature):
    """Field: ``wide_logits``. :class:`OutputLogprobs` comes before it and reports the tokens' own."""

    name = "wide_logprobs"
    asks_by = ("params.logprobs", "params.logprob_token_ids")
    mixes = True
    asks = WIDE

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        dims = (*self.context.sampled(kind), self.context.vocab_size)
        return (Field("wide_logits", torch.float32, dims, output=True, feature=WIDE),)

    def begin(self, request: EngineRequest) -> RequestState | None:
        params = request.params
        if not params.wants_wide_logprobs:
            return None
        assert params.logprobs is not None
        return _State(params.logprobs, params.logprob_token_ids)

    def report(self, computed: Computed) -> None:
        out = computed.outputs.find("wide_logits")
        if out is None:
            return
        logits = computed.logits.float()
        if self.context.processed_logprobs:
            logits = self._processed(computed, logits)
        out.copy_(logits.view_as(out))

    def _processed(self, computed: Computed, logits: torch.Tensor) -> torch.Tensor:
        """What tokens are drawn from, [N · W, V]: edited, divided by the temperature, -inf for what was dropped."""
        slots, sampled = self.context.slots, computed.sampled
        rows = computed.rows.repeat_interleave(computed.width)
        edits = slots.edits.index_select(0, rows)[:, None]
        t = slots.temperature.index_select(0, rows)[:, None]
        assert sampled.edited is not None, "OutputLogprobs asks for whole logits"
        assert sampled.threshold is not None
        value = torch.where(edits != 0, sampled.edited, logits)
        drawn = t >= float(GREEDY_BELOW.value)
        scaled = value / torch.where(drawn, t, 1.0)
        scaled = scaled.masked_fill(value < sampled.threshold[:, None], float("-inf"))
        return torch.where(drawn, scaled, value)


class _State(RequestState):
    """wanted: how many likely tokens, -1 for all. named: these tokens instead."""

    def __init__(self, wanted: int, named: Sequence[int] | None) -> None:
        self._wanted, self._named = wanted, None if named is None else np.asarray(named)

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        assert delta.logprobs is not None
        rows = committed.outputs["wide_logits"][committed.index, : committed.count]
        for report, row in zip(delta.logprobs, rows, strict=True):
            report.top = self._likeliest(row)

    def _likeliest(self, row: np.ndarray) -> list[tuple[int, float]]:
        """The wanted tokens and their log-probabilities, most likely first, ties to the lowest id. row: logits [V]."""
        values = np.nan_to_num(row.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        top = values.max()
        values -= top + np.log(np.exp(values - top).sum())
        ids = np.arange(len(values)) if self._named is None else np.sort(self._named)
        order = ids[np.argsort(-values[ids], kind="stable")]
        if self._named is None and self._wanted >= 0:
            order = order[: self._wanted]
        return list(zip(order.tolist(), values[order].astype(np.float32).tolist(), strict=True))
