"""Structured outputs: what each position may sample follows from the request's grammar and the tokens before it.

The grammar gives a bitmask for each position, drafts included, and only the host can compute it. So the rounds of such
requests are two passes (``round.draft_program``, ``round.verify_program``): the host reads the drafts between them.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from unisono.grammar.compiler import Compiled, Grammars
from unisono.grammar.matcher import ALL, GrammarError, Matcher, fill
from unisono.passes.features.base import Committed, Feature, FeatureContext, HostPass, PassKind, RequestState
from unisono.program import NO_FEATURES, Buffers, Features, Field
from unisono.types import BadRequest, EngineRequest, FinishReason, TokenDelta

MASKS = Features(masks=True)


class Grammar(Feature):
    """Field: ``mask`` [R, P, W, words]: bit i % 32 of word i // 32 allows token i. Padding allows all."""

    name = "grammar"
    asks = MASKS
    reads_drafts = True

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self._grammars = Grammars(context.directory, context.vocab_size, context.eos)
        self._words = -(-context.vocab_size // 32)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind == "round":
            return ()
        rows, width = self.context.sampled(kind)
        paths = 1 if kind == "extend" else self.context.paths
        return (Field("mask", torch.int32, (rows, paths, width, self._words), pad=-1, feature=MASKS),)

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        asked = request.params.structured_outputs
        return None if asked is None else self._grammars.prepare(asked)

    def begin(self, request: EngineRequest) -> RequestState | None:
        """Waits until the grammar is compiled."""
        asked = request.params.structured_outputs
        if asked is None:
            return None
        if self.context.synthetic:
            raise BadRequest(
                "structured_outputs needs drafts that are verified; this server runs with synthetic acceptance, "
                "which accepts them unseen.",
                "structured_outputs",
            )
        return _State(self._grammars.get(asked), request)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        rows = [row for row in host.rows if row.samples]
        if not rows:
            return NO_FEATURES, {}
        drafts = np.empty((host.count, 1, 0), dtype=np.int32) if host.drafts is None else host.drafts
        masks = np.full((host.count, drafts.shape[1], 1 + drafts.shape[2], self._words), ALL, dtype=np.int32)
        fill([row.state.matcher for row in rows], drafts, masks, [row.index for row in rows])
        return MASKS, {"mask": masks}

    def allowed_tokens(self, buffers: Buffers, rows: int) -> torch.Tensor | None:
        mask = buffers.find("mask")
        if mask is None:
            return None
        return mask[:, : rows // mask.shape[0]].reshape(-1, self._words)  # without drafts all paths are one

    def close(self) -> None:
        self._grammars.close()


class _State(RequestState):
    """Follows the request's output. EOS always ends it: masks forbid it as long as the grammar can go on without."""

    def __init__(self, compiled: Compiled, request: EngineRequest) -> None:
        self.stop_ids = compiled.eos
        self.matcher = Matcher(compiled, request.params)

    def deliver(self, delta: TokenDelta, committed: Committed) -> None:
        try:
            self.matcher.accept(committed.tokens)
        except GrammarError as error:
            delta.finish, delta.error = FinishReason.ABORT, f"{error}."
