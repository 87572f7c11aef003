"""Llama 4's vision tower: square tiles of a picture, each with a class token, and tokens of neighbouring patches.

A tile is a frame: its patches and its class token see each other and nothing else. Learned positions are added and
normed, then come :class:`unisono.models.vision.blocks.VisionBlock` with LayerNorm, a last norm, an MLP that reads the
patches of a token side by side, and a projection. Called as ``tower.VisionTower`` is. Source of formulas and names:
transformers, ``models/llama4``.

Shapes: P patches of a pass, n of a tile, t = P // n tiles, C elements of a patch, W features, u = merge² patches of a
token, H hidden size of the text model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from unisono.graphs import Field
from unisono.kernels.vision.activation import gelu
from unisono.layers.norm import LayerNorm
from unisono.models.load.build import Builder, require
from unisono.models.vision.axial_tower import Unnamed
from unisono.models.vision.blocks import VisionBlock, rotary_table
from unisono.models.vision.config import TowerSpec, VisionConfig
from unisono.models.vision.grids import Grid, layout


@dataclass(frozen=True)
class TileTowerSpec(TowerSpec):
    """Sizes of a tower of tiles. adapter_size: features between the two products of the MLP that makes tokens.

    Raises CheckpointError for values that cannot be computed.
    """

    adapter_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.adapter_size
        require(size >= 1, "vision_config.projector_input_dim", size, "it must be at least 1")


def pairs_in_halves(spec: TowerSpec) -> torch.Tensor:
    """Rows of heads [W] whose pairs rotate, in the order in which their halves rotate."""
    rows = torch.arange(spec.width).view(spec.heads, spec.head_dim // 2, 2)
    return rows.transpose(1, 2).flatten()


class TileTower(nn.Module):
    """A whole tower on one device, in one dtype; see :class:`unisono.models.vision.tower.VisionTower`."""

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        self.config, self.dtype = config, builder.dtype
        spec, width = cast(TileTowerSpec, config.tower), config.tower.width
        self.tile = config.side**2
        self.patch_embed = builder.linear("patch_embed", config.patch_elements, width)
        self.class_token = Unnamed((width,), builder)
        self.positions = Unnamed((self.tile + 1, width), builder)
        self.pre_norm, self.post_norm = (LayerNorm(width, spec.eps, builder.dtype, builder.device) for _ in range(2))
        self.blocks = nn.ModuleList(VisionBlock(spec, builder.at(f"blocks.{i}")) for i in range(spec.depth))
        inner = spec.adapter_size
        self.fc1 = builder.linear("fc1", config.unit * width, inner)
        self.fc2 = builder.linear("fc2", inner, inner)
        self.project = builder.linear("project", inner, config.hidden_size)
        axes = torch.from_numpy(layout((1, config.side, config.side), config).axes)
        # Angles count columns first, from 1; the class token does not rotate.
        turned = torch.cat((axes.flip(1) + 1, axes.new_zeros(1, 2)))
        raster = torch.cat((axes[:, 0] * config.side + axes[:, 1], axes.new_full((1,), self.tile)))
        for name, value in (
            ("cos_sin", rotary_table(spec.head_dim, spec.rope_theta)),
            ("turned", turned.contiguous()),
            ("raster", raster.long()),
        ):
            self.register_buffer(name, value.to(builder.device), persistent=False)

    def fields(self) -> tuple[Field, ...]:
        """None: all tiles are alike, so a pass is described by its pixels alone."""
        return ()

    def host_inputs(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """No values. Raises ValueError for an unsupported grid."""
        for grid in grids:
            layout(tuple(grid), self.config)
        return {}

    def order(self, grids: Sequence[Grid]) -> np.ndarray | None:
        """None: patches are read in the items' order."""
        return None

    def forward(self, pixels: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """pixels [P, C], tile by tile; patches beyond the last whole tile are padding. Returns [P / u, H]."""
        out = pixels.new_zeros(len(pixels) // self.config.unit, self.config.hidden_size, dtype=self.dtype)
        tiles = len(pixels) // self.tile
        if tiles:
            tokens = self._tokens(pixels[: tiles * self.tile], tiles)
            out[: len(tokens)] = tokens
        return out

    def _tokens(self, pixels: torch.Tensor, tiles: int) -> torch.Tensor:
        """pixels [t · n, C] -> [t · n / u, H]."""
        rows, width = self.tile + 1, self.config.tower.width
        patches = self.patch_embed(pixels.to(self.dtype)).view(tiles, self.tile, width)
        x = torch.cat((patches, self.class_token.weight.expand(tiles, 1, width)), 1)
        positions = self.positions.weight.index_select(0, cast(torch.Tensor, self.raster))
        x = self.pre_norm((x + positions).view(tiles * rows, width))
        start = torch.arange(tiles, dtype=torch.int32, device=x.device) * rows
        bounds = torch.stack((start, start + rows), 1)[:, None].expand(tiles, rows, 2).reshape(-1, 2)
        turned = cast(torch.Tensor, self.turned).repeat(tiles, 1)
        for block in self.blocks:
            x = block(x, bounds, self.cos_sin, turned)
        kept = self.post_norm(x).view(tiles, rows, width)[:, :-1].reshape(-1, self.config.unit * width)
        y = gelu(self.fc2(gelu(self.fc1(kept), True)), True)
        return cast(torch.Tensor, self.project(y))
