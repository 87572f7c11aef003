"""The vision encoder as a program: image patches in, embeddings into the encoder cache.

A pass takes whole frames of any number of requests, side by side; a frame's embeddings depend on its own patches only.
The feature ``media`` launches it before the prompt pass that reads them.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.graphs import Buffers, BufferSchema, Field, Program
from unisono.kernels.speculation.catch_up import keep_rows
from unisono.passes.features.base import words_of

NAME = "encode"


def encode_program(tower: Any, cache: torch.Tensor) -> Program:
    """Encode ``rows`` patches with a :class:`unisono.models.vision.tower.VisionTower`.

    cache [n, (1 + levels) · H]: for each token its embedding, followed by one part per deepstack level. Fields besides
        the tower's own: ``pixels``, the bits of the patches; ``cache_rows``, the cache row of each token, -1 for
        padding.
    """
    own, config = tower.fields(), tower.config
    schema = BufferSchema(
        (
            Field("pixels", torch.int32, ("rows", words_of(config.patch_elements, cache.dtype))),
            Field("cache_rows", torch.int32, ("rows",), pad=-1),  # several patches per token: the first of each counts
            *own,
        )
    )

    def run(b: Buffers) -> None:
        embeddings = tower(b.pixels.view(cache.dtype), {field.name: getattr(b, field.name) for field in own})
        keep_rows(cache, b.cache_rows[: embeddings.shape[0]], embeddings)

    return Program(NAME, schema, run)
