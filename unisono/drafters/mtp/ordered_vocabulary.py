"""Logits of likely tokens only: the vocabulary is divided into clusters, and only tokens of the best ones are scored.

The form of the assistants of Gemma 4 E2B and E4B (transformers ``Gemma4AssistantMaskedEmbedder``).

Shapes: R rows, H hidden, V vocabulary, C clusters of V / C tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from unisono.layers.formats.base import WeightTarget
from unisono.models.load.build import Builder

TOP_K = 32
"""Default number of scored clusters, for config.json files without one."""

INTEGERS = ("I64", "I32")
"""Dtypes that a checkpoint may store token ids in."""


@dataclass(frozen=True)
class OrderedSpec:
    """vocab_size: V. clusters: C. top_k: how many of them are scored."""

    vocab_size: int
    clusters: int
    top_k: int

    def build(self, builder: Builder) -> OrderedVocabulary:
        return OrderedVocabulary(self, builder)


class TokenOrdering(nn.Module):
    """The ids of the clusters' tokens, one cluster after the other: ``weight`` [V] int64."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(size, device=device), requires_grad=False)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """See :meth:`unisono.layers.norm.RMSNorm.weight_targets`."""
        yield "", WeightTarget(self.weight, tuple(self.weight.shape), INTEGERS)


class OrderedVocabulary(nn.Module):
    """Scores the tokens of the ``top_k`` clusters whose centroids fit a row best; other tokens have -inf."""

    def __init__(self, spec: OrderedSpec, builder: Builder) -> None:
        super().__init__()
        self.spec = spec
        self.centroids = builder.linear("centroids", builder.hidden_size, spec.clusters)
        self.ordering = TokenOrdering(spec.vocab_size, builder.device)

    def forward(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y [R, H], the LM head's weight [V, H] -> logits [R, V]. A row's sums are in fp32."""
        best = self.centroids(y).topk(self.spec.top_k, dim=1).indices
        ids = self.ordering.weight.view(self.spec.clusters, -1).index_select(0, best.flatten()).view(len(y), -1)
        rows = weight.index_select(0, ids.flatten()).view(*ids.shape, -1)
        scores = (rows.float() * y[:, None].float()).sum(-1).to(y.dtype)
        return y.new_full((len(y), self.spec.vocab_size), -torch.inf).scatter_(1, ids, scores)
