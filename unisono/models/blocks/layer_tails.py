"""Which decoder layers compute everything after their mixer in one launch, for few rows.

A layer does where it ends with an output projection, a norm and a gated MLP whose weights are plain with 16 bits, or in
e4m3 with a scale for each block, and the kernel gives the separate ops' bits on the present GPU
(``kernels/gemm/layer_tail.py``, ``kernels/gemm/layer_tail_fp8.py``). Called by the engine and drafters at the start,
after weights are loaded and adapters are attached.

Shapes: M rows, H features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

import torch
from torch import nn

from unisono.kernels.gemm import layer_tail, layer_tail_fp8
from unisono.kernels.gemm.fp8_quantize import GROUP, Quantised
from unisono.kernels.gemm.layer_tail import Tail
from unisono.kernels.gemm.layer_tail_fp8 import Fp8Tail
from unisono.kernels.gemm.layer_tail_gluon import MOST_ROWS
from unisono.kernels.gemm.persistent import may_stay
from unisono.kernels.norm.activation import SILU
from unisono.layers.activations import Activations, Operand, Projected, Wish, plain, readers_of
from unisono.layers.adapters import LinearAdapter
from unisono.layers.experts import prove_experts
from unisono.layers.formats.base import PLAIN
from unisono.layers.linear import Linear, prove_linears
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.layers import DecoderLayer, Stream

MANY = 8
"""Layers with a projection after them from which on those without one have no tail."""


@dataclass(frozen=True)
class FusedTail:
    """What a layer does after its mixer. reader: the next layer's input projection, where it is computed here.

    adapters: of the layers that it computes; passes with adapters go on without it.
    """

    weights: Tail
    reader: Linear | None
    adapters: tuple[LinearAdapter, ...] = ()

    def __call__(self, mixed: Activations, x: torch.Tensor) -> Stream | None:
        """The mixer's outputs and the residual sum [M, H] -> the stream after the layer; None: not in this pass."""
        rows = x.shape[0]
        if rows > MOST_ROWS or any(adapter.plan(rows) is not None for adapter in self.adapters):
            return None
        if isinstance(self.weights, Fp8Tail):
            total, normed, product = layer_tail_fp8.layer_tail_fp8(_operand(mixed), x, self.weights)
        else:
            total, normed, product = layer_tail.layer_tail(plain(mixed), x, self.weights)
        if self.weights.next_norm is None:
            return Stream(total, total)
        kept = normed if len(normed) else None
        return Stream(total, normed if self.reader is None else Projected(kept, self.reader, product))

    def prove(self) -> bool:
        """Whether the kernel gives the separate ops' bits on the present device."""
        return _kernels(self.weights).prove(self.weights)


def _operand(x: Activations) -> Operand:
    return x if isinstance(x, Quantised) and x.group == GROUP else plain(x)


def _kernels(weights: Tail) -> Any:
    """The module whose kernel takes these weights."""
    return layer_tail_fp8 if isinstance(weights, Fp8Tail) else layer_tail


def prove_products(modules: Iterable[nn.Module]) -> dict[tuple[int, int], bool]:
    """:func:`prove_linears` and :func:`prove_experts`, and fuse the tails that can be: for drafters. Before any
    capture."""
    modules = list(modules)
    fuse_tails(modules)
    prove_experts(modules)
    return prove_linears(modules)


def fuse_tails(modules: Iterable[nn.Module]) -> tuple[int, int, int]:
    """Set ``tail`` of every decoder layer for which that is possible and proven.

    Returns how many layers there are, how many have one, and how many could if their bits were equal.
    """
    layers, possible = _possible(modules)
    for layer in layers:
        tail = possible.get(id(layer))
        layer.tail = tail if tail is not None and tail.prove() else None
    return len(layers), sum(layer.tail is not None for layer in layers), len(possible)


def rehearse_tails(modules: Iterable[nn.Module]) -> None:
    """Launch what :func:`fuse_tails` will launch and learn nothing: for compiling it ahead."""
    tails = [tail.weights for tail in _possible(modules)[1].values()]
    for weights in {tail.shape: tail for tail in tails}.values():
        _kernels(weights).rehearse(weights)


def _possible(modules: Iterable[nn.Module]) -> tuple[list[DecoderLayer], dict[int, FusedTail]]:
    """The decoder layers, and by id what each could do in one launch.

    The last of many layers, which no projection follows, would need kernels of its own: an empty start would compile
    twice as many, for one layer.
    """
    layers = [m for m in modules if isinstance(m, DecoderLayer)]
    possible = {id(layer): tail for layer in layers if (tail := _tail(layer)) is not None}
    followed = {at: tail for at, tail in possible.items() if tail.reader is not None}
    return layers, followed if len(followed) >= MANY else possible


def _tail(layer: DecoderLayer) -> FusedTail | None:
    """What follows the layer's mixer, if a kernel can compute it."""
    mixer, mlp, norm, next_norm = layer.mixer, layer.feed_forward, layer.feed_forward_norm, layer.next_norm
    if type(layer) is not DecoderLayer or not isinstance(mlp, GatedMLP) or mlp.gate != SILU:
        return None
    if layer.mixer_post_norm is not None or layer.feed_forward_post_norm is not None or layer.per_layer is not None:
        return None
    if type(norm) is not RMSNorm or type(next_norm) not in (RMSNorm, NoneType):
        return None
    reader: Any = None if layer.next_mixer is None else readers_of(layer.next_mixer)[0]
    layers: list[Any] = [getattr(mixer, "o", None), mlp.gate_up, mlp.down]
    for fitting, make, faster in ((_is_plain, _plain_tail, True), (_is_fp8, _fp8_tail, False)):
        if all(fitting(each) and each.bias is None for each in layers) and may_stay(norm.weight.device, faster):
            return make(layers, norm, cast("RMSNorm | None", next_norm), reader if fitting(reader) else None)
    return None


def _alone(layer: object) -> bool:
    """Whether this is a linear layer of this rank alone."""
    return isinstance(layer, Linear) and not (layer.joins or layer.sums or layer.split_inputs or layer.divided)


def _is_plain(layer: Any) -> bool:
    """Whether its weight is not quantised."""
    return _alone(layer) and layer.format is PLAIN


def _is_fp8(layer: Any) -> bool:
    """Whether its weight is in e4m3 and one, with a scale for each block; adapters would read plain rows."""
    return _alone(layer) and layer.wish == Wish(GROUP)


def _plain_tail(layers: list[Any], norm: RMSNorm, next_norm: RMSNorm | None, reader: Linear | None) -> FusedTail | None:
    if norm.wish is not None or (next_norm is not None and next_norm.wish is not None):
        return None
    weights = Tail(*_weights(layers, norm, next_norm, reader))
    return _fused(weights, layers, reader) if layer_tail.suits(weights) else None


def _fp8_tail(layers: list[Any], norm: RMSNorm, next_norm: RMSNorm | None, reader: Any) -> FusedTail | None:
    wish = None if next_norm is None else next_norm.wish
    if norm.wish != Wish(GROUP) or (wish is not None and (wish.group != GROUP or reader is None)):
        return None
    reader = None if wish is None else reader
    products = layers if reader is None else [*layers, reader]
    scales = tuple(each.format.operands(each)[1] for each in products)
    how = {"scales": scales, "dtype": layers[0].dtype, "keep": wish is None or wish.keep}
    weights = Fp8Tail(*_weights(layers, norm, next_norm, reader), **how)
    return _fused(weights, layers, reader) if layer_tail_fp8.suits(weights) else None


def _fused(weights: Tail, layers: list[Any], reader: Any) -> FusedTail:
    every = layers if reader is None else [*layers, reader]
    return FusedTail(weights, reader, tuple(each.adapter for each in every if each.adapter is not None))


def _weights(layers: list[Any], norm: RMSNorm, next_norm: RMSNorm | None, reader: Linear | None) -> tuple[Any, ...]:
    """The fields of a tail, in their order."""
    of_next = (None, 0.0) if next_norm is None else (next_norm.weight, next_norm.eps)
    after = (None, None) if reader is None or next_norm is None else (reader.weight, reader.bias)
    return *(each.weight for each in layers), norm.weight, norm.eps, *of_next, *after
