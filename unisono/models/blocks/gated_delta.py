"""Gated DeltaNet: a mixer with recurrent state of fixed size (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

Built by a family's blocks (docs/extend/model.md), as attention is. Shapes: T tokens of a pass, E tokens whose output
is read, H hidden, Hk / Hv key / value heads, K / V their sizes, J taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.config.preflight.ranks import check_recurrent_heads
from unisono.distributed.gather import Ranks
from unisono.kernels.recurrent.causal_conv import causal_conv
from unisono.kernels.recurrent.gated_delta import gated_delta
from unisono.kv.specs import Recurrent, Remembered
from unisono.kv.store import RecurrentView
from unisono.layers.activations import Activations, gated_norm
from unisono.layers.formats.base import PLAIN, WHOLE, PartOf, Share
from unisono.layers.linear import EndsInLinear
from unisono.models.load.build import Builder, require

HEAD_SIZES = (16, 32, 64, 128)
"""Head sizes supported by the kernels."""


@dataclass(frozen=True)
class GatedDeltaSpec:
    """One Gated DeltaNet layer.

    num_value_heads: a multiple r of num_key_heads; value heads h r … h r + r - 1 share key head h.
    conv_size: taps of the causal convolution over queries, keys and values.

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

    def of(self, ranks: Ranks) -> GatedDeltaSpec:
        """The heads of one rank: its part of the value heads, and the key heads that they share.

        With fewer key heads than ranks, several ranks hold the same key head. Raises ConfigError if the heads cannot be
        divided like this.
        """
        keys, values, count = self.num_key_heads, self.num_value_heads, ranks.count
        check_recurrent_heads(values, keys, count)
        return replace(self, num_key_heads=max(1, keys // count), num_value_heads=values // count)

    def share(self, ranks: Ranks) -> Share:
        """A rank's share of the queries, keys and values of one tensor."""
        return recurrent_share(ranks, self.channels, self.num_key_heads)

    @property
    def channels(self) -> tuple[int, int]:
        """Elements of all queries (as many as of all keys), and of all values."""
        return self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim

    def build(self, builder: Builder) -> GatedDelta:
        return GatedDelta(self, builder)


def recurrent_share(ranks: Ranks, channels: tuple[int, int], key_heads: int) -> Share:
    """A rank's share of one tensor with two parts of ``channels[0]`` elements and one of ``channels[1]``.

    key_heads: heads, or groups, of each of the first two. With fewer than ranks, several ranks hold the same one.
    """
    if ranks.count == 1:
        return WHOLE
    (keys, values), of_keys = channels, min(ranks.count, key_heads)
    return Share(ranks.index, ranks.count, (keys, keys, values), (of_keys, of_keys, ranks.count))


class GatedDelta(EndsInLinear):
    """Projections, convolution, gated delta rule, gated norm.

    ``in_proj`` has the projections qkv, z, b and a. If qkv and z are quantised, ``gates`` has b and a. A_log, dt_bias
    and the norm's weight are fp32.
    """

    def __init__(self, spec: GatedDeltaSpec, builder: Builder) -> None:
        super().__init__()
        keys, values = spec.channels
        heads, hidden, ranks = spec.num_value_heads, builder.hidden_size, builder.ranks
        self.spec, self.dtype, self.eps = spec.of(ranks), builder.dtype, builder.rms_eps
        wide, gates = {"qkv": 2 * keys + values, "z": values}, {"b": heads, "a": heads}
        apart = any(builder.at("in_proj").at(name).format_here is not PLAIN for name in wide)
        each = builder.share
        shares = dict.fromkeys(("z", "b", "a"), each)
        shares["qkv"] = spec.share(ranks)
        together = wide if apart else wide | gates
        self.in_proj = builder.linear("in_proj", hidden, together, share={name: shares[name] for name in together})
        self.gates = builder.linear("gates", hidden, gates, share=each) if apart else None
        self.conv = _Weight((2 * keys + values, 1, spec.conv_size), builder.dtype, builder.device, shares["qkv"])
        taps = self.conv.weight.data.permute(2, 1, 0).contiguous()
        self.conv.weight.data = taps.permute(2, 1, 0)  # a tap's channels are contiguous, as causal_conv reads them
        self.A_log = _parameter((heads,), torch.float32, builder.device, each)
        self.dt_bias = _parameter((heads,), torch.float32, builder.device, each)
        self.norm = _Weight((spec.value_head_dim,), torch.float32, builder.device)
        self.o = builder.joined("o", values, builder.hidden_size)
        widths = dict(zip(self.in_proj.projections, self.in_proj.held, strict=True))
        self._widths = [widths["qkv"], widths["z"]] if apart else [widths["qkv"], widths["z"], 2 * widths["b"]]

    def state_specs(self) -> Recurrent:
        """Snapshot: S and the convolution's last raw inputs. Buffered inputs: keys, values and gates, and the latest
        raw inputs."""
        spec, (keys, values) = self.spec, self.spec.channels
        state, taps = (spec.num_value_heads, spec.value_head_dim, spec.key_head_dim), spec.conv_size - 1
        return Recurrent(
            {"state": (state, torch.float32), "conv": ((taps, 2 * keys + values), self.dtype)},
            {
                "conv": Remembered((2 * keys + values,), self.dtype, last=taps),
                "kv": Remembered((keys + values,), self.dtype),
                "gates": Remembered((2, spec.num_value_heads), torch.float32),
            },
        )

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.in_proj,) if self.gates is None else (self.in_proj, self.gates)

    def forward(self, x: Activations, context: ForwardContext, state: RecurrentView) -> Activations:
        """x [T, H] -> [T, Hv · V], the input of ``o``, or [E, Hv · V] with last tokens. Updates the state."""
        u, z, *gates = self.in_proj(x).split(self._widths, 1)
        out = self._recur(u, gates[0] if self.gates is None else self.gates(x), context, state)
        if context.last_tokens is not None:
            out, z = context.last_tokens.select(out), context.last_tokens.select(z)
        return gated_norm(out, z, self.norm.weight, self.eps, self.o.input_format)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain recurrence in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        spec, (keys, values), tokens = self.spec, self.spec.channels, len(x)
        inputs = self.in_proj.reference(x)
        if self.gates is not None:
            inputs = torch.cat((inputs, self.gates.reference(x)), dim=1)
        heads = spec.num_value_heads
        u, z, b, a = inputs.split((2 * keys + values, values, heads, heads), dim=1)
        conv = nn.functional.conv1d(u.T, self.conv.weight.to(x.dtype), padding=spec.conv_size - 1, groups=u.shape[1]).T[
            :tokens
        ]
        q, k, v = nn.functional.silu(conv).split((keys, keys, values), dim=1)
        shared = heads // spec.num_key_heads
        q, k = (_unit(each.unflatten(1, (-1, spec.key_head_dim))).repeat_interleave(shared, 1) for each in (q, k))
        v, q = v.unflatten(1, (heads, -1)), q * spec.key_head_dim**-0.5
        decay = (-self.A_log.to(x.dtype).exp() * nn.functional.softplus(a + self.dt_bias.to(x.dtype))).exp()
        state, out = x.new_zeros(heads, spec.value_head_dim, spec.key_head_dim), torch.empty_like(v)
        for t in range(tokens):
            state = state * decay[t, :, None, None]
            error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t, :, None].sigmoid()
            state = state + error[:, :, None] * k[t, :, None, :]
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight.to(x.dtype)
        return self.o.reference(normed.flatten(1) * nn.functional.silu(z))

    def advance(self, context: ForwardContext, state: RecurrentView) -> None:
        """Advance the state in a pass without tokens; see :class:`unisono.models.blocks.layers.AdvancesSnapshot`."""
        new = self.conv.weight.new_empty
        self._recur(new((0, self.conv.weight.shape[0])), new((0, 2 * self.spec.num_value_heads)), context, state)

    def _recur(self, u: torch.Tensor, ba: torch.Tensor, context: ForwardContext, state: RecurrentView) -> torch.Tensor:
        """u [T, 2 Hk · K + Hv · V], ba [T, 2 Hv] -> [T, Hv · V]."""
        assert context.recurrent is not None
        where, starts = context.recurrent.fields, context.query_start
        conv = state.snapshot["conv"], state.inputs["conv"]
        qkv, gates = causal_conv(u, self.conv.weight, ba, self.A_log, self.dt_bias, *conv, *where, starts)
        kept = state.snapshot["state"], state.inputs["kv"], state.inputs["gates"]
        return gated_delta(qkv, gates, *kept, *where, starts)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] divided by its norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class _Weight(nn.Module):
    """Holder of a tensor called ``weight``, or of a share of its rows. bias: a second one; None: there is none."""

    bias: nn.Parameter | None

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, share: Share = WHOLE
    ) -> None:
        super().__init__()
        self.weight = _parameter(shape, dtype, device, share)
        self.register_parameter("bias", None)


def _parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, share: Share = WHOLE
) -> nn.Parameter:
    held = (share.size(shape[0]), *shape[1:])
    parameter = nn.Parameter(torch.empty(held, dtype=dtype, device=device), requires_grad=False)
    if share != WHOLE:
        parameter.part_of = PartOf(shape, 0, share.runs(shape[0]))  # type: ignore[attr-defined]
    return parameter
