"""Qwen2 and Qwen2.5: Llama's tensors, biases on q, k and v; layers above ``max_window_layers`` may slide."""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    read_attention,
    read_decoder_config,
    read_mlp,
    windows_by_layer_type,
)
from unisono.models.families.llama import NAMES


def read(hf_config: Any, **options: bool) -> DecoderConfig:
    """Read the config. q, k and v always have biases, o never; windows only with ``use_sliding_window``.

    options: other switches of the attention layers, for families that are otherwise alike.
    """
    options, mlp = options or {"qkv_bias": True}, read_mlp(hf_config)
    windows = windows_by_layer_type(hf_config)
    layers = [LayerSpec(read_attention(hf_config, window=window, **options), mlp) for window in windows]
    return read_decoder_config(hf_config, layers)


QWEN2 = Family(read, NAMES)
