"""Blocks of decoder models: a decoder layer is a mixer and a feed-forward, each built from a spec.

A spec is data (sizes and kinds, read from config.json by a family file); its ``build`` makes the module. A new kind of
layer is another spec and module that follow the protocols below; the existing blocks stay unchanged.

Shapes: T tokens of a pass, E tokens whose output is read, H hidden, Hq / Hkv query / KV heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from unisono.attention.base import KV, AttentionOptions, LastTokens, attended
from unisono.attention.context import ForwardContext
from unisono.config.preflight.ranks import check_attention_heads
from unisono.distributed.gather import Ranks
from unisono.kernels import rope_and_cache
from unisono.kernels.gemm.fp8_quantize import E4M3
from unisono.kernels.norm.activation import GATES
from unisono.kv.specs import ALL, PAGE_SIZE, Paged, Tree
from unisono.layers.activations import Activations, InputFormat, common_input_format, consumers_of, plain, sigmoid_gated
from unisono.layers.formats.base import WHOLE, PartOf, Share
from unisono.layers.linear import EndsInLinear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import Factor, FusesNorms, RMSNorm, add_normed, scaled_sum
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.head_steps import HeadStepsSpec, reference_attention, reference_heads
from unisono.models.blocks.joint_norm import normed_jointly
from unisono.models.load.build import Builder, require
from unisono.types import ConfigError


class Stream(NamedTuple):
    """Values passed between layers: residual sum x, and its norm, which the next block reads; [T, H] or [E, H] each.

    A product, its sum with the residual and the next norm are one fused step, so a layer ends with the next one's norm.
    per_layer: inputs of every layer beside the stream (``models/blocks/layer_inputs.py``); None in most models.
    """

    x: torch.Tensor
    normed: Activations
    per_layer: torch.Tensor | None = None

    def select(self, last: LastTokens) -> Stream:
        """The stream of these tokens alone, without the norm."""
        x = last.select(self.x)
        return Stream(x, x, None if self.per_layer is None else last.select(self.per_layer))


class FeedForward(Protocol):
    """The second half of a layer.

    It may have ``consumers``, which read its input: the norm before it then emits their format. Without such a norm it
    may have ``norms`` in its place (:class:`unisono.layers.norm.NormsSum`).
    """

    def __call__(self, x: Activations, positions: torch.Tensor | None = None) -> Any:
        """[T, H] -> the input of :meth:`project`. positions [T]: tokens below 0 are padding; None: no padding."""
        ...

    def project(self, y: Any, residual: torch.Tensor, norm: nn.Module | None) -> tuple[torch.Tensor, Activations]:
        """Return (residual + the block's output, ``norm`` of it); without a norm, the sum twice."""
        ...

    def output(self, y: Any) -> torch.Tensor:
        """The block's output alone, [T, H] or [E, H]: for layers that norm it before it is added."""
        ...


class Mixer(Protocol):
    """The first half of a layer, in which a token reads other tokens. It may have ``consumers``, as a feed-forward."""

    def __call__(self, x: Activations, context: ForwardContext, state: Any) -> Any:
        """x [T, H] -> the input of :meth:`project`, for T tokens or for ``context.last_tokens``. Updates the state."""
        ...

    def project(self, y: Any, residual: torch.Tensor, norm: nn.Module | None) -> tuple[torch.Tensor, Activations]:
        """See :meth:`FeedForward.project`."""
        ...

    def output(self, y: Any) -> torch.Tensor:
        """See :meth:`FeedForward.output`."""
        ...

    def state_specs(self) -> Tree:
        """Specs of the mixer's state; calls get the same tree with tensors in place of specs."""
        ...


@runtime_checkable
class AdvancesSnapshot(Protocol):
    """A mixer with recurrent state (:class:`unisono.kv.specs.Recurrent`)."""

    def advance(self, context: ForwardContext, state: Any) -> None:
        """Advance the snapshot to ``context.recurrent.until`` from buffered inputs, in a pass without tokens."""
        ...


class BlockSpec(Protocol):
    """Spec of a mixer or a feed-forward."""

    def build(self, builder: Builder) -> nn.Module: ...


# ---- attention --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer.

    rotary: the rotary table, and the fraction of each head it rotates (partial rotary).
    window: positions a token sees, itself included; 0: all; below 0: those of its own chunk of -window positions.
    scale: of scores; None: head_dim ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: no cap.
    sink: each head has a learnt logit in the softmax's denominator.
    output_gate: q_proj yields each head's query [D] and gate [D] in turn; the head's output is times sigmoid(gate).
    qk_norm: RMSNorm over each query and key head. norm_weights: a checkpoint has weights of it; otherwise they are 1.
    joint_qk_norm: RMSNorm over all query heads, and over all key heads (MiniMax-M2); ranks gather them before it.
    v_norm: RMSNorm over each value head, without a weight.
    k_is_v: values are the keys' projection, before norm and rotation.
    input_size: elements of a token that it reads; None: H.
    both_ways: tokens of a picture see each other in both directions (``AttentionInputs.until``).
    whole_text: a token sees later ones, too: the whole text, or a window that reaches as far ahead as back.
    steps: clipping, LayerNorm of heads or growth of queries (``head_steps.py``); None: none.

    Raises CheckpointError for values that cannot be computed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    window: int = 0
    scale: float | None = None
    soft_cap: float = 0.0
    sink: bool = False
    output_gate: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    input_size: int | None = None
    v_norm: bool = False
    k_is_v: bool = False
    both_ways: bool = False
    steps: HeadStepsSpec | None = None
    joint_qk_norm: bool = False
    whole_text: bool = False
    norm_weights: bool = True

    def __post_init__(self) -> None:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        require(heads >= 1, "num_heads", heads, "it must be at least 1")
        require(kv_heads >= 1 and heads % kv_heads == 0, "num_kv_heads", kv_heads, f"it must divide {heads} heads")
        require(dim >= 2 and dim % 2 == 0, "head_dim", dim, "rotary needs an even head size")
        require(not (self.k_is_v and self.output_gate), "output_gate", True, "values must have a projection then")
        require(self.window >= 0 or not (self.both_ways or self.whole_text), "window", self.window, "chunks are causal")
        joint = self.joint_qk_norm and (self.qk_norm or self.k_is_v or self.output_gate)
        require(not joint, "joint_qk_norm", True, "it excludes norms of heads, shared keys and values, and gates")

    @property
    def window_group(self) -> int:
        """Window group of the layer's pages: see :class:`unisono.kv.specs.Paged`."""
        return abs(self.window) or ALL

    def of(self, ranks: Ranks) -> AttentionSpec:
        """The heads of one rank: its part of the query heads, and the KV heads that they share.

        With fewer KV heads than ranks, several ranks hold the same KV head. Raises ConfigError if the heads cannot be
        divided like this.
        """
        if ranks.count == 1:
            return self
        heads, kv_heads, count = self.num_heads, self.num_kv_heads, ranks.count
        check_attention_heads(heads, kv_heads, count)
        if self.steps is not None:
            self.steps.check_divides(count)
        return replace(self, num_heads=heads // count, num_kv_heads=max(1, kv_heads // count))

    def shares(self, ranks: Ranks) -> dict[str, Share]:
        """A rank's share of each projection."""
        if ranks.count == 1:
            return dict.fromkeys(("q", "k", "v"), WHOLE)
        count = min(ranks.count, self.num_kv_heads)
        kv = Share(ranks.index * count // ranks.count, count) if count > 1 else WHOLE
        return {"q": Share(ranks.index, ranks.count), "k": kv, "v": kv}

    def build(self, builder: Builder) -> Attention:
        return Attention(self, builder)


class Attention(EndsInLinear):
    """Attention block: merged qkv; optional head norms, rotary and cache write in one op; paged attention."""

    def __init__(self, spec: AttentionSpec, builder: Builder) -> None:
        super().__init__()
        whole, spec = spec, spec.of(builder.ranks)
        self.spec, self.eps, self.ranks = spec, builder.rms_eps, builder.ranks
        self.kv_dtype = builder.kv_dtype or builder.dtype
        if self.kv_dtype == E4M3 and spec.head_dim % 4:
            raise ConfigError(f"--kv-cache-dtype fp8 needs heads of a multiple of 4 elements, not {spec.head_dim}.")
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.backend = builder.backend(spec.num_heads, spec.num_kv_heads)
        self.cos_sin, self.axes = builder.rotary(spec.rotary), builder.rotary_axes(spec.rotary)
        inputs, queries = spec.input_size or builder.hidden_size, whole.num_heads * spec.head_dim
        projections = {"q": 2 * queries if spec.output_gate else queries}
        of_keys = ("k",) if spec.k_is_v else ("k", "v")
        projections |= dict.fromkeys(of_keys, whole.num_kv_heads * spec.head_dim) if self.kv_heads else {}
        shares = {name: share for name, share in whole.shares(builder.ranks).items() if name in projections}
        self.qkv = builder.linear("qkv", inputs, projections, spec.qkv_bias, share=shares)
        self.o = builder.joined("o", queries, builder.hidden_size, spec.o_bias)
        self.q_norm = builder.norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm = builder.norm(spec.head_dim) if spec.qk_norm and self.kv_heads else None
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and not spec.norm_weights:
                norm.stored = False
        if spec.joint_qk_norm:
            self.q_norm, self.k_norm = builder.norm(queries), builder.norm(whole.num_kv_heads * spec.head_dim)
        sinks = torch.zeros(spec.num_heads, dtype=torch.float32, device=builder.device) if spec.sink else None
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.steps = None if spec.steps is None else spec.steps.build(builder.at("steps"), *heads)
        if self.sinks is not None and spec != whole:
            self.sinks.part_of = PartOf((whole.num_heads,), 0, (builder.ranks.part(whole.num_heads),))  # type: ignore[attr-defined]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads computed by the layer."""
        return self.spec.num_kv_heads

    def state_specs(self) -> Tree:
        """Keys and values, and the scales of e4m3 ones: the fields of :class:`KV`."""
        spec = self.spec
        rows = Paged((spec.num_kv_heads, PAGE_SIZE, spec.head_dim), self.kv_dtype, spec.window_group)
        scales = Paged((spec.num_kv_heads, PAGE_SIZE, 1), torch.uint8, spec.window_group)
        return (rows, rows, scales, scales) if self.kv_dtype == E4M3 else (rows, rows)

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.qkv,)

    def forward(self, x: Activations, context: ForwardContext, state: Sequence[torch.Tensor]) -> Activations:
        """x [T, H] -> [T, Hq · D], the input of ``o``, or [E, Hq · D] with last tokens. Writes T keys and values."""
        qkv, kv = self.qkv(x), KV(*state)
        q = self._rotate(qkv, context, kv)
        if context.last_tokens is not None:
            q = context.last_tokens.select(q)
        if not self.spec.output_gate:
            return self._attend(q, context.queries, kv, self.o.input_format)
        out = plain(self._attend(q, context.queries, kv))
        gates = qkv if context.last_tokens is None else context.last_tokens.select(qkv)
        return sigmoid_gated(out, gates, q.shape[1], self.o.input_format)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain attention in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        spec = self.spec
        heads = self.qkv.reference(x).unflatten(1, (-1, spec.head_dim))
        sizes = (spec.num_heads * (1 + spec.output_gate), *[spec.num_kv_heads] * (1 if spec.k_is_v else 2))
        q, k, *values = heads.split(sizes, dim=1)
        v = values[0] if values else k
        if spec.v_norm:
            v = v / (v.square().mean(-1, keepdim=True) + self.eps).sqrt()
        q, gate = (q[:, ::2], q[:, 1::2]) if spec.output_gate else (q, None)
        q, k, v = reference_heads((q, k, v), (self.q_norm, self.k_norm), self.cos_sin, spec.joint_qk_norm, self.steps)
        options = AttentionOptions(self.scale, spec.window, 0, spec.soft_cap, self.sinks, both_ways=spec.whole_text)
        out = reference_attention(q, k, v, options)
        return self.o.reference((out if gate is None else out * gate.sigmoid()).flatten(1))

    def _rotate(self, qkv: torch.Tensor, context: ForwardContext, kv: KV) -> torch.Tensor:
        """Norm and rotate the heads, write keys and values; return the queries [T, Hq, D]."""
        inputs, q_norm = context.inputs(self.spec.window_group), self.q_norm.weight if self.q_norm else None
        k_norm = self.k_norm.weight if self.k_norm else q_norm  # the op needs both norms even without keys
        if self.spec.joint_qk_norm:
            sizes = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
            qkv, q_norm, k_norm = normed_jointly(qkv, sizes, (q_norm, k_norm), self.eps, self.ranks), None, None
        table, positions = context.rotary(self.cos_sin, self.axes, self.spec.window_group)
        where, heads = (positions, inputs.slot_mapping, kv.k, kv.v), (self.spec.num_heads, self.kv_heads)
        values = self.spec.v_norm, self.spec.k_is_v
        if self.steps is not None:
            qkv, table = self.steps(qkv, table, positions)
        q = rope_and_cache(qkv, q_norm, k_norm, self.eps, table, *where, *heads, kv.k_scales, kv.v_scales, *values)
        return q if self.steps is None else self.steps.scaled(q, positions)

    def _attend(
        self, q: torch.Tensor, context: ForwardContext, kv: KV, input_format: InputFormat | None = None
    ) -> Activations:
        spec = self.spec
        inputs = context.plan(self.backend, spec.window_group, abs(spec.window), spec.whole_text)
        both_ways = spec.both_ways or spec.whole_text
        options = AttentionOptions(self.scale, spec.window, 0, spec.soft_cap, self.sinks, both_ways)
        return attended(self.backend, input_format, q, kv, inputs, options)


# ---- feed-forward -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP. bias: all three products have one. activation: one of ``kernels.norm.activation.GATES``; raises
    CheckpointError for others."""

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        require(self.intermediate_size >= 1, "intermediate_size", self.intermediate_size, "it must be at least 1")
        require(self.activation in GATES, "hidden_act", self.activation, f"supported are {', '.join(GATES)}")

    def build(self, builder: Builder) -> GatedMLP:
        size, hidden = self.intermediate_size, builder.hidden_size
        projections = {"gate": size, "up": size}
        divided = builder.ranks.count > 1 and builder.can_divide({"gate_up": projections})
        share = builder.share if divided else WHOLE
        return GatedMLP(
            builder.linear("gate_up", hidden, projections, self.bias, share=share),
            builder.joined("down", size, hidden, self.bias, split_inputs=divided),
            GATES[self.activation],
        )


# ---- layers -----------------------------------------------------------------------------------------


class NormOrder(NamedTuple):
    """Norms of one half of a layer. before: of the block's input. after: of its output, before it is added."""

    before: bool = True
    after: bool = False


PRE, SANDWICH, POST = NormOrder(), NormOrder(True, True), NormOrder(False, True)


@dataclass(frozen=True)
class LayerSpec:
    """``x + mixer(x)``, then ``x + feed_forward(x)``, with norms by ``mixer_norms`` and ``feed_forward_norms``.

    per_layer: a third part that gates the layer's own inputs by the stream (``models/blocks/layer_inputs.py``), with a
        norm after it.
    scaled: the layer's result is multiplied by a learnt number; the last part must then have a norm after it.
    times: factor of each block's output before it is added.

    A family with another order of residuals derives a spec that builds its own layer.
    """

    mixer: BlockSpec
    feed_forward: BlockSpec
    mixer_norms: NormOrder = PRE
    feed_forward_norms: NormOrder = PRE
    per_layer: BlockSpec | None = None
    scaled: bool = False
    times: float = 1.0

    def build(self, builder: Builder) -> DecoderLayer:
        mixer = self.mixer.build(builder.at("mixer"))
        feed_forward = self.feed_forward.build(builder.at("feed_forward"))
        orders = self.mixer_norms, self.feed_forward_norms
        norms = [builder.stream_norm() if order.before else None for order in orders]
        layer = DecoderLayer(mixer, feed_forward, *norms)
        layer.times = self.times
        if self.mixer_norms.after:
            layer.mixer_post_norm = builder.norm()
        if self.feed_forward_norms.after:
            layer.feed_forward_post_norm = builder.norm()
        if self.per_layer is not None:
            layer.per_layer, layer.per_layer_post_norm = self.per_layer.build(builder.at("per_layer")), builder.norm()
        if self.scaled:
            layer.scale = Factor(1, builder.dtype, builder.device)
        return layer


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward, with norms around each. A sum and the norm after it are fused with the step before.

    next_norm: the norm that reads the layer's sum, the next layer's ``mixer_norm`` or the model's last norm; None for
        none.
    next_mixer: the mixer that reads that norm; None: another consumer. The model that owns them sets both
        (:meth:`then`).
    tail: fused layer tail, everything after the mixer in one launch, for few rows; None: separate launches
        (``models/blocks/layer_tails.py``).
    mixer_post_norm, feed_forward_post_norm, per_layer_post_norm: norms of outputs before they are added; None: no norm.
    """

    tail: Callable[[Any, torch.Tensor], Stream | None] | None = None
    times = 1.0

    def __init__(
        self, mixer: nn.Module, feed_forward: nn.Module, mixer_norm: nn.Module | None,
        feed_forward_norm: nn.Module | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mixer_norm, self.mixer = mixer_norm, mixer
        self.feed_forward_norm, self.feed_forward = feed_forward_norm, feed_forward
        self.mixer_post_norm: RMSNorm | None = None
        self.feed_forward_post_norm: RMSNorm | None = None
        self.per_layer: nn.Module | None = None
        self.per_layer_post_norm: RMSNorm | None = None
        self.scale: Factor | None = None
        self._next: tuple[nn.Module | None, ...] = (None, None)  # in a tuple, so that they are not submodules
        self.set_norm_formats()

    def set_norm_formats(self) -> None:
        """Set each norm's output format (bf16/fp8) from its consumers. Call it again when these change."""
        for norm, block in ((self.mixer_norm, self.mixer), (self.feed_forward_norm, self.feed_forward)):
            if isinstance(norm, RMSNorm):
                norm.input_format = common_input_format(consumers_of(block))
            inside = getattr(block, "set_norm_formats", None)  # of a block with norms of its own
            if inside is not None:
                inside()

    def begin(self, x: torch.Tensor, per_layer: torch.Tensor | None = None) -> Stream:
        """Input of a pass's first layer: x [T, H] and its norm. per_layer: see :class:`Stream`."""
        return Stream(x, x if self.mixer_norm is None else self.mixer_norm(x), per_layer)

    @property
    def next_norm(self) -> nn.Module | None:
        return self._next[0]

    @property
    def next_mixer(self) -> nn.Module | None:
        return self._next[1]

    def then(self, norm: nn.Module | None, mixer: nn.Module | None) -> None:
        """Set the norm that reads the layer's sum, and the mixer that reads the norm, if any."""
        self._next = (norm, mixer)

    def forward(self, stream: Stream, context: ForwardContext, state: Any) -> Stream:
        """Return the residual stream after the layer, for T tokens or for ``context.last_tokens``. state: the
        mixer's."""
        mixer, feed_forward = cast(Mixer, self.mixer), cast(FeedForward, self.feed_forward)
        mixed = mixer(stream.normed, context, state)
        x, _, per_layer = stream if context.last_tokens is None else stream.select(context.last_tokens)
        if self.tail is not None and (after := self.tail(mixed, x)) is not None:
            return after
        if self.times != 1:
            x, normed = scaled_sum(mixer.output(mixed), x, self.times, self.feed_forward_norm)
            y = feed_forward(normed, context.queries.positions)
            return Stream(*scaled_sum(feed_forward.output(y), x, self.times, self.next_norm), per_layer)
        inner = getattr(feed_forward, "norms", None) if self.feed_forward_norm is None else self.feed_forward_norm
        x, normed = joined(mixer, mixed, x, self.mixer_post_norm, inner)
        y = feed_forward(normed, context.queries.positions)
        if self.per_layer is None:
            ended = joined(feed_forward, y, x, self.feed_forward_post_norm, self.next_norm, self.scale)
            return Stream(*ended, per_layer)
        x, _ = joined(feed_forward, y, x, self.feed_forward_post_norm, None)
        out = self.per_layer(x, per_layer)
        return Stream(*add_normed(out, x, self.per_layer_post_norm, self.next_norm, self.scale), per_layer)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype over one text from its start, x [T, H] -> [T, H]: the tests' oracle."""
        if self.per_layer is not None:
            raise TypeError("a layer with inputs of its own has no reference")
        for norm, block, after in (
            (self.mixer_norm, self.mixer, self.mixer_post_norm),
            (self.feed_forward_norm, self.feed_forward, self.feed_forward_post_norm),
        ):
            out = cast(Any, block).reference(x if norm is None else cast(RMSNorm, norm).reference(x))
            x = x + self.times * (out if after is None else after.reference(out))
        return x if self.scale is None else x * self.scale.weight.to(x.dtype)

    def state_specs(self) -> Tree:
        """The mixer's specs."""
        return cast(Mixer, self.mixer).state_specs()


def joined(
    block: Mixer | FeedForward, y: Any, residual: torch.Tensor, after: RMSNorm | None, norm: nn.Module | None,
    scale: Factor | None = None,
) -> tuple[torch.Tensor, Activations]:  # fmt: skip
    """Return (residual + the block's output, normed by ``after`` if any, times ``scale``; ``norm`` of the result)."""
    if after is None:
        return block.project(y, residual, norm)
    if isinstance(block, FusesNorms):
        return block.normed_sum(y, residual, after, norm, scale)
    return add_normed(block.output(y), residual, after, norm, scale)


def build_layers(specs: Sequence[LayerSpec], builder: Builder, norm: nn.Module | None) -> nn.ModuleList:
    """The layers ``layers.0`` … of a model: each ends with the norm that the next one reads, the last with ``norm``."""
    layers = [spec.build(builder.at(f"layers.{number}")) for number, spec in enumerate(specs)]
    for layer, following in itertools.pairwise(layers):
        layer.then(following.mixer_norm, following.mixer)
    layers[-1].then(norm, None)
    return nn.ModuleList(layers)
