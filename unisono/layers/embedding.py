"""Token embeddings. Built by ``models``; draft heads may share the module."""

from __future__ import annotations

import torch
from torch import nn


class Embedding(nn.Module):
    """``token_ids [T] i32 -> [T, hidden]``; weight [vocab, hidden]. Ids must be in range.

    scale: factor of the rows, rounded to the dtype first (Gemma).
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=torch.float32).to(dtype))
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1 else rows * self.scale

    @property
    def unscaled(self) -> Embedding:
        """The same table without the factor: for draft heads that were trained on the rows as they are stored."""
        if self.scale == 1:
            return self
        vocab_size, hidden_size = self.weight.shape
        same = Embedding(vocab_size, hidden_size, self.weight.dtype, "meta")
        same.weight = self.weight
        return same
