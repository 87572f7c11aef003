"""Embeddings that stand in for those of token ids: what the engine holds of them, and what a pass brings of them.

A prompt position that is overridden has no token (PLACEHOLDER), so nothing that looks at tokens sees one there. The
prefix cache knows it by a digest of its embedding: equal embeddings share pages, different ones and token ids never do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from unisono import vectors
from unisono.types import EngineRequest

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Embedded:
    """A request's overrides: positions [n], ascending, and the embeddings' bits, words [n, hidden's bytes / 4] int32.

    token_ids: the prompt's.
    """

    positions: np.ndarray
    words: np.ndarray
    token_ids: Sequence[int]

    @classmethod
    def of(cls, request: EngineRequest, dtype: torch.dtype) -> Embedded | None:
        """A checked request's overrides in the model's dtype; None for a request without any."""
        given = request.overrides
        if given is None:
            return None
        rows = vectors.unpack(given.vectors).to(dtype)
        return cls(np.asarray(given.positions), rows.view(torch.int32).numpy(), request.prompt_token_ids)

    @cached_property
    def keys(self) -> list[int | bytes]:
        """What the prefix cache knows the prompt by: token ids, and a digest of each embedding."""
        keys: list[int | bytes] = list(self.token_ids)
        for position, row in zip(self.positions.tolist(), self.words, strict=True):
            keys[position] = hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest()
        return keys

    def within(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, words) of those from ``start`` to ``end``."""
        low, high = np.searchsorted(self.positions, (start, end))
        return self.positions[low:high], self.words[low:high]


class Part(Protocol):
    """Positions ``start`` … ``end`` of a sequence in a pass: ``scheduler.Chunk``."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def embedded(self) -> Embedded | None: ...


def override_fields(parts: Sequence[Part]) -> dict[str, np.ndarray]:
    """``embeddings`` and ``overridden`` of a prompt pass over these parts; nothing where none is overridden."""
    rows, words, at = [], [], 0
    for part in parts:
        if part.embedded is not None:
            positions, given = part.embedded.within(part.start, part.end)
            rows.append(positions + (at - part.start))
            words.append(given)
        at += part.end - part.start
    if not sum(map(len, rows)):
        return {}
    where = np.concatenate(rows)
    overridden = np.zeros(at, dtype=np.int32)
    overridden[where] = 1
    embeddings = np.zeros((at, words[0].shape[1]), dtype=np.int32)
    embeddings[where] = np.concatenate(words)
    return {"embeddings": embeddings, "overridden": overridden}
