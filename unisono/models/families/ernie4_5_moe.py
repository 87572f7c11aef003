"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B), text: Llama's tensors, rotated in pairs, and corrected softmax routers.

A head's neighbouring elements rotate together. The loader reorders the rows of queries and keys, so that the halves do.
Source of formulas and names: transformers, ``models/ernie4_5_moe``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp
from unisono.models.families.glm4_moe import EXPERTS
from unisono.models.families.llama import NAMES


def in_halves(heads: str) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of heads whose pairs rotate, in the order in which their halves rotate. heads: field of their number."""

    def rows(layer: LayerSpec) -> torch.Tensor:
        spec = cast(AttentionSpec, layer.mixer)
        count, size = getattr(spec, heads), spec.head_dim
        return torch.arange(count * size).view(count, size // 2, 2).transpose(1, 2).flatten()

    return rows


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. Every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to
    ``moe_layer_end_index`` has experts."""
    size, first, last = hf_config.moe_intermediate_size, hf_config.moe_layer_start_index, hf_config.moe_layer_end_index
    experts = ExpertsSpec(
        num_experts=hf_config.moe_num_experts,
        top_k=hf_config.moe_k,
        intermediate_size=size,
        shared_intermediate_size=size * hf_config.moe_num_shared_experts,
        activation=hf_config.hidden_act,
        scores=RouterScores(sigmoid=False, correction=True, epsilon=hf_config.moe_norm_min),
    )

    def feed_forward(layer: int) -> BlockSpec:
        sparse = (layer + 1) % hf_config.moe_layer_interval == 0 and first <= layer <= last
        return experts if sparse else read_mlp(hf_config)

    attention = read_attention(hf_config)
    layers = [LayerSpec(attention, feed_forward(layer)) for layer in range(hf_config.num_hidden_layers)]
    return read_decoder_config(hf_config, layers)


ERNIE4_5_MOE = Family(
    read,
    {
        **NAMES,
        **EXPERTS,
        "layers.*.feed_forward.correction": "model.layers.*.mlp.moe_statics.e_score_correction_bias",
    },
    rows={
        "layers.*.mixer.qkv.q": in_halves("num_heads"),
        "layers.*.mixer.qkv.k": in_halves("num_kv_heads"),
    },
)
