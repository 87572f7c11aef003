"""Filters (top-k, top-p, min-p) see the whole distribution, so passes with such requests ask for whole rows of logits.

Where the LM head is divided among ranks, other passes gather the best keys of each rank instead
(``kernels/sampling/column_keys.py``). No fixed number of them serves a filter exactly: all ties at the threshold of
top-k stay, and the mass of top-p is summed over the row in one order. Edits treat each logit by itself and need no
whole row. Elsewhere this feature is never asked for.
"""

from __future__ import annotations

import numpy as np

from unisono.graphs import NO_FEATURES, Features
from unisono.passes.features.base import Feature, FeatureContext, HostPass, RequestState
from unisono.types import EngineRequest


class Filters(Feature):
    """It has no fields and reports nothing: it only says what a pass needs."""

    name = "filters"
    mixes = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._divided = context.whole_logits != NO_FEATURES
        self.asks_by = ("params.top_k", "params.top_p", "params.min_p") if self._divided else ()

    def begin(self, request: EngineRequest) -> RequestState | None:
        p = request.params
        filters = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        return RequestState() if filters and self._divided else None

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        return self.context.whole_logits, {}
