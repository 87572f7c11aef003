"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts; ``mlp_layer_types`` lists the layers with experts.

Source of formulas and names: transformers, ``models/glm4_moe_lite``.
"""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config, read_mlp
from unisono.models.families.deepseek_v3 import NAMES, read_latent
from unisono.models.families.glm4_moe import read_experts
from unisono.models.load.build import require


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. Raises CheckpointError for a feed-forward that is neither dense nor sparse."""
    kinds, count = list(hf_config.mlp_layer_types), hf_config.num_hidden_layers
    require(len(kinds) == count, "mlp_layer_types", kinds, f"it must name each of {count} layers")
    require({*kinds} <= {"dense", "sparse"}, "mlp_layer_types", kinds, "dense and sparse are supported")
    attention, experts, dense = read_latent(hf_config), read_experts(hf_config), read_mlp(hf_config)
    layers = [LayerSpec(attention, experts if kind == "sparse" else dense) for kind in kinds]
    modules = getattr(hf_config, "num_nextn_predict_layers", 0) or 0
    return read_decoder_config(hf_config, layers, mtp_modules=modules)


GLM4_MOE_LITE = Family(read, NAMES)
