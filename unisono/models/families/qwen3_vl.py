"""Qwen3-VL, dense: Qwen3's text model with an interleaved rope of three axes, a vision tower, and deepstack.

A text token has the same position on all axes, so plain rope over the same frequencies is exact. Qwen3.5's tower has
the same names and sizes. Source of formulas and names: transformers, ``models/qwen3_vl``.
"""

from __future__ import annotations

import math
from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    in_language_model,
    read_attention,
    read_decoder_config,
    read_mlp,
)
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load.build import require
from unisono.models.vision.config import TowerSpec, read_vision

SECTION = (24, 20, 20)
"""Default rotary planes of each axis."""

SHARED_TOWER = {
    "patch_embed": "patch_embed.proj",
    "blocks.*.norm1": "blocks.*.norm1",
    "blocks.*.norm2": "blocks.*.norm2",
    "blocks.*.qkv": "blocks.*.attn.qkv",
    "blocks.*.proj": "blocks.*.attn.proj",
}
"""Names also used by Qwen2.5-VL's tower."""

TOWER = {
    **SHARED_TOWER,
    "positions": "pos_embed",
    "blocks.*.mlp.up": "blocks.*.mlp.linear_fc1",
    "blocks.*.mlp.down": "blocks.*.mlp.linear_fc2",
    "merger.norm": "merger.norm",
    "merger.fc1": "merger.linear_fc1",
    "merger.fc2": "merger.linear_fc2",
    "deepstack.*.norm": "deepstack_merger_list.*.norm",
    "deepstack.*.fc1": "deepstack_merger_list.*.linear_fc1",
    "deepstack.*.fc2": "deepstack_merger_list.*.linear_fc2",
}


def read_tower(vision: Any) -> TowerSpec:
    """The tower of a ``vision_config``; one without ``deepstack_visual_indexes`` has no deepstack."""
    points = vision.num_position_embeddings
    side = math.isqrt(points)
    require(side**2 == points >= 1, "vision_config.num_position_embeddings", points, "it must be a square number")
    return TowerSpec(
        depth=vision.depth,
        width=vision.hidden_size,
        heads=vision.num_heads,
        intermediate_size=vision.intermediate_size,
        rope_theta=rope_theta(vision),
        activation=vision.hidden_act,
        position_side=side,
        deepstack_blocks=tuple(getattr(vision, "deepstack_visual_indexes", None) or ()),
    )


def rope_theta(vision: Any) -> float:
    """The base of a tower's rotary angles."""
    return float((getattr(vision, "rope_parameters", None) or {}).get("rope_theta", 10_000.0))


def read_layers(text: Any, feed_forwards: list[Any]) -> list[LayerSpec]:
    """Qwen3's attention with these feed-forwards."""
    bias = text.attention_bias
    attention = read_attention(text, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return [LayerSpec(attention, feed_forward) for feed_forward in feed_forwards]


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o."""
    text = hf_config.get_text_config()
    layers = read_layers(text, [read_mlp(text)] * text.num_hidden_layers)
    vision = read_vision(hf_config, read_tower, SECTION, interleaved=True)
    return read_decoder_config(hf_config, layers, vision=vision)


QWEN3_VL = Family(read, in_language_model(QWEN3.names), tower=TOWER)
