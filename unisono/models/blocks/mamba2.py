"""Mamba2: a mixer with recurrent state of fixed size (Dao and Gu, arXiv 2405.21060).

Built by a family's blocks (docs/extend/model.md), as attention is. Shapes: T tokens of a pass, E tokens whose output
is read, H hidden, G groups, N state size, Hv heads of P elements, J taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.config.preflight.ranks import check_mamba_heads
from unisono.distributed.gather import Ranks
from unisono.kernels.norm.gated_group_norm import gated_group_norm
from unisono.kernels.recurrent.mamba2 import mamba2
from unisono.kernels.recurrent.mamba_conv import mamba_conv
from unisono.kv.specs import Recurrent, Remembered
from unisono.kv.store import RecurrentView
from unisono.layers.activations import Activations, OfAllRanks
from unisono.layers.formats.base import WHOLE, Share
from unisono.layers.linear import EndsInLinear
from unisono.models.blocks.gated_delta import HEAD_SIZES, _parameter, _Weight, recurrent_share
from unisono.models.blocks.layers import LayerSpec
from unisono.models.load.build import Builder, require

PARTS = "z", "x", "b", "c", "dt"
"""Parts of ``in_proj`` in the order of checkpoints."""


@dataclass(frozen=True)
class Mamba2Spec:
    """One Mamba2 layer.

    heads: a multiple r of groups; heads g r … g r + r - 1 share the B and C of group g. The norm of the gated output
        has a group of elements for each of them.
    conv_size: taps of the causal convolution over x, B and C. conv_bias, proj_bias: it has a bias; both products have.
    step_limits: least and greatest step of a token.

    Modules, as named by families: ``in_proj.z``, ``in_proj.cbx`` and ``in_proj.dt``, ``conv``, ``norm``, ``o``, and
    the layer itself for A_log, D and dt_bias. :func:`rows` finds a part's rows in one ``in_proj``. Raises
    CheckpointError for values that cannot be computed.
    """

    groups: int
    heads: int
    state_size: int
    head_dim: int
    conv_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        groups, heads = self.groups, self.heads
        require(groups >= 1, "groups of Mamba2", groups, "there must be at least 1")
        require(heads >= 1 and heads % groups == 0, "heads of Mamba2", heads, f"it must be a multiple of {groups}")
        rule = f"the kernels compute {', '.join(map(str, HEAD_SIZES))}"
        require(self.state_size in HEAD_SIZES, "state size of Mamba2", self.state_size, rule)
        require(self.head_dim in HEAD_SIZES, "head size of Mamba2", self.head_dim, rule)
        require(2 <= self.conv_size <= 8, "convolution of Mamba2", self.conv_size, "the kernels compute 2 to 8 taps")
        low, high = self.step_limits
        require(0 <= low < high, "time_step_limit", [low, high], "it must be two numbers, the first below the second")

    def of(self, ranks: Ranks) -> Mamba2Spec:
        """The heads of one rank, and the groups that they share.

        With fewer groups than ranks, several ranks hold the same group. Raises ConfigError if the heads cannot be
        divided like this.
        """
        count = ranks.count
        check_mamba_heads(self.heads, self.groups, count)
        return replace(self, groups=max(1, self.groups // count), heads=self.heads // count)

    def share(self, ranks: Ranks) -> Share:
        """A rank's share of C, B and x of one tensor."""
        return recurrent_share(ranks, self.channels, self.groups)

    @property
    def channels(self) -> tuple[int, int]:
        """Elements of B of all groups (as many as of C), and of x of all heads."""
        return self.groups * self.state_size, self.heads * self.head_dim

    def build(self, builder: Builder) -> Mamba2:
        return Mamba2(self, builder)


def rows(*parts: str, within: tuple[str, ...] = PARTS) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of ``parts``, one after the other, in a tensor that has the parts ``within``."""

    def found(layer: LayerSpec) -> torch.Tensor:
        spec = cast(Mamba2Spec, layer.mixer)
        keys, values = spec.channels
        sizes = {"z": values, "x": values, "b": keys, "c": keys, "dt": spec.heads}
        counts = [sizes[part] for part in within]
        of = dict(zip(within, torch.arange(sum(counts)).split(counts), strict=True))
        return torch.cat([of[part] for part in parts])

    return found


def mamba2_rows(mixer: str) -> dict[str, Callable[[LayerSpec], torch.Tensor]]:
    """Rows of the checkpoint's tensors for the modules of a Mamba2 mixer (``Family.rows``). mixer: its path."""
    return {
        f"{mixer}.in_proj.z": rows("z"),
        f"{mixer}.in_proj.cbx": rows("c", "b", "x"),
        f"{mixer}.in_proj.dt": rows("dt"),
        f"{mixer}.conv": rows("c", "b", "x", within=("x", "b", "c")),
    }


class Mamba2(EndsInLinear):
    """Projection, convolution, recurrence, gated norm. A mixer with recurrent state (``models/blocks/layers.py``).

    A_log, D, dt_bias and the norm's weight are fp32.
    """

    def __init__(self, spec: Mamba2Spec, builder: Builder) -> None:
        super().__init__()
        keys, values = spec.channels
        self.spec, self.dtype, self.eps, self.ranks = (
            spec.of(builder.ranks),
            builder.dtype,
            builder.rms_eps,
            builder.ranks,
        )
        each, hidden, parts = builder.share, builder.hidden_size, {"z": values, "cbx": 2 * keys + values}
        parts["dt"] = spec.heads
        shares = {"z": each, "cbx": spec.share(builder.ranks), "dt": each}
        self.in_proj = builder.linear("in_proj", hidden, parts, spec.proj_bias, share=shares)
        conv = (parts["cbx"], 1, spec.conv_size), builder.dtype, builder.device, shares["cbx"]
        self.conv = _Weight(*conv)
        taps = self.conv.weight.data.permute(2, 1, 0).contiguous()
        self.conv.weight.data = taps.permute(2, 1, 0)  # a tap's channels are contiguous, as the kernel reads them
        self.conv.bias = _parameter((parts["cbx"],), *conv[1:]) if spec.conv_bias else None
        of_heads = (spec.heads,), torch.float32, builder.device, each
        self.A_log, self.D, self.dt_bias = _parameter(*of_heads), _parameter(*of_heads), _parameter(*of_heads)
        self.norms_whole = spec.groups % builder.ranks.count != 0  # a group's elements are those of several ranks
        self.norm_groups = spec.groups if self.norms_whole else self.spec.groups
        self.norm = _Weight((values,), torch.float32, builder.device, WHOLE if self.norms_whole else each)
        self.o = builder.joined("o", values, hidden, spec.proj_bias)

    def state_specs(self) -> Recurrent:
        """Snapshot: S and the convolution's last raw inputs. Buffered inputs: B, x and the gates, and the latest raw
        inputs."""
        spec, (keys, values) = self.spec, self.spec.channels
        state, taps = (spec.heads, spec.head_dim, spec.state_size), spec.conv_size - 1
        return Recurrent(
            {"state": (state, torch.float32), "conv": ((taps, 2 * keys + values), self.dtype)},
            {
                "conv": Remembered((2 * keys + values,), self.dtype, last=taps),
                "bx": Remembered((keys + values,), self.dtype),
                "gates": Remembered((2, spec.heads), torch.float32),
            },
        )

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.in_proj,)

    def forward(self, x: Activations, context: ForwardContext, state: RecurrentView) -> Activations:
        """x [T, H] -> [T, Hv · P], the input of ``o``, or [E, Hv · P] with last tokens. Updates the state."""
        z, cbx, dt = self.in_proj(x).split(self.in_proj.held, 1)
        y = self._recur(cbx, dt, context, state)
        if context.last_tokens is not None:
            y, z = context.last_tokens.select(y), context.last_tokens.select(z)
        if not self.norms_whole:
            return gated_group_norm(y, z, self.norm.weight, self.eps, self.norm_groups)
        both = self.ranks.gather(torch.cat((y, z), dim=1)).unflatten(1, (self.ranks.count, 2, -1))
        y, z = (part.flatten(1) for part in both.unbind(2))
        normed = gated_group_norm(y, z, self.norm.weight, self.eps, self.norm_groups)
        if self.o.split_inputs:
            return OfAllRanks(normed)
        start, stop = self.ranks.part(normed.shape[1])
        return normed[:, start:stop].contiguous()

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain recurrence in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        spec, (keys, values), tokens = self.spec, self.spec.channels, len(x)
        z, cbx, dt = self.in_proj.reference(x).split((values, 2 * keys + values, spec.heads), dim=1)
        bias = None if self.conv.bias is None else self.conv.bias.to(x.dtype)
        weight, pad = self.conv.weight.to(x.dtype), spec.conv_size - 1
        conv = nn.functional.conv1d(cbx.T, weight, bias, padding=pad, groups=cbx.shape[1]).T[:tokens]
        c, b, u = nn.functional.silu(conv).split((keys, keys, values), dim=1)
        shared = spec.heads // spec.groups
        c, b = (each.unflatten(1, (-1, spec.state_size)).repeat_interleave(shared, 1) for each in (c, b))
        u = u.unflatten(1, (spec.heads, -1))
        step = nn.functional.softplus(dt + self.dt_bias.to(x.dtype)).clamp(*spec.step_limits)
        decay = (-self.A_log.to(x.dtype).exp() * step).exp()
        state, y = x.new_zeros(spec.heads, spec.head_dim, spec.state_size), torch.empty_like(u)
        for t in range(tokens):
            taken = (step[t, :, None] * u[t])[:, :, None] * b[t, :, None, :]
            state = state * decay[t, :, None, None] + taken
            y[t] = torch.einsum("hpn,hn->hp", state, c[t]) + self.D.to(x.dtype)[:, None] * u[t]
        gated = (y.flatten(1) * nn.functional.silu(z)).unflatten(1, (spec.groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return self.o.reference(normed.flatten(1) * self.norm.weight.to(x.dtype))

    def advance(self, context: ForwardContext, state: RecurrentView) -> None:
        """Advance the state in a pass without tokens; see :class:`unisono.models.blocks.layers.AdvancesSnapshot`."""
        new = self.conv.weight.new_empty
        self._recur(new((0, self.conv.weight.shape[0])), new((0, self.spec.heads)), context, state)

    def _recur(
        self, cbx: torch.Tensor, dt: torch.Tensor, context: ForwardContext, state: RecurrentView
    ) -> torch.Tensor:
        """cbx [T, 2 G · N + Hv · P], dt [T, Hv] -> [T, Hv · P]."""
        assert context.recurrent is not None
        where, starts = context.recurrent.fields, context.query_start
        weights = self.conv.weight, self.conv.bias, dt, self.A_log, self.dt_bias, *self.spec.step_limits
        cbx, gates = mamba_conv(cbx, *weights, state.snapshot["conv"], state.inputs["conv"], *where, starts)
        kept = state.snapshot["state"], state.inputs["bx"], state.inputs["gates"]
        return mamba2(cbx, gates, self.D, *kept, *where, starts)
