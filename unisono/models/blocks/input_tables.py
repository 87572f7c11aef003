"""Learnt position and token type embeddings, added to those of tokens before the first norm (BERT, RoBERTa).

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.layers.embedding import Embedding
from unisono.models.load.build import Builder, require


@dataclass(frozen=True)
class InputTablesSpec:
    """positions: rows of the table of positions. offset: row of position 0. types: rows of the table of token types.

    separator: id of the token that ends a text: later tokens of the prompt have type 1. None: all have type 0.
    """

    positions: int
    offset: int = 0
    types: int = 2
    separator: int | None = None

    def __post_init__(self) -> None:
        require(self.positions > self.offset, "max_position_embeddings", self.positions, f"it must be > {self.offset}")
        require(self.types >= 1, "type_vocab_size", self.types, "it must be at least 1")

    def build(self, builder: Builder) -> InputTables:
        return InputTables(self, builder)


class InputTables(torch.nn.Module):
    """See :class:`InputTablesSpec`."""

    def __init__(self, spec: InputTablesSpec, builder: Builder) -> None:
        super().__init__()
        self.spec = spec
        self.positions: Embedding = builder.embedding(spec.positions)
        self.types: Embedding = builder.embedding(spec.types)

    def forward(
        self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, H] -> x plus the rows of each token's type and position, in x's dtype.

        token_ids, positions [T] int32: padding tokens have position -1, and their result does not matter. starts [R +
        1] int32: first token of each row; None: a round, whose tokens have type 0.
        """
        rows = (positions.clamp(min=0) + self.spec.offset).clamp(max=self.spec.positions - 1)
        types = self._types(token_ids, starts)
        out: torch.Tensor = x + self.types(types) + self.positions(rows)
        return out

    def _types(self, token_ids: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """Type of each token: 1 after a separator of its own row, else 0; [T] int32."""
        if self.spec.separator is None or self.spec.types < 2 or starts is None:
            return torch.zeros_like(token_ids)
        ends = (token_ids == self.spec.separator).to(torch.int32)
        before = ends.cumsum(0, dtype=torch.int32) - ends  # separators ahead of each token, of all rows
        tokens = torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device)
        row = torch.searchsorted(starts[1:], tokens, right=True)
        first = torch.cat((starts, starts[-1:])).clamp(max=token_ids.shape[0] - 1).index_select(0, row)
        return (before > before.index_select(0, first)).to(torch.int32)

    def reference(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype for one text from its start: the tests' oracle."""
        count = token_ids.shape[0]
        starts = torch.tensor([0, count], dtype=torch.int32)
        rows = torch.arange(count) + self.spec.offset
        types = self._types(token_ids.to(torch.int32), starts)
        return x + self.types(types).to(x.dtype) + self.positions(rows).to(x.dtype)
