"""Experts in a latent space: a product into it before them and one out of it after them (Nemotron-3 Super and Ultra).

Shapes: M rows, H hidden, L latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unisono.distributed.gather import Ranks
from unisono.layers.activations import Activations, plain
from unisono.layers.experts import Mixed
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.plain_mlp import PlainMLPSpec
from unisono.models.load.build import Builder, require


@dataclass(frozen=True)
class LatentExpertsSpec:
    """``out(experts(into(x))) + shared(x)``. The router reads x, too.

    experts: over L = ``size`` features, without a shared one. bias: both products have one.

    Modules: ``into``, ``out``, ``experts`` (with the modules of :class:`ExpertsSpec`) and ``shared``. Raises
    CheckpointError for values that cannot be computed.
    """

    experts: ExpertsSpec
    shared: PlainMLPSpec
    size: int
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.size >= 1, "moe_latent_size", self.size, "it must be at least 1")

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.experts.num_experts

    @property
    def intermediate_size(self) -> int:
        """Features of an expert."""
        return self.experts.intermediate_size

    def of(self, ranks: Ranks) -> LatentExpertsSpec:
        """The same; raises ConfigError where the experts cannot be divided among the ranks."""
        self.experts.of(ranks)
        return self

    def build(self, builder: Builder) -> LatentExperts:
        return LatentExperts(self, builder)


class LatentExperts(nn.Module):
    """See :class:`LatentExpertsSpec`. A feed-forward (``models/blocks/layers.py``)."""

    def __init__(self, spec: LatentExpertsSpec, builder: Builder) -> None:
        super().__init__()
        hidden = builder.hidden_size
        self.into = builder.joined("into", hidden, spec.size, spec.bias, split_inputs=False)
        self.out = builder.joined("out", spec.size, hidden, spec.bias, split_inputs=False)
        self.experts = spec.experts.build(replace(builder.at("experts"), hidden_size=spec.size))
        router = self.experts.router.new_empty(len(self.experts.router), hidden)
        self.experts.router = nn.Parameter(router, requires_grad=False)
        self.shared = spec.shared.build(builder.at("shared"))

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input; the router takes plain rows."""
        return self.into, *self.shared.consumers, None

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> tuple[Mixed, Activations]:
        """x [M, H] -> the input of :meth:`output`. positions: see :meth:`Experts.forward`."""
        return self.experts(self.into(x), positions, plain(x)), self.shared(x)

    def output(self, y: tuple[Mixed, Activations]) -> torch.Tensor:
        """The sum of experts and shared expert, [M, H]."""
        out: torch.Tensor = self.out(self.experts.output(y[0]))
        return out + self.shared.output(y[1])

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [M, H] -> [M, H]: the tests' oracle."""
        out = self.out.reference(self.experts.reference(self.into.reference(x), x))
        return out + self.shared.reference(x)

    def project(
        self, y: tuple[Mixed, Activations], residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Any]:
        """(residual + the sum, ``norm`` of it); without a norm the sum twice."""
        total = self.output(y) + residual
        return total, total if norm is None else norm(total)
