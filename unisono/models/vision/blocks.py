"""Modules of a vision tower, built from the project's linear layers, norms and ops. Built by ``tower.py``.

Shapes: P patches of a pass, C elements of a patch, W features of one, D of a head, u = merge² patches of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.kernels.vision.activation import gelu
from unisono.kernels.vision.attention import segment_attention
from unisono.kernels.vision.rotary import axial_rotary
from unisono.layers.formats.base import WeightTarget
from unisono.layers.linear import Linear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import LayerNorm
from unisono.models.load.build import Builder
from unisono.models.vision.config import MAX_GRID_SIDE, ProjectorSpec, TowerSpec, VisionConfig

NORM_EPS = 1e-6
"""Epsilon of all norms of a tower; no config.json has it."""


def rotary_table(head_dim: int, theta: float) -> torch.Tensor:
    """Cosines followed by sines of each position on an axis: [MAX_GRID_SIDE, D / 2] fp32, for D / 4 planes.

    Computed on the CPU, so that the table is the same on every device.
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    return _cos_sin(1.0 / theta**exponents)


def alternating_table(head_dim: int, theta: float) -> torch.Tensor:
    """:func:`rotary_table` of each row with the even frequencies of a head, then of each column with the odd ones:
    [2 · MAX_GRID_SIDE, D / 2] fp32."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return torch.cat((_cos_sin(frequencies[::2]), _cos_sin(frequencies[1::2])))


def _cos_sin(frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines followed by sines of these frequencies [n] at each position: [MAX_GRID_SIDE, 2 n] fp32."""
    angles = torch.arange(MAX_GRID_SIDE, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class PatchEmbedding(nn.Module):
    """[P, C] -> [P, W]. Checkpoints store a convolution whose stride equals its size, which is a product with each
    patch."""

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        spec, patch = config.tower, config.patch_size
        self.proj = Linear(config.patch_elements, spec.width, spec.patch_bias, builder.dtype, builder.device)
        frames = config.temporal_patch_size
        channels = config.patch_elements // (frames * patch * patch)
        self.kernel = (channels, patch, patch) if spec.apart else (channels, frames, patch, patch)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.proj(pixels)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The weight is stored as [W, channels, frames, height, width], or without frames."""
        weight = self.proj.weight
        yield "weight", _Flattened(weight, (len(weight), *self.kernel))
        if self.proj.bias is not None:
            yield "bias", WeightTarget(self.proj.bias, tuple(self.proj.bias.shape))


@dataclass(frozen=True)
class _Flattened(WeightTarget):
    """Target of a tensor with more dimensions than its parameter."""

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(stored.reshape(self.parameter.shape))


class MLP(nn.Module):
    """``down(gelu(up(x)))``. activation: ``gelu`` by the error function, ``gelu_pytorch_tanh``, or ``quick_gelu``."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x -> the input of ``down``."""
        y = self.up(x)
        return quick_gelu(y) if self.activation == "quick_gelu" else gelu(y, self.activation == "gelu")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """``x · sigmoid(1.702 x)`` in fp32, of any shape, in x's dtype."""
    value = x.float()
    return (value / (1.0 + torch.exp(-1.702 * value))).to(x.dtype)


class GatedGELU(nn.Module):
    """``down(gelu(gate(x)) * up(x))``, GELU by the error function."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x -> the input of ``down``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return gelu(gate.contiguous(), True) * up


class VisionBlock(nn.Module):
    """``x + proj(attention(norm1(x)))``, then ``x + mlp(norm2(x))``."""

    def __init__(self, spec: TowerSpec, builder: Builder) -> None:
        super().__init__()
        width, size = spec.width, spec.intermediate_size
        self.heads, self.scale = spec.heads, spec.head_dim**-0.5
        self.norm1, self.norm2 = norm(spec, builder, width), norm(spec, builder, width)
        whole = {"q": width, "k": width, "v": width} if spec.apart else 3 * width
        self.qkv = builder.linear("qkv", width, whole, spec.bias)
        self.rotary = spec.rope_theta > 0
        self.proj = builder.linear("proj", width, width, spec.bias)
        inside = builder.at("mlp")
        down = inside.linear("down", size, width, spec.bias)
        self.mlp: GatedMLP | GatedGELU | MLP
        if spec.gated:
            kind = GatedMLP if spec.activation == "silu" else GatedGELU
            self.mlp = kind(inside.linear("gate_up", width, {"gate": size, "up": size}, spec.bias), down)
        else:
            self.mlp = MLP(inside.linear("up", width, size, spec.bias), down, spec.activation)

    def forward(
        self, x: torch.Tensor, bounds: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """x [P, W]; bounds [P, 2] i32: range of patches visible to each; positions [P, 2] i32: row and column of
        each."""
        qkv = self.qkv(self.norm1(x))
        if self.rotary:
            axial_rotary(qkv, cos_sin, positions, self.heads)
        x = self.proj(segment_attention(qkv, bounds, self.heads, self.scale), x)
        return self.mlp.down(self.mlp(self.norm2(x)), x)


class Merger(nn.Module):
    """``fc2(gelu(fc1(x)))`` of the concatenated u patches of a token: [P, W] -> [P / u, H].

    norm_first: the norm reads patches; otherwise it reads the u patches together, as in deepstack's levels.
    """

    def __init__(self, config: VisionConfig, builder: Builder, norm_first: bool) -> None:
        super().__init__()
        self.together, spec = config.unit * config.tower.width, config.tower
        self.norm_first = norm_first
        self.norm = norm(spec, builder, spec.width if norm_first else self.together)
        self.fc1 = builder.linear("fc1", self.together, self.together, bias=True)
        self.fc2 = builder.linear("fc2", self.together, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x).view(-1, self.together) if self.norm_first else self.norm(x.view(-1, self.together))
        return self.fc2(gelu(self.fc1(x), True))


class PoolingMerger(nn.Module):
    """The average of a token's u patches after a LayerNorm, normed and projected: [P, W] -> [P / u, H].

    The second norm multiplies by 1 + w. The average adds patches one by one, in fp32, so that its bits are the same in
    any pass.
    """

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        self.unit, width = config.unit, config.tower.width
        self.post_norm = LayerNorm(width, NORM_EPS, builder.dtype, builder.device)
        self.norm = replace(builder, zero_centered_norms=True).norm(width)
        self.project = TransposedLinear(builder.linear("project", width, config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.post_norm(x).float().view(-1, self.unit, x.shape[1]).unbind(1)
        for patch in others:
            first = first + patch
        pooled: torch.Tensor = self.norm((first / self.unit).to(x.dtype))
        return self.project(pooled)


class ProjectingMerger(nn.Module):
    """``fc2(gelu(fc1(merge(norm(x)))))``; ``merge`` reads the u patches of a token side by side: [P, W] -> [P / u, H].

    See :class:`unisono.models.vision.config.ProjectorSpec`.
    """

    def __init__(self, config: VisionConfig, projector: ProjectorSpec, builder: Builder) -> None:
        super().__init__()
        width, hidden = config.tower.width, config.hidden_size
        self.norm = replace(builder, rms_eps=projector.eps).norm(width)
        self.merge = PatchMerge(config.unit, width, builder)
        self.fc1 = builder.linear("fc1", width, hidden, projector.bias)
        self.fc2 = builder.linear("fc2", hidden, hidden, projector.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(gelu(self.fc1(self.merge(self.norm(x))), True))
        return out


class PatchMerge(nn.Module):
    """A product of the u patches of a token, [P, W] -> [P / u, W], without a bias.

    A checkpoint stores the columns of a feature's patches next to each other, as a convolution unfolds them.
    """

    def __init__(self, unit: int, width: int, builder: Builder) -> None:
        super().__init__()
        self.unit, self.width = unit, width
        self.linear = Linear(unit * width, width, False, builder.dtype, builder.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.view(-1, self.unit * self.width))
        return out

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The weight."""
        weight = self.linear.weight
        yield "weight", _ByPatch(weight, tuple(weight.shape), unit=self.unit)


@dataclass(frozen=True)
class _ByPatch(WeightTarget):
    """Target of a matrix [W, W · unit] whose columns are stored by feature, then by patch."""

    unit: int = 1

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(stored.unflatten(1, (-1, self.unit)).transpose(1, 2).flatten(1))


class TransposedLinear(nn.Module):
    """A product whose weight is stored as [inputs, outputs], under its own name."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The weight, which has no name inside the module."""
        weight = self.linear.weight
        yield "", _Transposed(weight, (weight.shape[1], weight.shape[0]))


@dataclass(frozen=True)
class _Transposed(WeightTarget):
    """Target of a matrix stored the other way around."""

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(stored.T)


def norm(spec: TowerSpec, builder: Builder, size: int) -> nn.Module:
    """A norm of the tower's kind over ``size`` features."""
    return builder.norm(size) if spec.gated else LayerNorm(size, spec.eps, builder.dtype, builder.device)
