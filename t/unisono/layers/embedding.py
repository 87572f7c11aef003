"""Token embeddings. Built by ``models``; draft heads may share the module."""

from __future__ import annotations

import torch
from torch import nn


class Embedding(nn.Module):
    """``token_ids [T] i32 -> [T, hidden]``; weight [vocab, hidden]. Ids must be in range."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(token_ids, self.weight)
