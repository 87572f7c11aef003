"""Filters (top-k, top-p, min-p) read the whole distribution, so passes with such requests have whole rows of logits.

If the LM head is divided among ranks, other passes gather the best keys of each rank instead
(``kernels/sampling/column_keys.py``). No fixed number of keys serves a filter exactly: all ties at the threshold of
top-k stay, and the mass of top-p is summed over the row in one order. Edits treat each logit by itself and need no
whole row. Without a divided LM head, no request uses this feature.
"""

from __future__ import annotations

import numpy as np

from unisono.graphs import NO_FEATURES, Features
from unisono.passes.features.base import Feature, FeatureContext, HostPass, RequestState
from unisono.types import EngineRequest


class Filters(Feature):
    """Requests whole logits. Has no fields and reports nothing."""

    name = "filters"
    mixes = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._divided = context.whole_logits != NO_FEATURES
        self.requested_by = ("params.top_k", "params.top_p", "params.min_p") if self._divided else ()

    def begin(self, request: EngineRequest) -> RequestState | None:
        p = request.params
        filters = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        return RequestState() if filters and self._divided else None

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        return self.context.whole_logits, {}
