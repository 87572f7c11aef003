"""Short convolution (LFM2): a mixer that gates, convolves a few tokens, and gates again.

Its state is the convolution's last inputs. Built by a family's blocks (docs/extend/model.md), as attention is. Ranks
divide the channels.

Shapes: T tokens of a pass, E tokens whose output is read, H hidden, C = H channels, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.distributed.gather import Ranks
from unisono.kernels.recurrent.short_conv import short_conv
from unisono.kv.specs import Recurrent, Remembered
from unisono.kv.store import RecurrentView
from unisono.layers.activations import Activations
from unisono.layers.linear import EndsInLinear
from unisono.models.blocks.gated_delta import _Weight
from unisono.models.load.build import Builder, require
from unisono.types import ConfigError


@dataclass(frozen=True)
class ShortConvSpec:
    """One layer: ``o(c * conv(b * x))``, with b, c and x of one product. channels: H; taps: of the convolution.

    Modules, as named by families: ``in_proj.b``, ``in_proj.c``, ``in_proj.x``, ``conv`` and ``o``. Raises
    CheckpointError for values that cannot be computed.
    """

    channels: int
    taps: int

    def __post_init__(self) -> None:
        require(2 <= self.taps <= 8, "conv_L_cache", self.taps, "the kernels compute 2 to 8 taps")

    def of(self, ranks: Ranks) -> ShortConvSpec:
        """The spec itself. Raises ConfigError if the channels cannot be divided among the ranks."""
        if not ranks.divides(self.channels):
            raise ConfigError(
                f"--tensor-parallel-size {ranks.count}: a short convolution has {self.channels} channels, which cannot "
                f"be divided among {ranks.count} ranks."
            )
        return self

    def build(self, builder: Builder) -> ShortConv:
        return ShortConv(self, builder)


class ShortConv(EndsInLinear):
    """See :class:`ShortConvSpec`. A mixer with recurrent state (``models/blocks/layers.py``)."""

    def __init__(self, spec: ShortConvSpec, builder: Builder) -> None:
        super().__init__()
        self.spec, self.dtype, hidden, share = spec.of(builder.ranks), builder.dtype, builder.hidden_size, builder.share
        parts = dict.fromkeys(("b", "c", "x"), spec.channels)
        self.in_proj = builder.linear("in_proj", hidden, parts, share=dict.fromkeys(parts, share))
        self.conv = _Weight((spec.channels, 1, spec.taps), builder.dtype, builder.device, share)
        taps = self.conv.weight.data.permute(2, 1, 0).contiguous()
        self.conv.weight.data = taps.permute(2, 1, 0)  # a tap's channels are contiguous, as the kernel reads them
        self.o = builder.joined("o", spec.channels, hidden)

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.in_proj,)

    def state_specs(self) -> Recurrent:
        """Snapshot: the convolution's last inputs. Buffered: the latest inputs."""
        taps, channels = self.spec.taps - 1, self.conv.weight.shape[0]
        inputs = {"conv": Remembered((channels,), self.dtype, last=taps)}
        return Recurrent({"conv": ((taps, channels), self.dtype)}, inputs)

    def forward(self, x: Activations, context: ForwardContext, state: RecurrentView) -> torch.Tensor:
        """x [T, H] -> [T, C], the input of ``o``, or [E, C] with last tokens. Updates the state."""
        b, c, x = self.in_proj(x).chunk(3, dim=1)
        out = self._convolve(b * x, context, state)
        if context.last_tokens is not None:
            out, c = context.last_tokens.select(out), context.last_tokens.select(c)
        return c * out

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain convolution in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        b, c, x = self.in_proj.reference(x).chunk(3, dim=1)
        taps = self.spec.taps - 1
        conv = nn.functional.conv1d((b * x).T, self.conv.weight.to(x.dtype), padding=taps, groups=x.shape[1])
        return self.o.reference(c * conv.T[: len(x)])

    def advance(self, context: ForwardContext, state: RecurrentView) -> None:
        """Advance the state in a pass without tokens; see :class:`unisono.models.blocks.layers.AdvancesSnapshot`."""
        self._convolve(self.conv.weight.new_empty((0, self.conv.weight.shape[0])), context, state)

    def _convolve(self, u: torch.Tensor, context: ForwardContext, state: RecurrentView) -> torch.Tensor:
        assert context.recurrent is not None
        kept = state.snapshot["conv"], state.inputs["conv"]
        return short_conv(u, self.conv.weight, *kept, *context.recurrent.fields, context.query_start)
