"""Qwen2-VL: Qwen2's text model with a rope of three axes in blocks, and a tower with LayerNorm and plain MLPs.

The times of a video's frames do not move its positions, as they do in Qwen2.5-VL. Source of formulas and names:
transformers, ``models/qwen2_vl``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    in_language_model,
    read_attention,
    read_decoder_config,
    read_mlp,
    windows_by_layer_type,
)
from unisono.models.families.qwen2 import QWEN2
from unisono.models.families.qwen2_5_vl import SECTION
from unisono.models.families.qwen3_vl import SHARED_TOWER, rope_theta
from unisono.models.vision.config import TowerSpec, read_vision

TOWER = {
    **SHARED_TOWER,
    "blocks.*.mlp.up": "blocks.*.mlp.fc1",
    "blocks.*.mlp.down": "blocks.*.mlp.fc2",
    "merger.norm": "merger.ln_q",
    "merger.fc1": "merger.mlp.0",
    "merger.fc2": "merger.mlp.2",
}


def read_tower(vision: Any) -> TowerSpec:
    """Read the tower, whose width is ``embed_dim``."""
    return TowerSpec(
        depth=vision.depth,
        width=vision.embed_dim,
        heads=vision.num_heads,
        intermediate_size=int(vision.embed_dim * vision.mlp_ratio),
        rope_theta=rope_theta(vision),
        activation=vision.hidden_act,
        patch_bias=False,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. q, k and v always have biases, o never; windows only with ``use_sliding_window``."""
    text = hf_config.get_text_config()
    mlp = read_mlp(text)
    layers = [
        LayerSpec(read_attention(text, window=window, qkv_bias=True), mlp) for window in windows_by_layer_type(text)
    ]
    vision = read_vision(hf_config, read_tower, SECTION, interleaved=False)
    if vision is not None:
        vision = replace(vision, even_frames=True)
    return read_decoder_config(hf_config, layers, vision=vision)


QWEN2_VL = Family(read, in_language_model(QWEN2.names), tower=TOWER)
