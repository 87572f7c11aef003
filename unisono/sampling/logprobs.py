"""Unpacks the output of ``kernels/sampling/logprobs.py`` into ``TokenLogprobs``."""

from __future__ import annotations

import numpy as np

from unisono.types import MAX_LOGPROBS, TokenLogprobs


def unpack_logprobs(words: np.ndarray, alternatives: int) -> list[TokenLogprobs]:
    """Unpack rows [n, WORDS] int32 of the op's output. alternatives: likely tokens to return per row."""
    ids, values = words[:, 2:][:, :alternatives], words.view(np.float32)
    tops = values[:, 2 + MAX_LOGPROBS :][:, :alternatives]
    lines = zip(values[:, 0].tolist(), words[:, 1].tolist(), ids.tolist(), tops.tolist(), strict=True)
    return [TokenLogprobs(own, rank, list(zip(i, v, strict=True))) for own, rank, i, v in lines]
