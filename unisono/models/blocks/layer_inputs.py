"""Per-layer embeddings: inputs that every layer gets beside the residual stream (Gemma 3n, Gemma 4 E2B and E4B).

A token has a row of ``size`` elements for each layer, the sum of one that its id looks up and one that is projected
from its embedding. A layer gates its row by the stream and projects the product back.

Shapes: T tokens, H hidden, L layers, P ``size``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.kernels.norm.activation import GATES
from unisono.layers.activations import gated_rows, plain
from unisono.models.load.build import Builder, require


@dataclass(frozen=True)
class LayerInputsSpec:
    """The model's part: the table and the projection of all layers' inputs.

    size: P. vocab_size: rows of the table. layers: L.
    """

    size: int
    vocab_size: int
    layers: int

    def __post_init__(self) -> None:
        require(self.size >= 1, "hidden_size_per_layer_input", self.size, "it must be at least 1")

    def build(self, builder: Builder) -> LayerInputs:
        return LayerInputs(self, builder)


class LayerInputs(nn.Module):
    """Token ids and embeddings -> every layer's inputs.

    embed: the table [vocab, L · P], its rows times √P. project: H -> L · P, times 1 / √H. norm: of each layer's part of
    the projection. The two are added and divided by √2.
    """

    def __init__(self, spec: LayerInputsSpec, builder: Builder) -> None:
        super().__init__()
        self.spec, self.factor = spec, builder.hidden_size**-0.5
        width = spec.layers * spec.size
        self.embed = builder.embedding(spec.vocab_size, size=width, scale=spec.size**0.5)
        self.project = builder.linear("project", builder.hidden_size, width)
        self.norm = builder.norm(spec.size)

    def forward(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int32 and their embeddings x [T, H] -> [T, L, P]."""
        shape = len(x), self.spec.layers, self.spec.size
        projected = (self.project(x) * self.factor).view(-1, self.spec.size)
        normed = plain(self.norm(projected)).view(shape)
        summed: torch.Tensor = (normed + self.embed(token_ids).view(shape)) * 2**-0.5
        return summed


@dataclass(frozen=True)
class LayerInputSpec:
    """A layer's part: ``down(act(gate(x)) * inputs)``. number: the layer's. size: P. activation: see ``MLPSpec``."""

    number: int
    size: int
    activation: str

    def __post_init__(self) -> None:
        require(self.activation in GATES, "hidden_act", self.activation, f"supported are {', '.join(GATES)}")

    def build(self, builder: Builder) -> LayerInput:
        return LayerInput(self, builder)


class LayerInput(nn.Module):
    """See :class:`LayerInputSpec`."""

    def __init__(self, spec: LayerInputSpec, builder: Builder) -> None:
        super().__init__()
        self.number, self.act = spec.number, GATES[spec.activation]
        self.gate = builder.linear("gate", builder.hidden_size, spec.size)
        self.down = builder.linear("down", spec.size, builder.hidden_size)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """x [T, H] and every layer's inputs [T, L, P] -> [T, H]."""
        gated = gated_rows(self.gate(x), inputs[:, self.number], self.act, self.down.input_format)
        out: torch.Tensor = self.down(gated)
        return out
