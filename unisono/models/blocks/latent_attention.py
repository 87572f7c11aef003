"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): a mixer whose heads share one small row of the cache.

Every pass computes the absorbed form, one arithmetic for rounds, chunks and prompts: queries are multiplied into the
latent space, attend over latents there, and their sums are multiplied out again. Ranks divide the heads, and each holds
all latents; with DP attention each has all heads, and holds the latents of its own requests. Built by a family's blocks
(docs/extend/model.md), as attention is.

Shapes: T tokens of a pass, E tokens whose output is read, H hidden, Hq heads, L latent, D / R elements of a head that
do not rotate / rotate, V elements of a head's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.attention.base import KV, AttentionOptions
from unisono.attention.context import ForwardContext
from unisono.config.preflight.ranks import check_attention_heads
from unisono.distributed.gather import ALONE, Ranks
from unisono.kernels.attention.latent import check_shared_memory, head_blocks
from unisono.kernels.attention.latent_rows import head_product, latent_queries, rotate_latent
from unisono.kernels.cards import shared_memory
from unisono.kernels.gemm.fp8_quantize import E4M3
from unisono.kv.specs import PAGE_SIZE, Paged
from unisono.layers.activations import Activations, common_input_format
from unisono.layers.formats.base import WHOLE
from unisono.layers.norm import RMSNorm
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.head_steps import HeadStepsSpec
from unisono.models.blocks.latent_weights import UpProjections
from unisono.models.load.build import Builder, require
from unisono.types import ConfigError

INNER_EPS = 1e-6
"""Epsilon of the norms inside the block: that of the class in transformers, not ``rms_norm_eps``."""


@dataclass(frozen=True)
class LatentSpec:
    """One layer of latent attention.

    latent_dim: elements of a token's latent. nope_dim, rope_dim: elements of a query head that do not rotate, and that
    do. value_dim: elements of a head's value. query_rank: size of the queries' own latent; 0: queries are one product.
    scale: of scores. interleaved: neighbouring elements rotate together; otherwise the halves of ``rope_dim`` do.
    bias: the products into latents and the output have biases.
    query_growth: queries are multiplied by a number that grows with the position, see :class:`HeadStepsSpec`.

    Modules, as named by families: ``a.q_a`` and ``q_norm``, ``q_b`` (or ``a.q`` without a query rank), ``a.kv``,
    ``kv_norm``, ``kv_b`` and ``o``. Raises CheckpointError for values that cannot be computed.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: RotarySpec
    scale: float
    query_rank: int = 0
    interleaved: bool = True
    bias: bool = False
    query_growth: tuple[float, int, int] | None = None

    def __post_init__(self) -> None:
        sizes = {
            "num_attention_heads": self.num_heads, "kv_lora_rank": self.latent_dim, "v_head_dim": self.value_dim,
            "qk_nope_head_dim": self.nope_dim,
        }  # fmt: skip
        for name, size in sizes.items():
            require(size >= 1, name, size, "it must be at least 1")
        require(self.latent_dim <= 512, "kv_lora_rank", self.latent_dim, "the kernel computes up to 512")
        rope = self.rope_dim
        require(rope >= 2 and rope % 2 == 0, "qk_rope_head_dim", rope, "it must be even and at least 2")
        turned = 2 * self.rotary.planes
        require(turned == rope, "partial_rotary_factor", turned / rope, "all of qk_rope_head_dim must rotate")
        require(self.query_rank >= 0, "q_lora_rank", self.query_rank, "it must be at least 0")
        require(not self.bias or self.query_rank > 0, "attention_bias", True, "it needs a q_lora_rank")

    @property
    def num_kv_heads(self) -> int:
        """Blocks of heads in the work list of a pass."""
        return head_blocks(self.num_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a row of the cache, and of an absorbed query head."""
        return self.latent_dim + self.rope_dim

    def of(self, ranks: Ranks) -> LatentSpec:
        """The heads of one rank. Raises ConfigError if they cannot be divided."""
        if ranks.dp_attention:
            return self
        check_attention_heads(self.num_heads, self.num_heads, ranks.count)
        return replace(self, num_heads=self.num_heads // ranks.count)

    def build(self, builder: Builder) -> LatentAttention:
        return LatentAttention(self, builder)


class LatentAttention(nn.Module):
    """See :class:`LatentSpec`. A mixer (``models/blocks/layers.py``)."""

    def __init__(self, spec: LatentSpec, builder: Builder) -> None:
        super().__init__()
        self.e4m3 = builder.kv_dtype == E4M3
        if self.e4m3 and spec.latent_dim % 4:
            raise ConfigError(f"--kv-cache-dtype fp8 needs a kv_lora_rank of a multiple of 4, not {spec.latent_dim}.")
        check_shared_memory(shared_memory(torch.device(builder.device)))
        whole, spec, divided = spec, spec.of(builder.ranks), builder
        self.spec, self.dtype, self.ranks = spec, builder.dtype, builder.ranks
        if self.ranks.dp_attention:
            builder = replace(builder, ranks=ALONE)
        self.backend = builder.backend(spec.num_heads, spec.num_kv_heads)
        self.cos_sin = builder.rotary(spec.rotary)
        self.steps = HeadStepsSpec(query_growth=spec.query_growth).build(builder, spec.num_heads, 1, spec.head_dim)
        queries, rank = whole.num_heads * (spec.nope_dim + spec.rope_dim), spec.query_rank
        first, share = ("q_a", WHOLE) if rank else ("q", builder.share)
        self.a = builder.linear(
            "a", builder.hidden_size, {first: rank or queries, "kv": spec.head_dim}, spec.bias,
            share={first: share, "kv": WHOLE},
        )  # fmt: skip
        inner = replace(builder, rms_eps=INNER_EPS)
        self.q_norm = inner.norm(rank) if rank else None
        self.q_b = builder.linear("q_b", rank, queries, share=builder.share) if rank else None
        self.kv_norm = inner.norm(spec.latent_dim)
        sizes = whole.num_heads, spec.nope_dim, spec.value_dim, spec.latent_dim
        self.kv_b = UpProjections(sizes, builder.at("kv_b"))
        inputs = whole.num_heads * spec.value_dim
        self.o = divided.joined("o", inputs, builder.hidden_size, spec.bias, split_inputs=not self.ranks.dp_attention)
        self.set_norm_formats()

    def set_norm_formats(self) -> None:
        """See :meth:`DecoderLayer.set_norm_formats`."""
        if isinstance(self.q_norm, RMSNorm):
            self.q_norm.input_format = common_input_format((self.q_b,))

    def state_specs(self) -> tuple[Paged, ...]:
        """Rows of latents and rotated parts: the same on each rank, or those of its requests. With an fp8 cache: e4m3
        latents, rotated parts, and exponents of the latents' scales.
        """
        spec, ranks = self.spec, self.ranks.page_ranks
        sizes: list[tuple[int, torch.dtype]] = [(spec.head_dim, self.dtype)]
        if self.e4m3:
            sizes = [(spec.latent_dim, E4M3), (spec.rope_dim, self.dtype), (1, torch.uint8)]
        return tuple(Paged((1, PAGE_SIZE, size), dtype, ranks=ranks) for size, dtype in sizes)

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.a,)

    def forward(self, x: Activations, context: ForwardContext, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """x [T, H] -> [T, Hq · V], the input of ``o``, or [E, Hq · V] with last tokens. Writes T rows."""
        spec, (cache, *e4m3), token_ranks = self.spec, state, None
        if self.ranks.dp_attention:
            context, token_ranks = context.local_tokens(self.ranks.index, len(cache))
        q, rows = self.a(x).split((self.a.held[0], spec.head_dim), dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_norm(q.contiguous()))
        q = q.contiguous()
        table, positions = context.rotary(self.cos_sin, None)
        slots, norm = context.inputs().slot_mapping, self.kv_norm
        written = rows, q, norm.weight, norm.eps, table, positions, slots, cache, spec.num_heads, spec.interleaved
        if context.last_tokens is None:
            queries = latent_queries(*written, self.kv_b.keys, *e4m3)
        else:
            queries = context.last_tokens.select(rotate_latent(*written, *e4m3))
            q, positions = context.last_tokens.select(q), context.last_tokens.select(positions)
            head_product(q.view(len(q), spec.num_heads, -1), self.kv_b.keys, queries)
        queries = self.steps.scaled(queries, positions)
        inputs = context.queries.plan(self.backend)
        options = AttentionOptions(spec.scale, values=spec.latent_dim)
        kv = KV(cache, *e4m3) if e4m3 else KV(cache, cache)
        sums = self.backend.forward(queries, kv, inputs, options)
        out = sums.new_empty(len(sums), spec.num_heads, spec.value_dim)
        head_product(sums.view(len(sums), spec.num_heads, -1), self.kv_b.values, out)
        return out.flatten(1) if token_ranks is None else self.ranks.gather_tokens(out.flatten(1), token_ranks)

    def project(
        self, y: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """(residual + ``o(y)``, ``norm`` of it); without a norm, the sum twice."""
        return self.o.then_norm(y, residual, norm)

    def output(self, y: Activations) -> torch.Tensor:
        """``o(y)``."""
        out: torch.Tensor = self.o(y)
        return out

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain attention with expanded keys in x's dtype over one text, x [T, H] -> [T, H]: the tests' oracle."""
        spec, tokens = self.spec, torch.arange(len(x))
        q, latent, turned = self.a.reference(x).split((self.a.held[0], spec.latent_dim, spec.rope_dim), dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b.reference(self.q_norm.reference(q))
        latent, angles = self.kv_norm.reference(latent), self.cos_sin[: len(x)].to(x.dtype)
        straight, turning = q.unflatten(1, (spec.num_heads, -1)).split((spec.nope_dim, spec.rope_dim), dim=2)
        keys = torch.einsum("td,hdn->thn", latent, self.kv_b.keys.to(x.dtype))
        values = torch.einsum("td,hvd->thv", latent, self.kv_b.values.to(x.dtype))
        turning, turned = (self._turned(each, angles) for each in (turning, turned[:, None]))
        scores = torch.einsum("qhd,khd->hqk", straight, keys) + torch.einsum("qhd,kd->hqk", turning, turned[:, 0])
        scores = self.steps.scaled(scores.transpose(0, 1), tokens).transpose(0, 1)
        scores = (scores * spec.scale).masked_fill(tokens > tokens[:, None], -torch.inf)
        return self.o.reference(torch.einsum("hqk,khd->qhd", scores.softmax(2), values).flatten(1))

    def _turned(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, R] rotated by cos_sin [T, R], as halves."""
        first, second = (x[..., ::2], x[..., 1::2]) if self.spec.interleaved else x.chunk(2, dim=-1)
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
