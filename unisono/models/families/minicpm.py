"""MiniCPM 1, 2, 4 and 4.1: Llama's tensors, and factors of embeddings, blocks and logits.

Source of formulas and names: OpenBMB/MiniCPM, ``modeling_minicpm.py``, and its later version in MiniCPM4's checkpoints,
whose attention is dense without ``sparse_config``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp
from unisono.models.families.llama import NAMES
from unisono.models.load.build import require


def read_scaled(hf_config: Any, layer: LayerSpec) -> DecoderConfig:
    """A model of equal layers with MiniCPM's factors. ``scale_emb``: of embeddings; ``scale_depth`` / sqrt(layers): of
    blocks; ``dim_model_base`` / ``hidden_size``: of logits.

    Raises CheckpointError for a missing factor.
    """
    for name in ("scale_emb", "scale_depth", "dim_model_base"):
        value = getattr(hf_config, name, None)
        require(value is not None and value > 0, name, value, "it must be above 0")
    count = hf_config.num_hidden_layers
    return read_decoder_config(
        hf_config,
        [replace(layer, times=hf_config.scale_depth / math.sqrt(count))] * count,
        embed_scale=float(hf_config.scale_emb),
        logit_scale=hf_config.dim_model_base / hf_config.hidden_size,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o."""
    bias = hf_config.attention_bias
    return read_scaled(hf_config, LayerSpec(read_attention(hf_config, qkv_bias=bias, o_bias=bias), read_mlp(hf_config)))


MINICPM = Family(read, NAMES)
