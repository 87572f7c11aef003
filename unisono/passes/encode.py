"""The vision encoder as a program: patches of pictures in, their embeddings into the encoder cache.

A pass takes whole frames of any number of requests, side by side; a frame's embeddings depend on its own patches only.
The feature ``media`` launches it before the prompt pass that reads them.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.graphs import Buffers, Field, Program, Schema
from unisono.kernels.speculation.catch_up import keep_rows
from unisono.passes.features.base import words_of

NAME = "encode"


def encode_program(tower: Any, cache: torch.Tensor) -> Program:
    """Encode ``rows`` patches of a :class:`unisono.models.vision.tower.VisionTower`.

    cache [n, (1 + levels) · H]: of each token the embedding, then what each deepstack level adds. Fields beside the
    tower's own: ``pixels``, the patches' bits; ``cache_rows``, for each token the row of the cache that it is written
    to, -1 for padding.
    """
    own, config = tower.fields(), tower.config
    schema = Schema(
        (
            Field("pixels", torch.int32, ("rows", words_of(config.patch_elements, cache.dtype))),
            Field("cache_rows", torch.int32, ("rows",), pad=-1),  # a token is several patches: only the first are used
            *own,
        )
    )

    def run(b: Buffers) -> None:
        embeddings = tower(b.pixels.view(cache.dtype), {field.name: getattr(b, field.name) for field in own})
        keep_rows(cache, b.cache_rows[: embeddings.shape[0]], embeddings)

    return Program(NAME, schema, run)
