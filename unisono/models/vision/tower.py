"""The vision tower: from patches of images and videos to embeddings for the text model.

Owns the tower's forward pass and its inputs per patch. The loader builds it (``loader.load_tower``); the engine runs it
as a program. One class serves Qwen3-VL, Qwen3.5 (the same without deepstack), Qwen2.5-VL (RMSNorm, gated MLPs,
windows), Gemma 3 (SigLIP: no rotary, averages of patches) and Mistral 3 (Pixtral: RMSNorm, gated MLPs, a projector);
``TowerSpec`` selects the parts. Sources: transformers, ``models/qwen3_vl``, ``qwen2_5_vl``, ``siglip``, ``gemma3``,
``pixtral``, ``mistral3``.

An item's outputs depend only on its own pixels and grid: products, norms and attention are exact in any batch.

Shapes: P patches of a pass, C elements of a patch, W features of one, u = merge² patches of a token, H hidden size of
the text model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn

from unisono.graphs import Field
from unisono.kernels.vision.positions import add_positions
from unisono.models.load.build import Builder
from unisono.models.vision.axial_tower import AxialTower, AxialTowerSpec
from unisono.models.vision.blocks import (
    Merger,
    PatchEmbedding,
    PoolingMerger,
    ProjectingMerger,
    VisionBlock,
    alternating_table,
    norm,
    rotary_table,
)
from unisono.models.vision.config import MAX_GRID_SIDE, TowerSpec, VisionConfig
from unisono.models.vision.grids import Grid, layout
from unisono.models.vision.patch_tower import PatchTower, PatchTowerSpec
from unisono.models.vision.tile_tower import TileTower, TileTowerSpec


def make_tower(config: VisionConfig, builder: Builder) -> AnyTower:
    """The tower of a configuration; builder: see :class:`VisionTower`."""
    return TOWERS.get(type(config.tower), VisionTower)(config, builder)


class VisionTower(nn.Module):
    """A whole tower on one device, in one dtype.

    builder: for modules of W features (``hidden_size``); its path is empty.
    """

    def __init__(self, config: VisionConfig, builder: Builder) -> None:
        super().__init__()
        self.config, self.dtype = config, builder.dtype
        spec, width = config.tower, config.tower.width
        builder = replace(builder, rms_eps=spec.eps)
        self.patch_embed = PatchEmbedding(config, builder)
        self.positions = builder.embedding(spec.position_side**2) if spec.position_side else None
        self.blocks = nn.ModuleList(VisionBlock(spec, builder.at(f"blocks.{i}")) for i in range(spec.depth))
        self.pre_norm = norm(spec, builder, width) if spec.pre_norm else None
        self.merger = _merger(config, builder.at("merger"))
        levels = range(config.deepstack)
        self.deepstack = nn.ModuleList(Merger(config, builder.at(f"deepstack.{i}"), norm_first=False) for i in levels)
        table = (alternating_table if spec.alternating else rotary_table)(width // spec.heads, spec.rope_theta or 1.0)
        self.register_buffer("cos_sin", table.to(builder.device), persistent=False)

    def fields(self) -> tuple[Field, ...]:
        """Inputs of :meth:`forward` besides the pixels; "rows" are patches. Padding attends to nothing."""
        spec = self.config.tower
        found = [
            Field("grid_positions", torch.int32, ("rows", 2)),
            Field("frame_bounds", torch.int32, ("rows", 2)),
        ]
        if spec.position_side:
            found += [
                Field("position_sources", torch.int32, ("rows", 4)),
                Field("position_weights", torch.float32, ("rows", 4)),
            ]
        if spec.window:
            found += [Field("window_bounds", torch.int32, ("rows", 2)), Field("restore", torch.int32, ("rows",))]
        return tuple(found)

    def host_inputs(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """Values of :meth:`fields` for a pass's items, in order. Raises ValueError for an unsupported grid.

        ``restore`` has one entry per token; the others have one per patch.
        """
        layouts = [layout(tuple(grid), self.config) for grid in grids]
        starts = np.cumsum([0, *(len(each.axes) for each in layouts)], dtype=np.int32)[:-1]
        shift = np.array([0, MAX_GRID_SIDE if self.config.tower.alternating else 0], np.int32)  # in the table
        made = {
            "grid_positions": [each.axes + shift for each in layouts],
            "frame_bounds": [each.frames + start for each, start in zip(layouts, starts, strict=True)],
            "position_sources": [each.sources for each in layouts],
            "position_weights": [each.weights for each in layouts],
            "window_bounds": [each.windows + start for each, start in zip(layouts, starts, strict=True)],
            "restore": [each.restore + start // self.config.unit for each, start in zip(layouts, starts, strict=True)],
        }
        return {field.name: np.concatenate(made[field.name]) for field in self.fields()}

    def order(self, grids: Sequence[Grid]) -> np.ndarray | None:
        """Index of the patch, among the concatenated items, that :meth:`forward` reads in each row [P]; None:
        unchanged."""
        if not self.config.tower.window:
            return None
        orders: list[np.ndarray] = []
        start = 0
        for grid in grids:
            order = cast(np.ndarray, layout(tuple(grid), self.config).order)
            orders.append(order + start)
            start += len(order)
        return np.concatenate(orders)

    def forward(self, pixels: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """pixels [P, C] in :meth:`order`, of any float dtype; inputs: the :meth:`fields`. P is a multiple of u.

        Returns [P / u, H · (1 + deepstack)]: a token's embedding followed by one part per level, in the order of the
        items' positions. Rows of padding are finite.
        """
        x = self.patch_embed(pixels.to(self.dtype))
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        if self.positions is not None:
            x = add_positions(x, self.positions.weight, inputs["position_sources"], inputs["position_weights"])
        spec = self.config.tower
        levels: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            whole = not spec.window or number in spec.full_blocks
            bounds = inputs["frame_bounds" if whole else "window_bounds"]
            x = block(x, bounds, self.cos_sin, inputs["grid_positions"])
            if number in spec.deepstack_blocks:
                levels.append(self.deepstack[len(levels)](x))
        merged = self.merger(x)
        out = torch.cat((merged, *levels), dim=1) if levels else merged
        return out if not spec.window else out.index_select(0, inputs["restore"][: len(out)])


def _merger(config: VisionConfig, builder: Builder) -> nn.Module:
    """The module that makes tokens of patches."""
    spec = config.tower
    if spec.projector is not None:
        return ProjectingMerger(config, spec.projector, builder)
    return PoolingMerger(config, builder) if spec.pooled else Merger(config, builder, norm_first=True)


AnyTower = VisionTower | AxialTower | PatchTower | TileTower
"""A tower of any kind."""
TOWERS: Mapping[type[TowerSpec], Callable[[VisionConfig, Builder], AnyTower]] = {
    AxialTowerSpec: AxialTower,
    PatchTowerSpec: PatchTower,
    TileTowerSpec: TileTower,
}
"""Spec -> its tower; others are a :class:`VisionTower`."""
