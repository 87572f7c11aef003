"""Qwen3 MoE (30B-A3B, 235B-A22B, Coder): Qwen3's attention, and experts in place of some or all MLPs."""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp
from unisono.models.families.mixtral import names
from unisono.models.families.qwen3 import QWEN3


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o; ``use_sliding_window``: every layer has the
    window."""
    bias = hf_config.attention_bias
    attention = read_attention(
        hf_config, window=hf_config.sliding_window or 0, qk_norm=True, qkv_bias=bias, o_bias=bias
    )
    layers = [
        LayerSpec(attention, read_experts(hf_config) if is_sparse(hf_config, layer) else read_mlp(hf_config))
        for layer in range(hf_config.num_hidden_layers)
    ]
    return read_decoder_config(hf_config, layers)


def read_experts(hf_config: Any) -> ExpertsSpec:
    """A layer's experts. ``norm_topk_prob``: divide the chosen experts' weights by their sum."""
    return ExpertsSpec(
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=hf_config.moe_intermediate_size,
        normalize=hf_config.norm_topk_prob,
        activation=hf_config.hidden_act,
    )


def is_sparse(hf_config: Any, layer: int) -> bool:
    """True if a layer has experts: every ``decoder_sparse_step``-th, except those of ``mlp_only_layers``."""
    dense = hf_config.num_experts == 0 or layer in hf_config.mlp_only_layers
    return not dense and (layer + 1) % hf_config.decoder_sparse_step == 0


QWEN3_MOE = Family(read, {**QWEN3.names, **names("mlp", "gate_proj", "up_proj", "down_proj")})
