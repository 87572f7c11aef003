"""Packs a request's logit edits into one row of the edit table that ``kernels/sampling/edits.py`` reads.

The engine packs a row when a request with edits takes a slot; other requests have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.kernels.sampling import edits as layout
from unisono.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams


def row_words(vocab_size: int) -> int:
    """int32 words of a table row: the fixed fields, and one bit per token."""
    return layout.ALLOWED.value + -(-vocab_size // 32)


def pack_edits(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt_len: int, vocab_size: int
) -> np.ndarray | None:
    """Table row of a validated request, int32 ``[row_words(vocab_size)]``; None if nothing is edited.

    Masks edit structured outputs and reasoning with a token budget; the code that makes them also decides when
    ``min_tokens`` can be honoured.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    bias, allowed, structured = params.logit_bias, params.allowed_token_ids, params.structured_outputs is not None
    min_tokens, masked = 0 if structured else params.min_tokens, structured or params.followed_thinking is not None
    if penalties == (1, 0, 0) and not (bias or bad_words or min_tokens or masked) and allowed is None:
        return None
    row = np.zeros(row_words(vocab_size), dtype=np.int32)
    row[:3].view(np.float32)[:] = penalties
    row[3:8] = prompt_len, min_tokens, len(bias), len(bad_words), allowed is not None
    at = layout.BIAS_IDS.value
    row[at : at + len(bias)] = list(bias)
    at = layout.BIASES.value
    row[at : at + len(bias)].view(np.float32)[:] = list(bias.values())
    words = row[layout.WORDS.value :][: MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS].reshape(MAX_BAD_WORDS, -1)
    words[...] = -1
    for line, word in zip(words, bad_words, strict=False):
        line[MAX_BAD_WORD_TOKENS - len(word) :] = word
    if allowed is not None:
        tokens = np.asarray(allowed)
        np.bitwise_or.at(
            row[layout.ALLOWED.value :].view(np.uint32), tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32)
        )
    return row
