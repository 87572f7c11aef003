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

from unisono.kernels.gemm import layer_tail
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
    """

    weights: LayerTailWeights
    consumer: Linear | None
    adapters: tuple[LinearAdapter, ...] = ()

    def __call__(self, mixed: Activations, x: torch.Tensor) -> Stream | None:
        """Mixer output and residual sum [M, H] -> the stream after the layer; None if this pass cannot use it."""
        rows = x.shape[0]
        if rows > MOST_ROWS or any(adapter.plan(rows) is not None for adapter in self.adapters):
            return None
        total, normed, product = layer_tail.layer_tail(plain(mixed), x, self.weights)
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
        layer.tail = tail if tail is not None and layer_tail.exact_layer_tail.prove(tail.weights) else None
    return len(layers), sum(layer.tail is not None for layer in layers), len(possible)


def rehearse_tails(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`fuse_tails` and ignore the results, to compile them ahead of time."""
    tails = [tail.weights for tail in _possible(modules)[1].values()]
    for weights in {tail.shape: tail for tail in tails}.values():
        layer_tail.exact_layer_tail.rehearse(weights)


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
    return _plain_tail(layers, norm, cast("RMSNorm | None", next_norm), consumer if _is_plain(consumer) else None)


def _is_plain(layer: Any) -> bool:
    """True for a linear layer with an unquantised weight, whole on this rank."""
    alone = isinstance(layer, Linear) and not (layer.joins or layer.sums or layer.split_inputs or layer.divided)
    return alone and layer.format is PLAIN


def _plain_tail(
    layers: list[Any], norm: RMSNorm, next_norm: RMSNorm | None, consumer: Linear | None
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
    return FusedTail(weights, consumer, adapters) if layer_tail.suits(weights) else None
