"""A request's logit edits as one row of the edit table that ``kernels/edits.py`` reads.

The engine packs a row when a request that edits claims a slot; requests that do not have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from unisono.kernels import edits as layout
from unisono.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadRequest, SamplingParams


def row_words(vocab_size: int) -> int:
    """int32 words of a table row: what is fixed, and a bit for each token."""
    return layout.ALLOWED.value + -(-vocab_size // 32)


def check_edits(params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises BadRequest, naming the value and the limit, for edits that a row cannot hold."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    named["bad_words"] = [token for word in bad_words for token in word]
    for name, tokens in named.items():
        wrong = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"{name} has token id {wrong}; the vocabulary's ids are 0 to {vocab_size - 1}.", name)
    if len(bad_words) > MAX_BAD_WORDS:
        raise BadRequest(
            f"bad_words make {len(bad_words)} token sequences; at most {MAX_BAD_WORDS} are supported.", "bad_words"
        )
    wrong = next((len(word) for word in bad_words if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS), None)
    if wrong is not None:
        raise BadRequest(f"one of bad_words has {wrong} tokens; 1 to {MAX_BAD_WORD_TOKENS} are supported.", "bad_words")


def pack_edits(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt_len: int, vocab_size: int
) -> np.ndarray | None:
    """The table row of a checked request, int32 ``[row_words(vocab_size)]``; None where nothing is edited.

    A structured output is edited by the masks of its passes, which know when ``min_tokens`` can be honoured.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    bias, allowed, structured = params.logit_bias, params.allowed_token_ids, params.structured_outputs is not None
    min_tokens = 0 if structured else params.min_tokens
    if penalties == (1, 0, 0) and not (bias or bad_words or min_tokens or structured) and allowed is None:
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
