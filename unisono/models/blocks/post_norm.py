"""Layers whose sums are normed, and whose norm is the residual stream of what follows (BERT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.layers.activations import plain
from unisono.models.blocks.layers import DecoderLayer, FeedForward, LayerSpec, Mixer, NormOrder, Stream
from unisono.models.load.build import Builder

NO_NORMS = NormOrder(False, False)


@dataclass(frozen=True)
class PostNormSpec(LayerSpec):
    """``y = norm(x + mixer(x))``, then ``norm(y + feed_forward(y))``."""

    mixer_norms: NormOrder = NO_NORMS
    feed_forward_norms: NormOrder = NO_NORMS

    def build(self, builder: Builder) -> PostNormLayer:
        mixer = self.mixer.build(builder.at("mixer"))
        feed_forward = self.feed_forward.build(builder.at("feed_forward"))
        return PostNormLayer(mixer, feed_forward, builder.stream_norm(), builder.stream_norm())


class PostNormLayer(DecoderLayer):
    """See :class:`PostNormSpec`. sum_norm, last_norm: of the two sums."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module, sum_norm: nn.Module, last_norm: nn.Module) -> None:
        super().__init__(mixer, feed_forward, None, None)
        self.sum_norm, self.last_norm = sum_norm, last_norm

    def forward(self, stream: Stream, context: ForwardContext, state: Any) -> Stream:
        """See :meth:`DecoderLayer.forward`."""
        mixer, feed_forward = cast(Mixer, self.mixer), cast(FeedForward, self.feed_forward)
        mixed = mixer(stream.normed, context, state)
        x = stream.x if context.last_tokens is None else context.last_tokens.select(stream.x)
        _, normed = mixer.project(mixed, x, self.sum_norm)
        y = feed_forward(normed, context.queries.positions)
        _, normed = feed_forward.project(y, plain(normed), self.last_norm)
        return Stream(plain(normed), normed)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`DecoderLayer.reference`."""
        for norm, block in ((self.sum_norm, self.mixer), (self.last_norm, self.feed_forward)):
            x = cast(Any, norm).reference(x + cast(Any, block).reference(x))
        return x
