"""Layers of one block each, a mixer or a feed-forward (Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.kv.specs import Tree
from unisono.layers.activations import common_input_format, consumers_of, plain
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.layers import BlockSpec, DecoderLayer, FeedForward, LayerSpec, Mixer, Stream
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class AbsentSpec:
    """Spec of the half that a layer does not have."""

    def build(self, builder: Builder) -> nn.Module:
        """A module without parameters, which is never called."""
        return nn.Module()


ABSENT = AbsentSpec()


@dataclass(frozen=True)
class OneBlockSpec(LayerSpec):
    """``x + block(norm(x))``: ``mixer`` or ``feed_forward`` is ABSENT. It has the norm ``mixer_norm`` alone."""

    @staticmethod
    def of(mixer: BlockSpec = ABSENT, feed_forward: BlockSpec = ABSENT) -> OneBlockSpec:
        """The layer of one of them. Raises ValueError for both or neither."""
        if (mixer is ABSENT) == (feed_forward is ABSENT):
            raise ValueError("a layer of one block has a mixer or a feed-forward")
        return OneBlockSpec(mixer, feed_forward)

    def build(self, builder: Builder) -> OneBlockLayer:
        mixer, feed_forward = (
            spec.build(builder.at(name)) for name, spec in (("mixer", self.mixer), ("feed_forward", self.feed_forward))
        )
        return OneBlockLayer(mixer, feed_forward, builder.stream_norm(), self.mixer is not ABSENT)


class OneBlockLayer(DecoderLayer):
    """See :class:`OneBlockSpec`. mixes: it has the mixer."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module, norm: nn.Module, mixes: bool) -> None:
        self.mixes = mixes
        super().__init__(mixer, feed_forward, norm, None)

    def set_norm_formats(self) -> None:
        """See :meth:`DecoderLayer.set_norm_formats`."""
        if isinstance(self.mixer_norm, RMSNorm):
            block = self.mixer if self.mixes else self.feed_forward
            self.mixer_norm.input_format = common_input_format(consumers_of(block))

    def forward(self, stream: Stream, context: ForwardContext, state: Any) -> Stream:
        """See :meth:`DecoderLayer.forward`."""
        x, last = stream.x, context.last_tokens
        if last is not None:
            x = last.select(x)
        if self.mixes:
            mixer = cast(Mixer, self.mixer)
            return Stream(*mixer.project(mixer(stream.normed, context, state), x, self.next_norm))
        feed_forward = cast(FeedForward, self.feed_forward)
        normed = stream.normed if last is None else last.select(plain(stream.normed))
        return Stream(*feed_forward.project(feed_forward(normed, context.queries.positions), x, self.next_norm))

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`DecoderLayer.reference`."""
        block: Any = self.mixer if self.mixes else self.feed_forward
        out: torch.Tensor = block.reference(cast(RMSNorm, self.mixer_norm).reference(x))
        return x + out

    def state_specs(self) -> Tree:
        """The mixer's specs; none of a feed-forward."""
        return cast(Mixer, self.mixer).state_specs() if self.mixes else ()
