"""Gemma 4 12B's embeddings of pictures: a product for each patch, without attention. A patch is a token.

``norm → product → norm``, plus a learned row for the patch's column and one for its row, ``norm → norm → product``.
Called as ``tower.VisionTower`` is. Source of formulas and names: transformers, ``models/gemma4_unified``.

Shapes: P patches of a pass, C elements of a patch, W features, H hidden size of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn

from unisono.graphs import Field
from unisono.layers.activations import plain
from unisono.layers.formats.base import WeightTarget
from unisono.layers.norm import LayerNorm
from unisono.models.load.build import Builder, require
from unisono.models.vision.config import TowerSpec, VisionConfig
from unisono.models.vision.grids import Grid, layout

LAYER_NORM_EPS = 1e-5
"""Epsilon of the LayerNorms; no config.json has it."""


@dataclass(frozen=True)
class PatchTowerSpec(TowerSpec):
    """Sizes of a tower without blocks. table: positions of an axis.

    Raises CheckpointError for values that cannot be computed.
    """

    table: int = 0

    def __post_init__(self) -> None:
        require(self.width >= 1, "vision_config.mm_embed_dim", self.width, "it must be at least 1")
        require(self.table >= 1, "vision_config.mm_posemb_size", self.table, "it must be at least 1")

    @property
    def most_side(self) -> int:
        """Most rows and columns of a grid, patches."""
        return min(self.table, super().most_side)


class AxisPositions(nn.Module):
    """Learned rows of positions, ``weight`` [table, 2, W]: of columns, and of rows.

    A checkpoint stores them without a name inside the module.
    """

    def __init__(self, table: int, width: int, builder: Builder) -> None:
        super().__init__()
        weight = torch.zeros(table, 2, width, dtype=builder.dtype, device=builder.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        """at [P, 2] i32: row and column of each patch -> the sum of both rows [P, W]."""
        row, column = at[:, 0], at[:, 1]
        return self.weight[:, 0].index_select(0, column) + self.weight[:, 1].index_select(0, row)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The tensor."""
        yield "", WeightTarget(self.weight, tuple(self.weight.shape))


class PatchTower(nn.Module):
    """A whole tower on one device, in one dtype; see :class:`unisono.models.vision.tower.VisionTower`."""

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        self.config, self.dtype = config, builder.dtype
        spec = cast(PatchTowerSpec, config.tower)
        made = LAYER_NORM_EPS, builder.dtype, builder.device
        self.pixel_norm = LayerNorm(config.patch_elements, *made)
        self.patch_embed = builder.linear("patch_embed", config.patch_elements, spec.width, bias=True)
        self.patch_norm = LayerNorm(spec.width, *made)
        self.positions = AxisPositions(spec.table, spec.width, builder)
        self.position_norm = LayerNorm(spec.width, *made)
        self.project = builder.linear("project", spec.width, config.hidden_size)
        self._norm = (replace(builder, wide_norms=True).norm(spec.width),)  # a weight of one that no checkpoint holds

    def fields(self) -> tuple[Field, ...]:
        """Inputs of :meth:`forward` besides the pixels; "rows" are patches."""
        return (Field("grid_positions", torch.int32, ("rows", 2)),)

    def host_inputs(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """Values of :meth:`fields` for a pass's items, in order. Raises ValueError for an unsupported grid."""
        return {"grid_positions": np.concatenate([layout(tuple(grid), self.config).axes for grid in grids])}

    def order(self, grids: Sequence[Grid]) -> np.ndarray | None:
        """None: patches are read in the items' order."""
        return None

    def forward(self, pixels: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """pixels [P, C], between 0 and 1; inputs: the :meth:`fields`. Returns [P, H]."""
        x = self.patch_norm(self.patch_embed(self.pixel_norm(pixels.to(self.dtype))))
        x = self.position_norm(x + self.positions(inputs["grid_positions"]))
        return cast(torch.Tensor, self.project(plain(self._norm[0](x))))
