"""What Features add to a pass: fields of its schema, and the ops that read or fill them.

Called by ``engine/programs.py`` inside passes, and by the runner to say what a pass needs. Vectors travel as the int32
words of their bits, since every field is of a four-byte type.
"""

from __future__ import annotations

import torch

from unisono.kernels.logprobs import WORDS as LOGPROB_WORDS
from unisono.program import Buffers, Features, Field, Logits, selected_rows

Overriding = tuple[torch.Tensor, torch.Tensor]
"""Embeddings [T, H], and a flag [T] of the tokens whose own they replace."""

EMBEDDINGS, RETURNED, SCORED, MASKS = (
    Features(embeddings=True),
    Features(returned=True),
    Features(logits=Logits.SELECTED),
    Features(masks=True),
)


def words_of(size: int, dtype: torch.dtype) -> int:
    """int32 words of a vector of so many numbers. Raises ValueError where that is no whole number."""
    words, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(f"{size} numbers of {dtype} do not fill four-byte words")
    return words


def logits_feature(scored: int, rows: int) -> Logits:
    """The least that a pass of so many tokens needs to score so many of them."""
    return Logits.LAST if not scored else Logits.SELECTED if scored <= selected_rows(rows) else Logits.ALL


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: bit i % 32 of word i // 32 allows token i."""
    return -(-vocab_size // 32)


def mask_field(vocab_size: int, rows: int | str, width: int | str, paths: int = 1) -> Field:
    """What ``width`` positions of each path of each row may sample; padding allows all."""
    return Field("mask", torch.int32, (rows, paths, width, mask_words(vocab_size)), pad=-1, feature=MASKS)


def embedding_fields(size: int, dtype: torch.dtype) -> tuple[Field, Field]:
    """What a prompt pass brings in place of token embeddings. size, dtype: of one."""
    words = words_of(size, dtype)
    return (
        Field("embeddings", torch.int32, ("rows", words), feature=EMBEDDINGS),
        Field("overridden", torch.int32, ("rows",), feature=EMBEDDINGS),
    )


def score_fields() -> tuple[Field, Field]:
    """Of a prompt pass: the tokens behind which a prompt token is scored, -1 for none, and what is reported of it."""
    return (
        Field("score_rows", torch.int32, ("scored",), pad=-1, feature=SCORED),
        Field("prompt_logprobs", torch.int32, ("scored", LOGPROB_WORDS), output=True, feature=SCORED),
    )


def hidden_field(size: int, dtype: torch.dtype, *rows: str) -> Field:
    """A pass's final hidden states for the host. size, dtype: of one."""
    return Field("hidden", torch.int32, (*rows, words_of(size, dtype)), output=True, feature=RETURNED)


def overriding(b: Buffers, dtype: torch.dtype) -> Overriding | None:
    """What the batch brings in place of token embeddings."""
    given = b.find("embeddings")
    return None if given is None else (given.view(dtype), b.overridden)


def return_hidden(b: Buffers, hidden: torch.Tensor) -> None:
    """Hand the host a pass's final hidden states, if it wants them: [T, H] of a prompt pass, [R · W, H] of a round."""
    if (out := b.find("hidden")) is not None:
        out = out.view(hidden.dtype)
        out.copy_(hidden.view_as(out))
