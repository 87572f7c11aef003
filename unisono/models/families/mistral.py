"""Mistral (7B, Nemo, Small): Llama's tensors, an explicit head size, one sliding window for all layers."""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp
from unisono.models.families.llama import NAMES


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. A null ``sliding_window`` is full attention."""
    layer = LayerSpec(read_attention(hf_config, window=hf_config.sliding_window or 0), read_mlp(hf_config))
    return read_decoder_config(hf_config, [layer] * hf_config.num_hidden_layers)


MISTRAL = Family(read, NAMES)
