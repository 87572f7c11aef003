"""What ``kernels/sampling/logprobs.py`` reports, as the words that every room shares."""

from __future__ import annotations

import numpy as np

from unisono.types import MAX_LOGPROBS, TokenLogprobs


def unpack_logprobs(words: np.ndarray, wanted: int) -> list[TokenLogprobs]:
    """Rows ``[n, WORDS]`` int32 of the op's output, of a request that wants this number of alternatives."""
    ids, values = words[:, 2:][:, :wanted], words.view(np.float32)
    tops = values[:, 2 + MAX_LOGPROBS :][:, :wanted]
    lines = zip(values[:, 0].tolist(), words[:, 1].tolist(), ids.tolist(), tops.tolist(), strict=True)
    return [TokenLogprobs(own, rank, list(zip(i, v, strict=True))) for own, rank, i, v in lines]
