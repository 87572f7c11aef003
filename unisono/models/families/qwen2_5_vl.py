"""Qwen2.5-VL: Qwen2.5's text model with a rope of three axes in blocks, and a vision tower with attention windows.

Source of formulas and names: transformers, ``models/qwen2_5_vl``.
"""

from __future__ import annotations

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
from unisono.models.families.qwen3_vl import SHARED_TOWER, rope_theta
from unisono.models.load.build import require
from unisono.models.vision.config import TowerSpec, read_vision

SECTION = (16, 24, 24)
"""Default rotary planes of each axis."""

TOWER = {
    **SHARED_TOWER,
    "blocks.*.mlp.gate_up.gate": "blocks.*.mlp.gate_proj",
    "blocks.*.mlp.gate_up.up": "blocks.*.mlp.up_proj",
    "blocks.*.mlp.down": "blocks.*.mlp.down_proj",
    "merger.norm": "merger.ln_q",
    "merger.fc1": "merger.mlp.0",
    "merger.fc2": "merger.mlp.2",
}


def read_tower(vision: Any) -> TowerSpec:
    """Read the tower. ``window_size`` is in pixels, rounded down to whole tokens; ``fullatt_block_indexes`` see whole
    frames."""
    merge, patch = vision.spatial_merge_size, vision.patch_size
    sizes = all(isinstance(size, int) and size >= 1 for size in (merge, patch))
    require(sizes, "vision_config: (spatial_merge_size, patch_size)", (merge, patch), "they must be at least 1")
    window = vision.window_size // merge // patch * merge
    require(window >= 1, "vision_config.window_size", vision.window_size, f"it must be at least {merge * patch} pixels")
    return TowerSpec(
        depth=vision.depth,
        width=vision.hidden_size,
        heads=vision.num_heads,
        intermediate_size=vision.intermediate_size,
        rope_theta=rope_theta(vision),
        gated=True,
        activation=vision.hidden_act,
        patch_bias=False,
        window=window,
        full_blocks=tuple(vision.fullatt_block_indexes),
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
        seconds = vision.tokens_per_second
        require(seconds >= 1, "vision_config.tokens_per_second", seconds, "it must be at least 1")
    return read_decoder_config(hf_config, layers, vision=vision)


QWEN2_5_VL = Family(read, in_language_model(QWEN2.names), tower=TOWER)
