"""Gemma 4 12B: Gemma 4 without inputs of layers and experts, and a tower without blocks.

Source of formulas and names: transformers, ``models/gemma4_unified``.
"""

from __future__ import annotations

from typing import Any

from unisono.models.config import DecoderConfig, Family, in_language_model
from unisono.models.families.gemma4 import NAMES, UNREAD, read
from unisono.models.families.gemma4_tower import pictures_of_any_shape
from unisono.models.load.build import require
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.config import VisionConfig
from unisono.models.vision.patch_tower import PatchTowerSpec

TOWER = {
    "pixel_norm": "vision.patch_ln1",
    "patch_embed": "vision.patch_dense",
    "patch_norm": "vision.patch_ln2",
    "positions": "vision.pos_embedding",
    "position_norm": "vision.pos_norm",
    "project": "projector.embedding_projection",
}
TOWER_ROOTS: dict[str, str | None] = {
    "model.vision_embedder.": "vision.",
    "model.embed_vision.embedding_projection.": "projector.embedding_projection.",
    "model.embed_vision.multimodal_embedder.": "projector.",
    "model.embed_vision.": "vision.",
}
"""Names of published checkpoints, and of transformers' modules."""


def read_tower(hf_config: Any) -> VisionConfig | None:
    """The tower of the 12B model: a token is a patch of ``patch_size`` times ``pooling_kernel_size`` pixels a side."""
    vision = getattr(hf_config, "vision_config", None)
    if vision is None:
        return None
    width, eps, out = vision.mm_embed_dim, vision.rms_norm_eps, vision.output_proj_dims
    require(eps == NORM_EPS, "vision_config.rms_norm_eps", eps, f"it must be {NORM_EPS}")
    require(out == width, "vision_config.output_proj_dims", out, f"it must be mm_embed_dim={width}")
    tower = PatchTowerSpec(0, width, 0, 0, table=vision.mm_posemb_size)
    return pictures_of_any_shape(hf_config, tower, 1, vision.patch_size * vision.pooling_kernel_size)


def read_with_tower(hf_config: Any) -> DecoderConfig:
    """Read the config of a model that takes pictures."""
    return read(hf_config, read_tower)


GEMMA4_UNIFIED = Family(read, NAMES)
GEMMA4_UNIFIED_VISION = Family(
    read_with_tower, in_language_model(NAMES), unread=UNREAD, tower=TOWER, tower_roots=TOWER_ROOTS
)
