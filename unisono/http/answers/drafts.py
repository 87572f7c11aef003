"""Drafts in answers: the origin of each token (``return_drafts``), and acceptance per request
(``--per-request-spec-decode-metrics``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from unisono.http.openai.responses import AnswerMetrics, TokenOrigin
from unisono.types import FinishReason, TokenDelta
from unisono.types.acceptance import DraftCount


@dataclass(frozen=True)
class AcceptanceReport:
    """Reports the acceptance of an answer's drafts. level: a value of ``unisono.types.acceptance.LEVELS``."""

    level: str = "none"
    drafter: str = "none"
    num_spec_tokens: int = 0

    @classmethod
    def of(cls, level: str, info: Mapping[str, Any]) -> AcceptanceReport:
        """The report of an engine with this ``info``."""
        speculation = info.get("speculation") or {}
        return cls(level, speculation.get("drafter", "none"), speculation.get("num_speculative_tokens", 0))

    def metrics(self, counts: Sequence[DraftCount]) -> AnswerMetrics | UnsetType:
        """The metrics of an answer. counts: one of each sequence.

        vLLM's rule: absent at level "none"; null for several sequences, and without a drafter.
        """
        if self.level == "none":
            return UNSET
        if len(counts) != 1 or self.drafter == "none":
            return AnswerMetrics(None)
        return AnswerMetrics(counts[0].result(self.drafter, self.num_spec_tokens, self.level == "detailed"))


def by_token(delta: TokenDelta) -> Iterator[tuple[TokenDelta, TokenOrigin | None]]:
    """Split a delta into deltas of one token, each with the origin of its token.

    Together they equal the delta, except for prompt and hidden states. The last one has its ``finish``. The ``rounds``
    of a round's later tokens are empty, or an accepted draft without drafted ones. A delta without tokens is returned
    unchanged, with None.
    """
    if not delta.token_ids:
        yield delta, None
        return
    done, last = 0, len(delta.token_ids) - 1
    for (tokens, drafted, accepted), fewer in zip(delta.rounds, delta.fewer_drafts, strict=True):
        for place in range(tokens):
            is_draft = place < accepted
            yield (
                TokenDelta(
                    delta.request_id,
                    [delta.token_ids[done]],
                    delta.finish if done == last else FinishReason.RUNNING,
                    logprobs=delta.logprobs and [delta.logprobs[done]],
                    drafted_tokens=0 if place else drafted,
                    accepted_tokens=int(is_draft),
                    joined=[(1, 0 if place else drafted, int(is_draft))] if is_draft or not place else [],
                    joined_fewer=[fewer] if fewer and not place else None,
                ),
                TokenOrigin(place if is_draft else None, drafted, accepted),
            )
            done += 1
