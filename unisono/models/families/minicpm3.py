"""MiniCPM3: DeepSeek's latent attention with halves that rotate, and factors of embeddings, blocks and logits.

Source of formulas and names: transformers, ``models/minicpm3``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config, read_mlp
from unisono.models.families.deepseek_v3 import NAMES, read_latent
from unisono.models.load.build import require


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``scale_emb``: of embeddings; ``scale_depth`` / sqrt(layers): of blocks; ``dim_model_base`` /
    ``hidden_size``: of logits."""
    base, count = hf_config.dim_model_base, hf_config.num_hidden_layers
    require(base > 0, "dim_model_base", base, "it must be above 0")
    layer = LayerSpec(
        replace(read_latent(hf_config), interleaved=False),
        read_mlp(hf_config, hf_config.mlp_bias),
        times=hf_config.scale_depth / math.sqrt(count),
    )
    return read_decoder_config(
        hf_config,
        [layer] * count,
        embed_scale=float(hf_config.scale_emb),
        logit_scale=base / hf_config.hidden_size,
    )


MINICPM3 = Family(read, NAMES)
