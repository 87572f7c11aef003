"""Marks each token of a delta as an accepted draft or the model's own: the field ``return_drafts``."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.http.openai.responses import TokenOrigin
from unisono.types import FinishReason, TokenDelta


def by_token(delta: TokenDelta) -> Iterator[tuple[TokenDelta, TokenOrigin | None]]:
    """Split a delta into deltas of one token, each with the origin of its token.

    Together they equal the delta, except for prompt and hidden states. The last one has its ``finish``. A delta without
    tokens is returned unchanged, with None.
    """
    if not delta.token_ids:
        yield delta, None
        return
    done, last = 0, len(delta.token_ids) - 1
    for tokens, drafted, accepted in delta.rounds:
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
                ),
                TokenOrigin(place if is_draft else None, drafted, accepted),
            )
            done += 1
