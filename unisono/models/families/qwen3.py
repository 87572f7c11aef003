"""Qwen3, dense: Llama's tensors plus an RMSNorm over each query and key head before rotary."""

from __future__ import annotations

from typing import Any

from unisono.models.config import DecoderConfig, Family
from unisono.models.families import qwen2
from unisono.models.families.llama import NAMES


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o; ``head_dim`` is explicit."""
    bias = hf_config.attention_bias
    return qwen2.read(hf_config, qk_norm=True, qkv_bias=bias, o_bias=bias)


QWEN3 = Family(
    read,
    {
        **NAMES,
        "layers.*.mixer.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.mixer.k_norm": "model.layers.*.self_attn.k_norm",
    },
)
