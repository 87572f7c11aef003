"""Log-probabilities of more tokens than the kernel reports: of the whole vocabulary, or of tokens named by a request.

The logits of sampled positions are copied to the host unchanged (in processed modes: as tokens are drawn from them).
The host normalises (unless logits are reported) and sorts them in float64, so that the numbers depend on the row alone.
This is expensive, V numbers per token. ``--max-logprobs`` limits its use, and only passes with such a request have the
field.
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
    """Field: ``wide_logits``. :class:`OutputLogprobs` runs before it and reports the sampled tokens' own values."""

    name = "wide_logprobs"
    requested_by = ("params.logprobs", "params.logprob_token_ids")
    mixes = True
    needs = WIDE

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        dims = (*self.context.sampled(kind), self.context.vocab_size)
        return (Field("wide_logits", torch.float32, dims, output=True, feature=WIDE),)

    def begin(self, request: EngineRequest) -> RequestState | None:
        params = request.params
        if not params.wants_wide_logprobs:
            return None
        assert params.logprobs is not None
        return WideLogprobsState(params.logprobs, params.logprob_token_ids, self.context.reported.normalized)

    def report(self, computed: Computed) -> None:
        out = computed.outputs.find("wide_logits")
        if out is None:
            return
        logits = computed.logits.float()
        if self.context.reported.processed:
            logits = self._processed(computed, logits)
        out.copy_(logits.view_as(out))

    def _processed(self, computed: Computed, logits: torch.Tensor) -> torch.Tensor:
        """Logits as used for the draw, [N · W, V]: edited, divided by the temperature, -inf for filtered tokens."""
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


class WideLogprobsState(RequestState):
    """State of one request. count: number of likely tokens, -1 for all. named: report these tokens instead.
    normalized: report log-probabilities; False: logits."""

    def __init__(self, count: int, named: Sequence[int] | None, normalized: bool = True) -> None:
        self._count, self._named = count, None if named is None else np.asarray(named)
        self._normalized = normalized

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        assert delta.logprobs is not None
        rows = committed.outputs["wide_logits"][committed.index, : committed.count]
        for report, row in zip(delta.logprobs, rows, strict=True):
            report.top = self._likeliest(row)

    def _likeliest(self, row: np.ndarray) -> list[tuple[int, float]]:
        """The requested tokens and their values, most likely first, ties by lowest id. row: logits [V]."""
        values = np.nan_to_num(row.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        if self._normalized:
            top = values.max()
            values -= top + np.log(np.exp(values - top).sum())
        ids = np.arange(len(values)) if self._named is None else np.sort(self._named)
        order = ids[np.argsort(-values[ids], kind="stable")]
        if self._named is None and self._count >= 0:
            order = order[: self._count]
        return list(zip(order.tolist(), values[order].astype(np.float32).tolist(), strict=True))
