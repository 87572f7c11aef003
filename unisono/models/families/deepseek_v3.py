"""DeepSeek-V3, V3.1 and R1 (and Kimi K2): latent attention, and GLM-4.5's experts, chosen within groups.

The text of Kimi K2.5 and K2.6 is such a model beside a tower, which is not read.
Source of formulas and names: transformers, ``models/deepseek_v3``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, Name, in_language_model, read_decoder_config
from unisono.models.families.glm4_moe import EXPERTS, feed_forwards, read_experts
from unisono.models.families.llama import NAMES as LLAMA_NAMES

ATTENTION = "model.layers.*.self_attn."

NAMES: dict[str, Name] = {
    **{ours: theirs for ours, theirs in LLAMA_NAMES.items() if ".qkv." not in ours},
    **EXPERTS,
    "layers.*.mixer.a.q": f"{ATTENTION}q_proj",
    "layers.*.mixer.a.q_a": f"{ATTENTION}q_a_proj",
    "layers.*.mixer.a.kv": f"{ATTENTION}kv_a_proj_with_mqa",
    "layers.*.mixer.q_norm": f"{ATTENTION}q_a_layernorm",
    "layers.*.mixer.q_b": f"{ATTENTION}q_b_proj",
    "layers.*.mixer.kv_norm": f"{ATTENTION}kv_a_layernorm",
    "layers.*.mixer.kv_b": f"{ATTENTION}kv_b_proj",
}


def read_latent(hf_config: Any, parameters: Mapping[str, Any] | None = None) -> LatentSpec:
    """Read a layer's attention. ``rope_interleave``: neighbouring elements rotate together.

    Scores are scaled by 1 / sqrt(elements of a head), and with scaled positions by the square of
    0.1 · ``mscale_all_dim`` · ln(``factor``) + 1. parameters: in place of ``rope_parameters``.
    """
    rope = hf_config.qk_rope_head_dim
    parameters = parameters or getattr(hf_config, "rope_parameters", None) or {}
    rotary = RotarySpec.of(hf_config, rope, dict(parameters) or None)
    scale = (hf_config.qk_nope_head_dim + rope) ** -0.5
    all_dim, factor = parameters.get("mscale_all_dim") or 0, parameters.get("factor") or 1
    if parameters.get("rope_type", "default") != "default" and all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1) ** 2
    return LatentSpec(
        num_heads=hf_config.num_attention_heads,
        latent_dim=hf_config.kv_lora_rank,
        nope_dim=hf_config.qk_nope_head_dim,
        rope_dim=rope,
        value_dim=hf_config.v_head_dim,
        rotary=rotary,
        scale=scale,
        query_rank=hf_config.q_lora_rank or 0,
        interleaved=getattr(hf_config, "rope_interleave", True),
        bias=hf_config.attention_bias,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of the products into latents and of the output."""
    attention = read_latent(hf_config)
    layers = [LayerSpec(attention, each) for each in feed_forwards(hf_config, read_experts(hf_config))]
    modules = getattr(hf_config, "num_nextn_predict_layers", 0) or 0
    return read_decoder_config(hf_config, layers, mtp_modules=modules)


DEEPSEEK_V3 = Family(read, NAMES)


def read_kimi(hf_config: Any) -> DecoderConfig:
    """Read the text model of a Kimi K2.5: a DeepSeek-V3."""
    text = hf_config.get_text_config()
    text.architectures, text.name_or_path = hf_config.architectures, hf_config.name_or_path
    return read(text)


PICTURES = "the tower of Kimi K2.5 is not supported yet: pictures are refused"
TOWER = "vision_tower.", "mm_projector."
KIMI_K25 = Family(
    read_kimi,
    in_language_model(NAMES),
    unread={outer + name: PICTURES for outer in ("model.", "") for name in TOWER},
    tied_unless_stored=True,
)
