"""dots.llm1: Qwen3's attention, and the experts of DeepSeek-V3. Source: transformers, ``models/dots1``."""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, windows_by_layer_type
from unisono.models.families.glm4_moe import GLM4_MOE, feed_forwards, read_experts


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o; ``layer_types``: sliding layers."""
    bias = hf_config.attention_bias
    layers = [
        LayerSpec(read_attention(hf_config, window=window, qk_norm=True, qkv_bias=bias, o_bias=bias), each)
        for window, each in zip(
            windows_by_layer_type(hf_config), feed_forwards(hf_config, read_experts(hf_config)), strict=True
        )
    ]
    return read_decoder_config(hf_config, layers)


DOTS1 = Family(read, GLM4_MOE.names)
