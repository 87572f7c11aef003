"""Gated DeltaNet: a mixer whose tokens read a state of fixed size (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

Built by the blocks of a family (docs/adding-a-model.md) like attention. Shapes: T tokens of a pass, E tokens whose
output is read, H hidden, Hk / Hv key / value heads, K / V their sizes, J taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.attention.context import PassContext
from unisono.kernels.causal_conv import causal_conv
from unisono.kernels.delta_round import Convolution, Kept, Norm, delta_round, prove_delta_round, rehearse_delta_round
from unisono.kernels.fp8_quantize import handed_on
from unisono.kernels.gated_delta import gated_delta
from unisono.kernels.gated_norm import quantises
from unisono.layers.activations import Activations, gated_norm
from unisono.layers.formats import PLAIN
from unisono.models.build import Builder, require
from unisono.state.specs import Remembered, Tail
from unisono.state.store import TailView

HEAD_SIZES = (16, 32, 64, 128)
"""What the kernels compute."""


@dataclass(frozen=True)
class GatedDeltaSpec:
    """One Gated DeltaNet layer.

    num_value_heads: a multiple r of num_key_heads; value heads h r … h r + r - 1 share key head h. conv_size: taps of
    the causal convolution over queries, keys and values.

    Raises CheckpointError for values that cannot be computed.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int = 4

    def __post_init__(self) -> None:
        keys, values = self.num_key_heads, self.num_value_heads
        require(keys >= 1, "linear_num_key_heads", keys, "it must be at least 1")
        rule = f"it must be a multiple of {keys} key heads"
        require(values >= 1 and values % keys == 0, "linear_num_value_heads", values, rule)
        for name, size in (("key", self.key_head_dim), ("value", self.value_head_dim)):
            rule = f"the kernels compute heads of {', '.join(map(str, HEAD_SIZES))}"
            require(size in HEAD_SIZES, f"linear_{name}_head_dim", size, rule)
        require(2 <= self.conv_size <= 8, "linear_conv_kernel_dim", self.conv_size, "the kernels compute 2 to 8 taps")

    @property
    def channels(self) -> tuple[int, int]:
        """Elements of all queries, as many as of all keys, and of all values."""
        return self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim

    def build(self, builder: Builder) -> GatedDelta:
        return GatedDelta(self, builder)


class GatedDelta(nn.Module):
    """Projections, convolution, gated delta rule, gated norm.

    ``in_proj`` has the projections qkv, z, b and a. Where qkv and z are quantised, ``gates`` has b and a. A_log,
    dt_bias and the norm's weight are fp32.
    """

    def __init__(self, spec: GatedDeltaSpec, builder: Builder) -> None:
        super().__init__()
        self.spec, self.dtype, self.eps = spec, builder.dtype, builder.rms_eps
        keys, values = spec.channels
        heads, hidden = spec.num_value_heads, builder.hidden_size
        wide, gates = {"qkv": 2 * keys + values, "z": values}, {"b": heads, "a": heads}
        apart = any(builder.at("in_proj").at(name).format_here is not PLAIN for name in wide)
        self.in_proj = builder.linear("in_proj", hidden, wide if apart else wide | gates)
        self.gates = builder.linear("gates", hidden, gates) if apart else None
        self.conv = _Weight((2 * keys + values, 1, spec.conv_size), builder.dtype, builder.device)
        self.A_log = _parameter((heads,), torch.float32, builder.device)
        self.dt_bias = _parameter((heads,), torch.float32, builder.device)
        self.norm = _Weight((spec.value_head_dim,), torch.float32, builder.device)
        self.o = builder.linear("o", values, builder.hidden_size)
        self._widths = [*wide.values()] if apart else [*wide.values(), 2 * heads]

    def state_specs(self) -> Tail:
        """S and the convolution's last raw inputs; since then keys, values and gates, and the latest raw inputs."""
        spec, (keys, values) = self.spec, self.spec.channels
        state, taps = (spec.num_value_heads, spec.value_head_dim, spec.key_head_dim), spec.conv_size - 1
        return Tail(
            {"state": (state, torch.float32), "conv": ((taps, 2 * keys + values), self.dtype)},
            {
                "conv": Remembered((2 * keys + values,), self.dtype, last=taps),
                "kv": Remembered((keys + values,), self.dtype),
                "gates": Remembered((2, spec.num_value_heads), torch.float32),
            },
        )

    @property
    def readers(self) -> tuple[object, ...]:
        """What reads the block's input."""
        return (self.in_proj,) if self.gates is None else (self.in_proj, self.gates)

    def forward(self, x: Activations, context: PassContext, state: TailView) -> Activations:
        """x [T, H] -> [T, Hv · V], which ``o`` reads, or with last tokens [E, Hv · V]; moves the state on."""
        u, z, *gates = self.in_proj(x).split(self._widths, 1)
        ba = gates[0] if self.gates is None else self.gates(x)
        if context.query_start is None and context.last_tokens is None:
            return self._round(u, z, ba, context, state)
        out = self._recur(u, ba, context, state)
        if context.last_tokens is not None:
            out, z = context.last_tokens.select(out), context.last_tokens.select(z)
        return gated_norm(out, z, self.norm.weight, self.eps, self.o.wish)

    def settle(self, context: PassContext, state: TailView) -> None:
        """Move the state on as a pass without tokens says; see :class:`unisono.models.blocks.Settles`."""
        new = self.conv.weight.new_empty
        self._recur(new((0, self.conv.weight.shape[0])), new((0, 2 * self.spec.num_value_heads)), context, state)

    def _round(
        self, u: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, context: PassContext, state: TailView
    ) -> Activations:
        """:meth:`forward` of a round, after the projection."""
        assert context.tails is not None
        wish = self.o.wish
        group = wish.group if wish and not wish.keep and quantises(self.spec.value_head_dim, wish.group) else None
        norm = Norm(z, self.norm.weight, self.eps, group)
        normed, *quantised = delta_round(u, ba, *self._kept(state), norm, *context.tails.fields)
        return normed if group is None else handed_on(quantised, z, group)

    def _kept(self, state: TailView) -> tuple[Convolution, Kept]:
        """The convolution and the rule, with what rows keep of them."""
        conv = state.snapshot["conv"], state.inputs["conv"]
        kept = Kept(state.snapshot["state"], state.inputs["kv"], state.inputs["gates"])
        return Convolution(self.conv.weight, self.A_log, self.dt_bias, *conv), kept

    def prove_rounds(self, width: int, rehearse: bool = False) -> bool:
        """See :func:`unisono.kernels.delta_round.prove_delta_round`; width: tokens of a row in the widest round.

        rehearse: only compile what that takes.
        """
        spec, device = self.state_specs(), self.conv.weight.device
        snapshot = {n: torch.empty(1, *shape, dtype=t, device=device) for n, (shape, t) in spec.snapshot.items()}
        inputs = {
            n: torch.empty(1, r.ring(width), *r.shape, dtype=r.dtype, device=device) for n, r in spec.inputs.items()
        }
        given = *self._kept(TailView(snapshot, inputs)), self.eps
        if rehearse:
            rehearse_delta_round(*given)
            return False
        return prove_delta_round(*given)

    def _recur(self, u: torch.Tensor, ba: torch.Tensor, context: PassContext, state: TailView) -> torch.Tensor:
        """u [T, 2 Hk · K + Hv · V], ba [T, 2 Hv] -> [T, Hv · V]."""
        assert context.tails is not None
        where, starts = context.tails.fields, context.query_start
        conv = state.snapshot["conv"], state.inputs["conv"]
        qkv, gates = causal_conv(u, self.conv.weight, ba, self.A_log, self.dt_bias, *conv, *where, starts)
        kept = state.snapshot["state"], state.inputs["kv"], state.inputs["gates"]
        return gated_delta(qkv, gates, *kept, *where, starts)

    def project(
        self, y: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """(residual + ``o(y)``, ``norm`` of it); without a norm the sum twice."""
        return self.o.then_norm(y, residual, norm)


class _Weight(nn.Module):
    """A tensor called ``weight``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = _parameter(shape, dtype, device)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
