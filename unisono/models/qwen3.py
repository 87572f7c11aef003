"""Qwen3, dense: Llama's tensors plus an RMSNorm over each query and key head before rotary."""

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
    """``attention_bias`` gives biases to q, k, v and o; ``head_dim`` is explicit."""
    return read_decoder_config(
        hf_config,
        windows=windows_by_layer_type(hf_config),
        qk_norm=True,
        qkv_bias=hf_config.attention_bias,
        o_bias=hf_config.attention_bias,
    )


QWEN3 = Family(
    read,
    {
        **NAMES,
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    },
)
