"""Embeddings that stand in for those of prompt tokens: whole prompts (``prompt_embeds``), and single positions.

A prompt position that is overridden has no token (PLACEHOLDER), so nothing that looks at tokens sees one there. The
prefix cache knows it by a digest of its embedding: equal embeddings share pages, different ones and token ids never do.
Vectors travel as the int32 words of their bits, since every field is of a four-byte type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from unisono import vectors
from unisono.passes.features.base import Feature, HostPass, Overriding, PassKind, RequestState, words_of
from unisono.program import NO_FEATURES, Buffers, Features, Field
from unisono.types import EngineRequest, Overrides

DIGEST_BYTES = 16

EMBEDDINGS = Features(embeddings=True)


class PromptEmbeds(Feature):
    """Fields: ``embeddings``, and ``overridden``: 1 for each token that has one."""

    name = "prompt_embeds"

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind != "extend":
            return ()
        words = words_of(self.context.hidden_size, self.context.dtype)
        return (
            Field("embeddings", torch.int32, ("rows", words), feature=EMBEDDINGS),
            Field("overridden", torch.int32, ("rows",), feature=EMBEDDINGS),
        )

    def begin(self, request: EngineRequest) -> RequestState | None:
        given = request.overrides
        return None if given is None else Embedded(given, request.prompt_token_ids, self.context.dtype)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        rows, words = [], []
        for row in host.rows if host.kind == "extend" else ():
            positions, given = row.state.within(row.start, row.end)
            rows.append(positions + (row.first - row.start))
            words.append(given)
        if not sum(map(len, rows)):
            return NO_FEATURES, {}
        where = np.concatenate(rows)
        overridden = np.zeros(host.tokens, dtype=np.int32)
        overridden[where] = 1
        embeddings = np.zeros((host.tokens, words[0].shape[1]), dtype=np.int32)
        embeddings[where] = np.concatenate(words)
        return EMBEDDINGS, {"embeddings": embeddings, "overridden": overridden}

    def override_embeddings(self, buffers: Buffers) -> Overriding | None:
        given = buffers.find("embeddings")
        return None if given is None else (given.view(self.context.dtype), buffers.overridden)


class Embedded(RequestState):
    """A request's overrides. positions [n], ascending; token_ids: the prompt's; dtype: the model's."""

    def __init__(self, given: Overrides, token_ids: Sequence[int], dtype: torch.dtype) -> None:
        self.positions, self.token_ids = np.asarray(given.positions), token_ids
        self._vectors, self._dtype = given.vectors, dtype

    @cached_property
    def words(self) -> np.ndarray:
        """The embeddings' bits, [n, hidden's bytes / 4] int32."""
        return vectors.unpack(self._vectors).to(self._dtype).view(torch.int32).numpy()

    @cached_property
    def prompt_keys(self) -> list[int | bytes]:  # type: ignore[override]
        """Token ids, and a digest of each embedding."""
        keys: list[int | bytes] = list(self.token_ids)
        for position, row in zip(self.positions.tolist(), self.words, strict=True):
            keys[position] = hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest()
        return keys

    def within(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, words) of those from ``start`` to ``end``."""
        low, high = np.searchsorted(self.positions, (start, end))
        return self.positions[low:high], self.words[low:high]
