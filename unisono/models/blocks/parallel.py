"""Layers whose attention and MLP read one norm and are both added to the stream (Cohere, StableLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from unisono.attention.context import ForwardContext
from unisono.layers.activations import common_input_format, consumers_of, plain
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.layers import DecoderLayer, FeedForward, LayerSpec, Mixer, Stream
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class ParallelSpec(LayerSpec):
    """``x + mixer(norm(x)) + feed_forward(norm(x))``, added in this order. It has the norm ``mixer_norm`` alone."""

    def build(self, builder: Builder) -> ParallelLayer:
        mixer = self.mixer.build(builder.at("mixer"))
        feed_forward = self.feed_forward.build(builder.at("feed_forward"))
        return ParallelLayer(mixer, feed_forward, builder.stream_norm(), None)


class ParallelLayer(DecoderLayer):
    """See :class:`ParallelSpec`."""

    def set_norm_formats(self) -> None:
        """See :meth:`DecoderLayer.set_norm_formats`; the rows that both blocks read are plain, too."""
        if isinstance(self.mixer_norm, RMSNorm):
            consumers = (*consumers_of(self.mixer), *consumers_of(self.feed_forward), None)
            self.mixer_norm.input_format = common_input_format(consumers)

    def forward(self, stream: Stream, context: ForwardContext, state: Any) -> Stream:
        """See :meth:`DecoderLayer.forward`."""
        mixer, feed_forward = cast(Mixer, self.mixer), cast(FeedForward, self.feed_forward)
        normed = plain(stream.normed)
        mixed, x = mixer(stream.normed, context, state), stream.x
        if (last := context.last_tokens) is not None:
            x, normed = last.select(x), last.select(normed)
        y = feed_forward(normed, context.queries.positions)
        x, _ = mixer.project(mixed, x, None)
        return Stream(*feed_forward.project(y, x, self.next_norm), None)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`DecoderLayer.reference`."""
        normed = cast(RMSNorm, self.mixer_norm).reference(x)
        return x + cast(Any, self.mixer).reference(normed) + cast(Any, self.feed_forward).reference(normed)
