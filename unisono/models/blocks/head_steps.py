"""Steps of attention between the qkv projection and the KV cache, for families that compute more than head norms.

In this order: a LayerNorm of each head, a limit of the values, a rotation before the
head norms, and after it a factor of queries that grows with the position. Every step computes a token on its own.

Shapes: T tokens, Hq / Hkv query / KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.attention.base import AttentionOptions
from unisono.kernels.vision.norm import layer_norm
from unisono.layers.formats.base import WeightTarget
from unisono.layers.rotary import RotarySpec
from unisono.models.load.build import Builder, require
from unisono.types import ConfigError


@dataclass(frozen=True)
class HeadStepsSpec:
    """See the module.

    norm: LayerNorm of each head, with weights [heads, D]. order: element of a stored head norm for each element of a
        head; empty: in order.
    clip: queries, keys and values are limited to ± clip; 0: no limit.
    rotate_first: heads are rotated before the head norms.
    apart: a checkpoint stores the LayerNorm of each head alone.
    query_growth: (beta, positions, shift): queries are multiplied by
        1 + beta · ln(1 + floor((position + shift) / positions)).
    """

    norm: bool = False
    order: tuple[int, ...] = ()
    clip: float = 0.0
    rotate_first: bool = False
    query_growth: tuple[float, int, int] | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        require(self.clip >= 0, "clip_qkv", self.clip, "it must be at least 0")
        if self.query_growth is not None:
            positions = self.query_growth[1]
            require(positions >= 1, "positions of a step of query scaling", positions, "it must be at least 1")

    def check_divides(self, ranks: int) -> None:
        """Raise ConfigError if the heads cannot be divided among several ranks: norms with weights of each head."""
        if self.norm:
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: this model's head norms have weights of each head, which are not "
                "divided. Give --tensor-parallel-size 1."
            )

    def build(self, builder: Builder, num_heads: int, num_kv_heads: int, head_dim: int) -> HeadSteps:
        return HeadSteps(self, builder, (num_heads, num_kv_heads, head_dim))


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head, without a bias: x [T, heads, D] -> [T, heads, D]. weight [heads, D].

    order, apart: see :class:`HeadStepsSpec`.
    """

    def __init__(
        self, heads: int, head_dim: int, order: tuple[int, ...], builder: Builder, apart: bool = False
    ) -> None:
        super().__init__()
        self.apart = apart
        weight = torch.ones(heads, head_dim, dtype=builder.dtype, device=builder.device)
        self.weight, self.eps, self.order = nn.Parameter(weight, requires_grad=False), builder.rms_eps, order
        ones = torch.ones(head_dim, device=builder.device)
        self.ones, self.zeros = ones, torch.zeros_like(ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float().reshape(-1, x.shape[-1])
        normed: torch.Tensor = layer_norm(rows, self.ones, self.zeros, self.eps)
        return (normed.view(x.shape) * self.weight.float()).to(x.dtype)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype: the tests' oracle."""
        return nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """See :meth:`RMSNorm.weight_targets`."""
        if not self.apart:
            yield "weight", OrderedColumns(self.weight, tuple(self.weight.shape), order=self.order)
            return
        for head, row in enumerate(self.weight):
            yield f"each.{head}.norm.weight", WeightTarget(row, tuple(row.shape))


@dataclass(frozen=True)
class OrderedColumns(WeightTarget):
    """Target of a weight whose columns lie in another order in the checkpoint. order: column there of each column."""

    order: tuple[int, ...] = ()

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(stored[:, list(self.order)] if self.order else stored)


class HeadSteps(nn.Module):
    """See :class:`HeadStepsSpec`."""

    def __init__(self, spec: HeadStepsSpec, builder: Builder, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.spec, (self.heads, self.kv_heads, self.dim) = spec, sizes
        self.q_norm: HeadLayerNorm | None = None
        self.k_norm: HeadLayerNorm | None = None
        if spec.norm:
            named = ((self.heads, "q_norm"), (self.kv_heads, "k_norm"))
            self.q_norm, self.k_norm = (
                HeadLayerNorm(n, self.dim, spec.order, builder.at(name), spec.apart) for n, name in named
            )
        self.still = builder.rotary(RotarySpec.none(self.dim)) if spec.rotate_first else None
        self.growth: torch.Tensor | None = None
        if spec.query_growth is not None:
            beta, length, shift = spec.query_growth
            steps = (torch.arange(builder.max_positions + 1, dtype=torch.float32) + shift) // length
            self.growth = (1 + beta * torch.log1p(steps)).to(builder.device)

    def forward(
        self, qkv: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv [T, (Hq + 2 Hkv) D] -> (qkv after the steps, the table that is left to rotate by).

        table [max_positions, rot_dim] fp32, positions [T] int32: see ``rope_and_cache``.
        """
        spec, heads = self.spec, (self.heads, self.kv_heads, self.kv_heads)
        if spec.norm or spec.rotate_first:
            q, k, v = qkv.split([count * self.dim for count in heads], dim=1)
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
            if self.still is not None:
                angles = table.index_select(0, positions.clamp(min=0))
                q, k = (self._rotated(each, angles) for each in (q, k))
                table = self.still
            qkv = torch.cat((q, k, v), dim=1)
        return (qkv.clamp(-spec.clip, spec.clip) if spec.clip else qkv), table

    def _normed(self, x: torch.Tensor, norm: HeadLayerNorm | None) -> torch.Tensor:
        """Norm x [T, heads · D]."""
        if norm is None:
            return x
        normed: torch.Tensor = norm(x.unflatten(1, (-1, self.dim)))
        return normed.flatten(1)

    def _rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads · D] in fp32 by angles [T, rot_dim]."""
        heads = x.unflatten(1, (-1, self.dim))
        return rotated(heads.float(), angles).to(x.dtype).flatten(1)

    def scaled(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Multiply the rotated queries [T, Hq, D] by the factor of their positions [T]."""
        if self.growth is None:
            return q
        factor = self.growth.index_select(0, positions.clamp(min=0)).to(q.dtype)
        return q * factor[:, None, None]

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The steps before the rotation, in plain formulas, [T, heads, D] each: the tests' oracle."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.reference(q), self.k_norm.reference(k)
        limit = self.spec.clip
        return (q.clamp(-limit, limit), k.clamp(-limit, limit), v.clamp(-limit, limit)) if limit else (q, k, v)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] rotated by cos_sin [T, rot_dim] (cosines, then sines); the other elements stay."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second, rest = x.split((cos.shape[-1], cos.shape[-1], x.shape[-1] - cos_sin.shape[-1]), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def reference_heads(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], norms: tuple[Any, Any], cos_sin: torch.Tensor, joint: bool,
    steps: HeadSteps | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries, keys and values [T, heads, D] of one text after norms, steps and rotation: the tests' oracle.

    norms: of queries and keys, or None; joint: over all heads together.
    """
    (q, k, v), (q_norm, k_norm), angles = heads, norms, cos_sin[: len(heads[0])].to(heads[0].dtype)
    if joint:
        q, k = (norm.reference(x.flatten(1)).view_as(x) for norm, x in ((q_norm, q), (k_norm, k)))
    if steps is not None:
        q, k, v = steps.reference(q, k, v)
    first = steps is not None and steps.spec.rotate_first
    q, k = (rotated(q, angles), rotated(k, angles)) if first else (q, k)
    if q_norm is not None and k_norm is not None and not joint:
        q, k = q_norm.reference(q), k_norm.reference(k)
    q, k = (q, k) if first else (rotated(q, angles), rotated(k, angles))
    return (q if steps is None else steps.scaled(q, torch.arange(len(q)))), k, v


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Plain attention over one text, q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]: the tests' oracle.

    It is causal; with ``options.both_ways`` a token sees the whole text, or a window as far ahead as back.
    """
    tokens = torch.arange(len(q))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    ago = tokens[:, None] - tokens
    ago = ago.abs() if options.both_ways else ago
    hidden = (ago < 0) | ((ago >= options.window) if options.window > 0 else False)
    if options.window < 0:
        hidden |= (tokens // -options.window)[:, None] != tokens // -options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((options.sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1), scores), dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[:, :, -len(q) :], v)
