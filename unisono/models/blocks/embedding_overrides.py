"""Embeddings that replace those of token ids: images, and embeddings supplied with a prompt.

A pass reads them through an index, so that a draft head, whose entries are shifted by one token, only shifts the index.
Features make them; the decoder and draft heads merge them. Shapes: T tokens of a pass, E its rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Overriding:
    """Embeddings for some tokens of a pass.

    source: vectors [n, H] in the model's dtype.
    rows [T] int32: vector of each token; -1 keeps the embedding of its id.
    after [E] int32: vector of the token that follows each row's last one, which the pass does not compute; None: no
        such token has one.
    levels: tensors [n, H]; level i is added to the hidden states of these tokens after layer i (deepstack).
    token_id: id by which a model with inputs of every layer looks up those of these tokens; -1: their own ids.
    """

    source: torch.Tensor
    rows: torch.Tensor
    after: torch.Tensor | None = None
    levels: tuple[torch.Tensor, ...] = ()
    token_id: int = -1

    def looked_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] with ``token_id`` for the tokens that have a vector."""
        return token_ids if self.token_id < 0 else token_ids.masked_fill(self.rows >= 0, self.token_id)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] with the vectors of the tokens that have one."""
        return torch.where(self.rows[:, None] >= 0, self._chosen(self.source), x)

    def add_level(self, x: torch.Tensor, level: int) -> torch.Tensor:
        """x [T, H] after layer ``level``, plus that level. Other tokens keep their bits."""
        return torch.where(self.rows[:, None] >= 0, x + self._chosen(self.levels[level]), x)

    def of_entries(self, entries: torch.Tensor) -> Overriding:
        """Overrides of a draft head's entries, without levels. entries [N]: see ``drafters.base.PromptPass``."""
        following = torch.full_like(entries, -1) if self.after is None else self.after
        return replace(self, rows=torch.cat((self.rows, following)).index_select(0, entries), after=None, levels=())

    def select(self, tokens: torch.Tensor) -> Overriding:
        """Overrides of only these tokens [M] of the pass."""
        return replace(self, rows=self.rows.index_select(0, tokens), after=None)

    def _chosen(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.index_select(0, self.rows.clamp_min(0))


def merged(x: torch.Tensor, overriding: Sequence[Overriding]) -> torch.Tensor:
    """Embeddings x [T, H] of token ids with the overrides applied."""
    for each in overriding:
        x = each.merge(x)
    return x
