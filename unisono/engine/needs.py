"""What each Need adds to a pass: fields of its schema, and the ops that read or fill them.

Called by ``engine/programs.py`` inside passes, and by the runner to say what a pass needs. Vectors travel as the int32
words of their bits, since every field is of a four-byte type.
"""

from __future__ import annotations

import torch

from unisono.kernels.logprobs import WORDS as LOGPROB_WORDS
from unisono.program import Buffers, Field, Logits, Needs, selected_rows

Overriding = tuple[torch.Tensor, torch.Tensor]
"""Embeddings [T, H], and a flag [T] of the tokens whose own they replace."""


def words_of(size: int, dtype: torch.dtype) -> int:
    """int32 words of a vector of so many numbers. Raises ValueError where that is no whole number."""
    words, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(f"{size} numbers of {dtype} do not fill four-byte words")
    return words


def logits_need(scored: int, rows: int) -> Logits:
    """The least that a pass of so many tokens needs to score so many of them."""
    return Logits.LAST if not scored else Logits.SELECTED if scored <= selected_rows(rows) else Logits.ALL


def extend_fields(needs: Needs, size: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """The fields that a prompt pass has for its needs; size, dtype: of an embedding or a hidden state."""
    fields = []
    if needs.embeddings:
        fields.append(Field("embeddings", torch.int32, ("rows", words_of(size, dtype))))
        fields.append(Field("overridden", torch.int32, ("rows",)))
    if needs.logits:
        rows = "rows" if needs.logits is Logits.ALL else "selected"
        fields.append(Field("score_rows", torch.int32, (rows,), pad=-1))
        fields.append(Field("prompt_logprobs", torch.int32, (rows, LOGPROB_WORDS), output=True))
    if needs.returned:
        fields.append(Field("hidden", torch.int32, ("rows", words_of(size, dtype)), output=True))
    return tuple(fields)


def round_fields(needs: Needs, size: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """The fields that a round has for its needs; size, dtype: of a hidden state."""
    if not needs.returned:
        return ()
    return (Field("hidden", torch.int32, ("rows", "width", words_of(size, dtype)), output=True),)


def overriding(b: Buffers, needs: Needs, dtype: torch.dtype) -> Overriding | None:
    """What the batch brings in place of token embeddings."""
    return (b.embeddings.view(dtype), b.overridden) if needs.embeddings else None


def return_hidden(b: Buffers, needs: Needs, hidden: torch.Tensor) -> None:
    """Hand the pass's final hidden states to the host: [T, H] of a prompt pass, [R · W, H] of a round."""
    if needs.returned:
        out = b.hidden.view(hidden.dtype)
        out.copy_(hidden.view_as(out))
