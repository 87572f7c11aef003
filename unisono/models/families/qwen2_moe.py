"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts by softmax and a gated shared expert.

Source of formulas and names: transformers, ``models/qwen2_moe``.
"""

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
from unisono.models.families.qwen3_5_moe import EXPERTS, read_experts
from unisono.models.families.qwen3_moe import is_sparse


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``qkv_bias``: biases of q, k and v; ``norm_topk_prob``: weights are divided by their sum."""
    experts = read_experts(hf_config, normalize=hf_config.norm_topk_prob)
    layers = [
        LayerSpec(
            read_attention(hf_config, window=window, qkv_bias=hf_config.qkv_bias),
            experts if is_sparse(hf_config, number) else read_mlp(hf_config),
        )
        for number, window in enumerate(windows_by_layer_type(hf_config))
    ]
    return read_decoder_config(hf_config, layers)


QWEN2_MOE = Family(read, {**NAMES, **EXPERTS})
