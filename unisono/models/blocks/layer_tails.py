"""Fusion of everything after a decoder layer's mixer into one launch, for few rows.

A layer qualifies if it ends with an output projection, a norm and a gated MLP whose weights are unquantised with 16
bits, and if the kernel gives the separate ops' bits on the present GPU (``kernels/gemm/layer_tail.py``). Called by the
engine and drafters at the start, after weights are loaded and adapters are attached.

Shapes: M rows, H features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

import torch
from torch import nn

from unisono.distributed import layer_tail as divided
from unisono.distributed.gather import ALONE, Ranks
from unisono.kernels.gemm import layer_tail
from unisono.kernels.gemm.divided_tail import DividedTailWeights
from unisono.kernels.gemm.layer_tail import LayerTailWeights
from unisono.kernels.gemm.layer_tail_gluon import MOST_ROWS
from unisono.kernels.gemm.persistent import claim_device
from unisono.kernels.norm.activation import SILU
from unisono.layers.activations import Activations, Projected, consumers_of, plain
from unisono.layers.adapters import LinearAdapter
from unisono.layers.experts import prove_experts
from unisono.layers.formats.base import PLAIN
from unisono.layers.linear import Linear, prove_linears
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.layers import DecoderLayer, Stream

MANY = 8
"""Number of layers followed by a projection from which layers without one get no fused tail."""


@dataclass(frozen=True)
class FusedTail:
    """Everything a layer computes after its mixer. consumer: the next layer's input projection, if computed here.

    adapters: adapters of its linear layers; passes with adapters do not use it.
    ranks: ranks among which the layer is divided; ``weights`` are this rank's parts.
    """

    weights: LayerTailWeights
    consumer: Linear | None
    adapters: tuple[LinearAdapter, ...] = ()
    ranks: Ranks = ALONE

    @property
    def parts(self) -> DividedTailWeights:
        """The weights as parts of a divided layer."""
        return DividedTailWeights(self.weights, self.ranks.count)

    @property
    def shape(self) -> tuple[object, ...]:
        """Shapes and dtypes that the kernel's bits may depend on."""
        return self.weights.shape if self.ranks.count == 1 else self.parts.shape

    def suits(self) -> bool:
        """True if a kernel takes these weights."""
        return layer_tail.suits(self.weights) if self.ranks.count == 1 else divided.suits(self.parts, self.ranks)

    def prove(self) -> bool:
        """True if the kernel has the bits of the separate launches, on all ranks."""
        if self.ranks.count == 1:
            return layer_tail.exact_layer_tail.prove(self.weights)
        return divided.exact_divided_tail.prove(self.parts, self.ranks)

    def rehearse(self) -> None:
        """Compile the kernel ahead of time."""
        if self.ranks.count == 1:
            layer_tail.exact_layer_tail.rehearse(self.weights)
        else:
            divided.exact_divided_tail.rehearse(self.parts, self.ranks)

    def __call__(self, mixed: Activations, x: torch.Tensor) -> Stream | None:
        """Mixer output and residual sum [M, H] -> the stream after the layer; None if this pass cannot use it."""
        rows = x.shape[0]
        if rows > MOST_ROWS or any(adapter.plan(rows) is not None for adapter in self.adapters):
            return None
        if self.ranks.count == 1:
            total, normed, product = layer_tail.layer_tail(plain(mixed), x, self.weights)
        else:
            total, normed, product = divided.divided_tail(plain(mixed), x, self.parts, self.ranks.transport)
        if self.weights.next_norm is None:
            return Stream(total, total)
        kept = normed if len(normed) else None
        return Stream(total, normed if self.consumer is None else Projected(kept, self.consumer, product))


def prove_products(modules: Iterable[nn.Module]) -> dict[tuple[int, int], bool]:
    """Run :func:`prove_linears` and :func:`prove_experts`, and fuse layer tails: for drafters. Call it before any
    capture."""
    modules = list(modules)
    fuse_tails(modules)
    prove_experts(modules)
    return prove_linears(modules)


def fuse_tails(modules: Iterable[nn.Module]) -> tuple[int, int, int]:
    """Set ``tail`` of every decoder layer for which that is possible and proven.

    Returns the number of layers, of fused layers, and of layers that would be fused if their bits were equal.
    """
    layers, possible = _possible(modules)
    for layer in layers:
        tail = possible.get(id(layer))
        layer.tail = tail if tail is not None and tail.prove() else None
    return len(layers), sum(layer.tail is not None for layer in layers), len(possible)


def rehearse_tails(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`fuse_tails` and ignore the results, to compile them ahead of time."""
    for tail in {tail.shape: tail for tail in _possible(modules)[1].values()}.values():
        tail.rehearse()


def _possible(modules: Iterable[nn.Module]) -> tuple[list[DecoderLayer], dict[int, FusedTail]]:
    """The decoder layers, and possible fused tails by layer id.

    The last of many layers, which no projection follows, would need kernels of its own: a cold start would compile
    twice as many, for one layer.
    """
    layers = [m for m in modules if isinstance(m, DecoderLayer)]
    possible = {id(layer): tail for layer in layers if (tail := _tail(layer)) is not None}
    followed = {at: tail for at, tail in possible.items() if tail.consumer is not None}
    return layers, followed if len(followed) >= MANY else possible


def _tail(layer: DecoderLayer) -> FusedTail | None:
    """Fused tail of the layer, if a kernel can compute it."""
    mixer, mlp, norm, next_norm = layer.mixer, layer.feed_forward, layer.feed_forward_norm, layer.next_norm
    if type(layer) is not DecoderLayer or not isinstance(mlp, GatedMLP) or mlp.gate != SILU or layer.times != 1:
        return None
    if layer.mixer_post_norm is not None or layer.feed_forward_post_norm is not None or layer.per_layer is not None:
        return None
    if type(norm) is not RMSNorm or type(next_norm) not in (RMSNorm, NoneType):
        return None
    consumer: Any = None if layer.next_mixer is None else consumers_of(layer.next_mixer)[0]
    layers: list[Any] = [getattr(mixer, "o", None), mlp.gate_up, mlp.down]
    if not (all(_is_plain(each) and each.bias is None for each in layers) and claim_device(norm.weight.device)):
        return None
    ranks = _ranks_of(*layers)
    if ranks is None:
        return None
    follows = _is_plain(consumer) and not (consumer.joins or consumer.split_inputs)
    follows = follows and (ranks is not ALONE or not consumer.divided)
    return _plain_tail(layers, norm, cast("RMSNorm | None", next_norm), consumer if follows else None, ranks)


def _is_plain(layer: Any) -> bool:
    """True for a linear layer with an unquantised weight and no terms of a sum over ranks."""
    return isinstance(layer, Linear) and layer.format is PLAIN and not layer.sums


def _ranks_of(o: Linear, gate_up: Linear, down: Linear) -> Ranks | None:
    """Ranks among which the layers are divided, all in equal parts; ALONE if each is whole; None for a mixture."""
    ends = (o.joins, o.split_inputs, down.joins, down.split_inputs)
    if not any((*ends, gate_up.divided)):
        return ALONE
    equal = len(set(gate_up.held)) == 1 and not (gate_up.joins or gate_up.split_inputs)
    return o.ranks if all((*ends, gate_up.divided, equal)) else None


def _plain_tail(
    layers: list[Any], norm: RMSNorm, next_norm: RMSNorm | None, consumer: Linear | None, ranks: Ranks
) -> FusedTail | None:
    if norm.input_format is not None or (next_norm is not None and next_norm.input_format is not None):
        return None
    weights = LayerTailWeights(
        o=layers[0].weight,
        gate_up=layers[1].weight,
        down=layers[2].weight,
        o_norm=norm.weight,
        eps=norm.eps,
        next_norm=None if next_norm is None else next_norm.weight,
        next_eps=0.0 if next_norm is None else next_norm.eps,
        following=None if consumer is None else consumer.weight,
        bias=None if consumer is None else consumer.bias,
    )
    every = layers if consumer is None else [*layers, consumer]
    adapters = tuple(each.adapter for each in every if each.adapter is not None)
    tail = FusedTail(weights, consumer, adapters, ranks)
    return tail if tail.suits() else None
