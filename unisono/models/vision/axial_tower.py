"""Gemma 4's vision tower: blocks with norms before and after, axial rotary, averages of k × k patches.

A patch's position is the sum of a row of a table for its column and one for its row. In each half of a head one axis
rotates: the first half by columns, the second by rows. Queries and keys are normed with weights, values without;
scores are not scaled. Products may clamp their inputs and outputs. A token is the average of its patches times the root
of the width, shifted and scaled if the checkpoint says so, normed and projected. Called as ``tower.VisionTower`` is.
Composed of single ops: attention and norms are kernels, rotary and gates are not fused. Source of formulas and names:
transformers, ``models/gemma4``.

Shapes: P patches of a pass, W features, A heads, D elements of a head, u = merge² patches of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn

from unisono.graphs import Field
from unisono.kernels.vision.activation import gelu
from unisono.kernels.vision.attention import segment_attention
from unisono.layers.activations import plain
from unisono.layers.formats.base import WeightTarget
from unisono.layers.norm import RMSNorm
from unisono.models.load.build import Builder, require
from unisono.models.vision.blocks import rotary_table
from unisono.models.vision.config import TowerSpec, VisionConfig
from unisono.models.vision.grids import Grid, layout

CLAMPS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class AxialTowerSpec(TowerSpec):
    """Sizes of a Gemma 4 tower.

    head_size: elements of a head. table: positions of an axis. clamped: products have bounds of inputs and outputs.
    standardized: tokens are shifted and scaled. Raises CheckpointError for values that cannot be computed.
    """

    head_size: int = 64
    table: int = 0
    clamped: bool = False
    standardized: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_size % 4 == 0, "vision_config.head_dim", self.head_size, "it must be a multiple of 4")
        require(self.table >= 1, "vision_config.position_embedding_size", self.table, "it must be at least 1")

    @property
    def most_side(self) -> int:
        """Most rows and columns of a grid, patches."""
        return min(self.table, super().most_side)


class ClampedLinear(nn.Module):
    """A product without a bias; with bounds, inputs and outputs are clamped to them."""

    def __init__(self, inputs: int, outputs: int, clamped: bool, builder: Builder) -> None:
        super().__init__()
        self.linear, self.clamped = builder.linear("linear", inputs, outputs), clamped
        for name in CLAMPS if clamped else ():
            bound = -math.inf if name.endswith("min") else math.inf
            self.register_buffer(name, torch.full((), bound, dtype=builder.dtype, device=builder.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.clamped:
            return cast(torch.Tensor, self.linear(x))
        least, most, low, high = (getattr(self, name) for name in CLAMPS)
        return torch.clamp(self.linear(torch.clamp(x, least, most)), low, high)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The weight, and the bounds if there are any."""
        yield "linear.weight", WeightTarget(self.linear.weight, tuple(self.linear.weight.shape))
        for name in CLAMPS if self.clamped else ():
            yield name, WeightTarget(getattr(self, name), ())


class Unnamed(nn.Module):
    """A parameter that a checkpoint stores under its module's name: ``weight`` of this shape."""

    def __init__(self, shape: tuple[int, ...], builder: Builder) -> None:
        super().__init__()
        weight = torch.zeros(shape, dtype=builder.dtype, device=builder.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The tensor."""
        yield "", WeightTarget(self.weight, tuple(self.weight.shape))


class AxialBlock(nn.Module):
    """``x + norm(attention(norm(x)))``, then ``x + norm(mlp(norm(x)))``."""

    def __init__(self, spec: AxialTowerSpec, builder: Builder) -> None:
        super().__init__()
        self.heads, self.dim = spec.heads, spec.head_size
        width, inner, size = spec.width, spec.heads * spec.head_size, spec.intermediate_size

        def product(name: str, inputs: int, outputs: int) -> ClampedLinear:
            return ClampedLinear(inputs, outputs, spec.clamped, builder.at(name))

        self.q, self.k, self.v = (product(name, width, inner) for name in ("q", "k", "v"))
        self.o = product("o", inner, width)
        self.gate, self.up = product("gate", width, size), product("up", width, size)
        self.down = product("down", size, width)
        self.q_norm, self.k_norm = builder.norm(self.dim), builder.norm(self.dim)
        self.norm1, self.post_norm1 = builder.norm(width), builder.norm(width)
        self.norm2, self.post_norm2 = builder.norm(width), builder.norm(width)
        self._v_norm = (builder.norm(self.dim),)  # weights of one that no checkpoint holds

    def forward(self, x: torch.Tensor, bounds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [P, W]; bounds [P, 2] i32: range of patches visible to each; cos, sin [P, 2, D / 4]: of column and row."""
        y = plain(self.norm1(x))
        q, k = (
            _rotated(_normed(norm, product(y), self.dim), cos, sin)
            for norm, product in ((self.q_norm, self.q), (self.k_norm, self.k))
        )
        v = _normed(self._v_norm[0], self.v(y), self.dim)
        qkv = torch.cat([each.reshape(len(x), -1) for each in (q, k, v)], 1)
        x = x + plain(self.post_norm1(self.o(segment_attention(qkv, bounds, self.heads, 1.0))))
        y = plain(self.norm2(x))
        return x + plain(self.post_norm2(self.down(gelu(self.gate(y), False) * self.up(y))))


def _normed(norm: RMSNorm, x: torch.Tensor, dim: int) -> torch.Tensor:
    """x [P, A · D] -> its heads normed [P, A, D]."""
    return plain(norm(x.reshape(-1, dim))).view(len(x), -1, dim)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [P, A, D], each half rotated by the angles of its axis."""
    parts = x.float().unflatten(2, (2, 2, -1))  # axis, half of the pair, plane
    first, second = parts[:, :, :, 0], parts[:, :, :, 1]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), 3)
    return turned.flatten(2).to(x.dtype)


class AxialTower(nn.Module):
    """A whole tower on one device, in one dtype; see :class:`unisono.models.vision.tower.VisionTower`."""

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        builder = replace(builder, wide_norms=True)
        self.config, self.dtype = config, builder.dtype
        spec = cast(AxialTowerSpec, config.tower)
        self.spec = spec
        self.patch_embed = builder.linear("patch_embed", config.patch_elements, spec.width)
        self.positions = Unnamed((2, spec.table, spec.width), builder)
        self.blocks = nn.ModuleList(AxialBlock(spec, builder.at(f"blocks.{i}")) for i in range(spec.depth))
        shifted = spec.standardized
        self.bias = Unnamed((spec.width,), builder) if shifted else None
        self.scale = Unnamed((spec.width,), builder) if shifted else None
        self.project = builder.linear("project", spec.width, config.hidden_size)
        self._norm = (builder.norm(spec.width),)
        table = rotary_table(spec.head_size, spec.rope_theta).to(builder.device)
        self.register_buffer("cos_sin", table, persistent=False)

    def fields(self) -> tuple[Field, ...]:
        """Inputs of :meth:`forward` besides the pixels; "rows" are patches. Padding attends to nothing."""
        return Field("grid_positions", torch.int32, ("rows", 2)), Field("frame_bounds", torch.int32, ("rows", 2))

    def host_inputs(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """Values of :meth:`fields` for a pass's items, in order. Raises ValueError for an unsupported grid."""
        layouts = [layout(tuple(grid), self.config) for grid in grids]
        starts = np.cumsum([0, *(len(each.axes) for each in layouts)], dtype=np.int32)[:-1]
        bounds = [each.frames + start for each, start in zip(layouts, starts, strict=True)]
        return {
            "grid_positions": np.concatenate([each.axes for each in layouts]),
            "frame_bounds": np.concatenate(bounds),
        }

    def order(self, grids: Sequence[Grid]) -> np.ndarray | None:
        """None: patches are read in the items' order."""
        return None

    def forward(self, pixels: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """pixels [P, C], between -1 and 1; inputs: the :meth:`fields`. P is a multiple of u. Returns [P / u, H]."""
        at, planes = inputs["grid_positions"], self.spec.head_size // 4
        row, column = at[:, 0], at[:, 1]
        tables = self.positions.weight
        x = self.patch_embed(pixels.to(self.dtype))
        x = x + (tables[0].index_select(0, column) + tables[1].index_select(0, row))
        table = cast(torch.Tensor, self.cos_sin)
        angles = torch.stack((table.index_select(0, column), table.index_select(0, row)), 1)
        cos, sin = angles[..., :planes], angles[..., planes:]
        for block in self.blocks:
            x = cast(AxialBlock, block)(x, inputs["frame_bounds"], cos, sin)
        first, *others = x.float().view(-1, self.config.unit, x.shape[1]).unbind(1)
        for patch in others:  # one by one, so that the bits are the same in any pass
            first = first + patch
        pooled = (first / self.config.unit).to(self.dtype).float() * self.spec.width**0.5
        if self.bias is not None and self.scale is not None:
            pooled = (pooled - self.bias.weight.float()) * self.scale.weight.float()
        normed = plain(self._norm[0](pooled.to(self.dtype)))
        return cast(torch.Tensor, self.project(normed))
