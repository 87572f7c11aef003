"""Qwen2 and Qwen2.5: Llama's tensors, biases on q, k and v; layers above ``max_window_layers`` may slide."""

from __future__ import annotations

from typing import Any

from unisono.models.config import (
    DecoderConfig,
    Family,
    read_decoder_config,
    windows_by_layer_type,
)
from unisono.models.llama import NAMES


def read(hf_config: Any) -> DecoderConfig:
    """q, k and v always have biases, o never; windows only where ``use_sliding_window`` is set."""
    return read_decoder_config(hf_config, windows=windows_by_layer_type(hf_config), qkv_bias=True)


QWEN2 = Family(read, NAMES)
