"""Prompts of models whose tokens see later ones, too: each is computed in one pass, from its first token on.

Such models (encoders, EmbeddingGemma) embed and classify. A prompt is never cut into chunks and takes nothing from the
prefix cache, because a token's state depends on all tokens of its prompt.
"""

from __future__ import annotations

import torch

from unisono.graphs import Buffers
from unisono.passes.features.base import Feature, FeatureContext, RequestState, TargetTokens
from unisono.types import BadRequest, EngineRequest


class WholePrompts(Feature):
    """Sets the last position that each token sees: that of its prompt's last token. No fields."""

    name = "whole_prompts"

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self.requested_by = None if context.whole_text else ()

    def begin(self, request: EngineRequest) -> RequestState | None:
        """See :meth:`Feature.begin`. Raises BadRequest for a prompt longer than a pass, and for a request for text."""
        if not self.context.whole_text:
            return None
        length, most = len(request.prompt_token_ids), self.context.max_tokens
        if length > most:
            raise BadRequest(
                f"The prompt has {length} tokens, which see each other in both directions, so it has to fit a pass of "
                f"{most} tokens: shorten it, or raise --max-num-batched-tokens.",
                "prompt",
            )
        if request.params.max_tokens != 1:
            raise BadRequest(
                "This model's tokens see later ones, so it writes no text: give max_tokens=1.", "max_tokens"
            )
        return WholePrompt(length)

    def seen_until(self, buffers: Buffers, positions: torch.Tensor) -> torch.Tensor | None:
        """See :meth:`Feature.seen_until`."""
        if not self.context.whole_text:
            return None
        last = buffers.start + buffers.query_start.diff() - 1
        tokens = TargetTokens(buffers.slots, positions.shape[0], None, buffers.query_start)
        return tokens.spread(last.to(torch.int32), -1)


class WholePrompt(RequestState):
    """State of one request. length: tokens of its prompt."""

    def __init__(self, length: int) -> None:
        self._length = length

    def reach(self, start: int, end: int) -> int:
        return end if end >= self._length else start

    def least_end(self, start: int) -> int:
        return self._length

    def reusable(self, known: int) -> int:
        return 0
