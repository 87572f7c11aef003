"""Embeddings that replace those of prompt tokens: whole prompts (``prompt_embeds``), and single positions.

An overridden prompt position has no token (PLACEHOLDER), so code that reads tokens sees none there. The prefix cache
identifies it by a digest of its embedding: equal embeddings share pages, different ones and token ids never do. Vectors
travel as the int32 words of their bits, since every field has a four-byte type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from unisono.graphs import NO_FEATURES, Buffers, Features, Field
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.passes.features.base import Feature, HostPass, PassKind, RequestState, words_of
from unisono.types import EngineRequest, Overrides, vectors

DIGEST_BYTES = 16

EMBEDDINGS = Features(embeddings=True)


class PromptEmbeds(Feature):
    """Fields: ``embeddings``, and ``embedding_rows``: for each token its row in them, -1 for none.

    If a drafter reads them too, also ``embeddings_after`` and ``has_embedding_after``, for the token after each
    request's last one in the pass.
    """

    name = "prompt_embeds"
    requested_by = ("overrides",)

    def fields(self, kind: PassKind) -> tuple[Field, ...]:
        if kind != "extend":
            return ()
        words = words_of(self.context.hidden_size, self.context.dtype)
        own = (
            Field("embeddings", torch.int32, ("rows", words), feature=EMBEDDINGS),
            Field("embedding_rows", torch.int32, ("rows",), pad=-1, feature=EMBEDDINGS),
        )
        if not self.context.drafts:
            return own
        requests = self.context.max_rows
        return (
            *own,
            Field("embeddings_after", torch.int32, (requests, words), feature=EMBEDDINGS),
            Field("has_embedding_after", torch.int32, (requests,), feature=EMBEDDINGS),
        )

    def begin(self, request: EngineRequest) -> RequestState | None:
        overrides = request.overrides
        return None if overrides is None else Embedded(overrides, request.prompt_token_ids, self.context.dtype)

    def fill(self, host: HostPass) -> tuple[Features, dict[str, np.ndarray]]:
        rows, words = [], []
        size = words_of(self.context.hidden_size, self.context.dtype)
        after, has_after = np.zeros((host.count, size), dtype=np.int32), np.zeros(host.count, dtype=np.int32)
        for row in host.rows if host.kind == "extend" else ():
            positions, embeddings = row.state.within(row.start, row.end)
            rows.append(positions + (row.first - row.start))
            words.append(embeddings)
            _, following = row.state.within(row.end, row.end + 1)
            if len(following):
                after[row.index], has_after[row.index] = following[0], 1
        if not sum(map(len, rows)) + (self.context.drafts and has_after.any()):
            return NO_FEATURES, {}
        where = np.concatenate(rows)
        embedding_rows = np.full(host.tokens, -1, dtype=np.int32)
        embedding_rows[where] = np.arange(len(where))
        fields = {"embeddings": np.concatenate(words), "embedding_rows": embedding_rows}
        if self.context.drafts:
            fields |= {"embeddings_after": after, "has_embedding_after": has_after}
        return EMBEDDINGS, fields

    def override_embeddings(self, buffers: Buffers) -> Overriding | None:
        embeddings, after = buffers.find("embeddings"), buffers.find("embeddings_after")
        if embeddings is None:
            return None
        source, dtype = embeddings.view(self.context.dtype), self.context.dtype
        if after is None:
            return Overriding(source, buffers.embedding_rows)
        flags, tokens = buffers.has_embedding_after, source.shape[0]
        rows = torch.arange(tokens, tokens + flags.shape[0], dtype=torch.int32, device=flags.device)
        sources = torch.cat((source, after.view(dtype)))
        return Overriding(sources, buffers.embedding_rows, rows.masked_fill(flags == 0, -1))


class Embedded(RequestState):
    """A request's overrides. positions [n]: ascending; token_ids: the prompt's; dtype: the model's."""

    def __init__(self, overrides: Overrides, token_ids: Sequence[int], dtype: torch.dtype) -> None:
        self.positions, self.token_ids = np.asarray(overrides.positions), token_ids
        self._vectors, self._dtype = overrides.vectors, dtype

    @cached_property
    def words(self) -> np.ndarray:
        """Bits of the embeddings, [n, bytes per vector / 4] int32."""
        return vectors.unpack(self._vectors).to(self._dtype).view(torch.int32).numpy()

    @cached_property
    def prompt_keys(self) -> list[int | bytes]:  # type: ignore[override]
        """Token ids, with a digest in place of each overridden one."""
        keys: list[int | bytes] = list(self.token_ids)
        for position, row in zip(self.positions.tolist(), self.words, strict=True):
            keys[position] = hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest()
        return keys

    def within(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, words) of the overrides from ``start`` to ``end``."""
        low, high = np.searchsorted(self.positions, (start, end))
        return self.positions[low:high], self.words[low:high]
