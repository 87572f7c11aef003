"""Kimi Delta Attention: a mixer with recurrent state of fixed size (Kimi Linear, arXiv 2510.26692).

It is Gated DeltaNet with a decay for each channel of a key, and an output gate of two products. Built by a family's
blocks (docs/extend/model.md), as attention is. Shapes: T tokens of a pass, E tokens whose output is read, H hidden,
Hv heads, K elements of a head, J taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.config.preflight.ranks import check_recurrent_heads
from unisono.distributed.gather import Ranks
from unisono.kernels.recurrent.kimi_conv import kimi_conv
from unisono.kernels.recurrent.kimi_delta import kimi_delta
from unisono.kv.specs import Recurrent, Remembered
from unisono.kv.store import RecurrentView
from unisono.layers.activations import Activations, gated_norm
from unisono.layers.formats.base import PLAIN, WHOLE, Slices, WeightTarget
from unisono.layers.linear import EndsInLinear
from unisono.models.blocks.gated_delta import HEAD_SIZES, _parameter, _unit, _Weight, recurrent_share
from unisono.models.load.build import Builder, require

PARTS = "q", "k", "v"


@dataclass(frozen=True)
class KimiDeltaSpec:
    """One layer of Kimi Delta Attention.

    heads: of queries, keys and values. head_dim: elements of each. conv_size: taps of the three causal convolutions.

    Modules, as named by families: ``in_proj.q``, ``.k``, ``.v``, ``.f_a``, ``.g_a`` and ``.b`` (the last three in
    ``gates`` if q, k and v are quantised), ``f_b``, ``g_b``, ``conv.q``, ``.k`` and ``.v``, ``decay`` (A_log and
    dt_bias), ``norm`` and ``o``. Raises CheckpointError for values that cannot be computed.
    """

    heads: int
    head_dim: int
    conv_size: int = 4

    def __post_init__(self) -> None:
        require(self.heads >= 1, "linear_attn_config.num_heads", self.heads, "it must be at least 1")
        rule = f"the kernels compute heads of {', '.join(map(str, HEAD_SIZES))}"
        require(self.head_dim in HEAD_SIZES, "linear_attn_config.head_dim", self.head_dim, rule)
        taps = self.conv_size
        require(2 <= taps <= 8, "linear_attn_config.short_conv_kernel_size", taps, "the kernels compute 2 to 8 taps")

    def of(self, ranks: Ranks) -> KimiDeltaSpec:
        """The heads of one rank. Raises ConfigError if they cannot be divided."""
        check_recurrent_heads(self.heads, self.heads, ranks.count)
        return replace(self, heads=self.heads // ranks.count)

    @property
    def channels(self) -> int:
        """Elements of all queries, as many as of all keys and of all values."""
        return self.heads * self.head_dim

    def build(self, builder: Builder) -> KimiDelta:
        return KimiDelta(self, builder)


class KimiDelta(EndsInLinear):
    """See :class:`KimiDeltaSpec`. A mixer with recurrent state (``models/blocks/layers.py``)."""

    def __init__(self, spec: KimiDeltaSpec, builder: Builder) -> None:
        super().__init__()
        channels, size, hidden, each = spec.channels, spec.head_dim, builder.hidden_size, builder.share
        self.spec, self.dtype, self.eps = spec.of(builder.ranks), builder.dtype, builder.rms_eps
        wide, small = dict.fromkeys(PARTS, channels), {"f_a": size, "g_a": size, "b": spec.heads}
        apart = any(builder.at("in_proj").at(name).format_here is not PLAIN for name in wide)
        shares = {**dict.fromkeys((*wide, "b"), each), "f_a": WHOLE, "g_a": WHOLE}
        together = wide if apart else wide | small
        self.in_proj = builder.linear("in_proj", hidden, together, share={name: shares[name] for name in together})
        of_small = {name: shares[name] for name in small}
        self.gates = builder.linear("gates", hidden, small, share=of_small) if apart else None
        self.f_b, self.g_b = (builder.linear(name, size, channels, share=each) for name in ("f_b", "g_b"))
        self.conv, self.decay = KimiTaps(spec, builder), KimiDecay(spec, builder)
        self.norm = _Weight((size,), torch.float32, builder.device)
        self.o = builder.joined("o", channels, hidden)

    def state_specs(self) -> Recurrent:
        """Snapshot: S and the convolutions' last raw inputs. Buffered inputs: keys, values and gates, and the latest
        raw inputs."""
        spec, taps, channels = self.spec, self.spec.conv_size - 1, self.spec.channels
        return Recurrent(
            {
                "state": ((spec.heads, spec.head_dim, spec.head_dim), torch.float32),
                "conv": ((taps, 3 * channels), self.dtype),
            },
            {
                "conv": Remembered((3 * channels,), self.dtype, last=taps),
                "kv": Remembered((2 * channels,), self.dtype),
                "gates": Remembered((channels + spec.heads,), torch.float32),
            },
        )

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.in_proj,) if self.gates is None else (self.in_proj, self.gates)

    def forward(self, x: Activations, context: ForwardContext, state: RecurrentView) -> Activations:
        """x [T, H] -> [T, Hv · K], the input of ``o``, or [E, Hv · K] with last tokens. Updates the state."""
        spec, mixed = self.spec, self.in_proj(x)
        u, small = mixed[:, : 3 * spec.channels], mixed[:, 3 * spec.channels :]
        f_a, g_a, b = (small if self.gates is None else self.gates(x)).split(
            (spec.head_dim, spec.head_dim, spec.heads), 1
        )
        out = self._recur(u, self.f_b(f_a.contiguous()), b, context, state)
        if context.last_tokens is not None:
            out, g_a = context.last_tokens.select(out), context.last_tokens.select(g_a)
        z = self.g_b(g_a.contiguous())
        return gated_norm(out, z, self.norm.weight, self.eps, self.o.input_format, sigmoid=True)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain recurrence in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        spec, tokens = self.spec, len(x)
        inputs = self.in_proj.reference(x)
        if self.gates is not None:
            inputs = torch.cat((inputs, self.gates.reference(x)), dim=1)
        sizes = 3 * spec.channels, spec.head_dim, spec.head_dim, spec.heads
        u, f_a, g_a, b = inputs.split(sizes, dim=1)
        taps, pad = self.conv.weight.to(x.dtype), spec.conv_size - 1
        conv = nn.functional.conv1d(u.T, taps, padding=pad, groups=u.shape[1]).T[:tokens]
        q, k, v = (part.unflatten(1, (spec.heads, -1)) for part in nn.functional.silu(conv).chunk(3, dim=1))
        q, k = _unit(q) * spec.head_dim**-0.5, _unit(k)
        step = nn.functional.softplus(self.f_b.reference(f_a) + self.decay.dt_bias.to(x.dtype)).view_as(k)
        left = (-self.decay.A_log.to(x.dtype).exp()[:, None] * step).exp()
        state, out = x.new_zeros(spec.heads, spec.head_dim, spec.head_dim), torch.empty_like(v)
        for t in range(tokens):
            state = state * left[t, :, None]
            error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t, :, None].sigmoid()
            state = state + error[:, :, None] * k[t, :, None, :]
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight.to(x.dtype)
        return self.o.reference(normed.flatten(1) * self.g_b.reference(g_a).sigmoid())

    def advance(self, context: ForwardContext, state: RecurrentView) -> None:
        """Advance the state in a pass without tokens; see :class:`unisono.models.blocks.layers.AdvancesSnapshot`."""
        new, spec = self.conv.weight.new_empty, self.spec
        self._recur(new((0, 3 * spec.channels)), new((0, spec.channels)), new((0, spec.heads)), context, state)

    def _recur(
        self, u: torch.Tensor, f: torch.Tensor, b: torch.Tensor, context: ForwardContext, state: RecurrentView
    ) -> torch.Tensor:
        """u [T, 3 Hv · K], f [T, Hv · K], b [T, Hv] -> [T, Hv · K]."""
        assert context.recurrent is not None
        where, starts = context.recurrent.fields, context.query_start
        weights = self.conv.weight, f, b, self.decay.A_log, self.decay.dt_bias
        qkv, gates = kimi_conv(u, *weights, state.snapshot["conv"], state.inputs["conv"], *where, starts)
        kept = state.snapshot["state"], state.inputs["kv"], state.inputs["gates"]
        return kimi_delta(qkv, gates, *kept, *where, starts)


class KimiTaps(_Weight):
    """Taps of the convolutions over queries, keys and values, which a checkpoint stores as three tensors [C, 1, J]."""

    def __init__(self, spec: KimiDeltaSpec, builder: Builder) -> None:
        self.whole, self.share = (spec.channels, 1, spec.conv_size), builder.share
        shape = 3 * spec.channels, 1, spec.conv_size
        share = recurrent_share(builder.ranks, (spec.channels, spec.channels), spec.heads)
        super().__init__(shape, builder.dtype, builder.device, share)
        taps = self.weight.data.permute(2, 1, 0).contiguous()
        self.weight.data = taps.permute(2, 1, 0)  # a tap's channels are contiguous, as the kernel reads them

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name, target) of each part."""
        part = None if self.share == WHOLE else Slices(0, self.share.runs(self.whole[0]))
        for name, rows in zip(PARTS, self.weight.data.chunk(3), strict=True):
            yield f"{name}.weight", WeightTarget(rows, self.whole, part=part)


class KimiDecay(nn.Module):
    """A_log [Hv] and dt_bias [Hv · K] fp32 of a layer. Checkpoints store A_log [1, 1, Hv, 1]."""

    def __init__(self, spec: KimiDeltaSpec, builder: Builder) -> None:
        super().__init__()
        self.sizes, self.share = (spec.heads, spec.channels), builder.share
        of_rank = torch.float32, builder.device, builder.share
        self.A_log, self.dt_bias = (_parameter((size,), *of_rank) for size in self.sizes)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name, target) of both tensors."""
        heads, channels = self.sizes
        parts = [None if self.share == WHOLE else Slices(dim, self.share.runs(size)) for dim, size in
                 ((2, heads), (0, channels))]  # fmt: skip
        yield "A_log", WeightTarget(self.A_log.data.view(1, 1, -1, 1), (1, 1, heads, 1), part=parts[0])
        yield "dt_bias", WeightTarget(self.dt_bias.data, (channels,), part=parts[1])
