"""The logits pipeline: what happens between the LM head and a token.

Processors that edit logits (penalties, bias, masks) belong before ``sample``: filters see edited logits.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from unisono.kernels.sampling import sample


class SamplingFields(Protocol):
    """The slot fields that sampling reads, each ``[S]``, as ``kernels/sampling.py`` describes them."""

    length: Tensor
    status: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_lo: Tensor
    seed_hi: Tensor


def pick(
    logits: Tensor, slots: Tensor, width: int, fields: SamplingFields, offset: int = 0, ids: Tensor | None = None
) -> Tensor:
    """A token for every row of logits [R * width, V], slots [R] int32 -> tokens [R * width] int32.

    Row r * width + j stands at position ``fields.length[slots[r]] + offset + j``; ``ids`` names the token of each
    column where a drafter knows only some. Drafting, verification and plain decoding pick by this one rule, with
    noise keyed by (seed, position, token id): equal logits give equal tokens whoever asks, and near ones mostly
    do (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    return sample(
        logits, slots, width, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids,
    )  # fmt: skip
