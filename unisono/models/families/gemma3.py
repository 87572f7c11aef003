"""Gemma 2 and 3: norms before and after each block, GELU gates, layers with a window between those without.

Embeddings are multiplied by the root of the hidden size. Norms multiply by 1 + w. Gemma 3 norms queries and keys and
rotates them by another table in layers with a window; Gemma 2 caps scores and logits instead. The tokens of a picture
see each other in both directions, and all tokens with ``use_bidirectional_attention`` (EmbeddingGemma; refused beside
an LM head). Source of formulas and names: transformers, ``gemma2``, ``gemma3`` and ``siglip``.
"""

from __future__ import annotations

import math
from typing import Any

from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.layers import SANDWICH, AttentionSpec, LayerSpec, MLPSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    Name,
    in_language_model,
    read_decoder_config,
    windows_by_layer_type,
)
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load.build import require
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.config import TowerSpec, VisionConfig

NAMES: dict[str, Name] = {
    **QWEN3.names,
    "layers.*.mixer_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.feed_forward_post_norm": "model.layers.*.post_feedforward_layernorm",
}

BLOCK = "vision.encoder.layers.*."
TOWER = {
    "patch_embed": "vision.embeddings.patch_embedding",
    "positions": "vision.embeddings.position_embedding",
    "blocks.*.norm1": f"{BLOCK}layer_norm1",
    "blocks.*.norm2": f"{BLOCK}layer_norm2",
    **{f"blocks.*.qkv.{part}": f"{BLOCK}self_attn.{part}_proj" for part in "qkv"},
    "blocks.*.proj": f"{BLOCK}self_attn.out_proj",
    "blocks.*.mlp.up": f"{BLOCK}mlp.fc1",
    "blocks.*.mlp.down": f"{BLOCK}mlp.fc2",
    "merger.post_norm": "vision.post_layernorm",
    "merger.norm": "projector.mm_soft_emb_norm",
    "merger.project": "projector.mm_input_projection_weight",
}
_PLACES = {"vision_tower.vision_model.": "vision.", "vision_tower.": "vision.", "multi_modal_projector.": "projector."}
TOWER_ROOTS: dict[str, str | None] = {
    **{f"{outer}vision_tower.{inner}head.": None for outer in ("model.", "") for inner in ("vision_model.", "")},
    **{outer + place: inside for outer in ("model.", "") for place, inside in _PLACES.items()},
}
"""SigLIP's pooling head is not read: the projector reads its patches."""
UNREAD = dict.fromkeys(
    ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    "the architecture is a text model's: pictures are refused",
)


def rotary_of(text: Any, layer_type: str, head_dim: int) -> RotarySpec:
    """The table of a layer type: ``rope_parameters`` has parameters for each, or one set for all."""
    parameters = text.rope_parameters
    return RotarySpec.of(text, head_dim, dict(parameters.get(layer_type, parameters)))


def read_tower(hf_config: Any) -> VisionConfig | None:
    """The SigLIP tower: pictures of one size, whose patches are averaged to ``mm_tokens_per_image`` tokens."""
    vision, text = getattr(hf_config, "vision_config", None), hf_config.get_text_config()
    if vision is None:
        return None
    name, tokens, eps = vision.model_type, hf_config.mm_tokens_per_image, vision.layer_norm_eps
    require(name == "siglip_vision_model", "vision_config.model_type", name, "it must be 'siglip_vision_model'")
    require(eps == NORM_EPS, "vision_config.layer_norm_eps", eps, f"it must be {NORM_EPS}")
    patch, size, wide = vision.patch_size, vision.image_size, math.isqrt(max(tokens, 0))
    require(patch >= 1 and size % patch == 0, "vision_config.image_size", size, f"it must be a multiple of {patch}")
    side = size // patch
    square = wide >= 1 and wide**2 == tokens and side % wide == 0
    require(square, "mm_tokens_per_image", tokens, f"its root must divide the {side} patches of a side")
    image, last = hf_config.image_token_id, text.vocab_size - 1
    require(0 <= image <= last, "image_token_index", image, f"it must be a token; ids are 0 to {last}")
    return VisionConfig(
        merge=side // wide,
        patch_size=patch,
        temporal_patch_size=1,
        patch_elements=vision.num_channels * patch**2,
        hidden_size=text.hidden_size,
        deepstack=0,
        image_token_id=image,
        video_token_id=-1,
        vision_start_token_id=hf_config.boi_token_id,
        vision_end_token_id=hf_config.eoi_token_id,
        mrope_section=(),
        mrope_interleaved=False,
        tower=TowerSpec(
            vision.num_hidden_layers,
            vision.hidden_size,
            vision.num_attention_heads,
            vision.intermediate_size,
            rope_theta=0.0,
            activation=vision.hidden_act,
            position_side=side,
            pooled=True,
            apart=True,
        ),
        side=side,
        both_ways=True,
        placeholder_token_id=hf_config.boi_token_id,
        around="\n\n",
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``layer_types`` lists the layers with a window; a Gemma 2 has no norms of queries and keys."""
    text = hf_config.get_text_config()
    bias, head_norms, vision = text.attention_bias, text.model_type != "gemma2", read_tower(hf_config)
    heads = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    mlp = MLPSpec(text.intermediate_size, activation=text.hidden_activation)

    def layer(layer_type: str, window: int) -> LayerSpec:
        attention = AttentionSpec(
            *heads,
            rotary_of(text, layer_type, text.head_dim),
            window=window,
            scale=text.query_pre_attn_scalar**-0.5,
            soft_cap=text.attn_logit_softcapping or 0.0 if not head_norms else 0.0,
            qk_norm=head_norms,
            qkv_bias=bias,
            o_bias=bias,
            both_ways=vision is not None,
            whole_text=bool(getattr(text, "use_bidirectional_attention", None)),
        )
        return LayerSpec(attention, mlp, SANDWICH, SANDWICH)

    layers = [layer(kind, window) for kind, window in zip(text.layer_types, windows_by_layer_type(text), strict=True)]
    return read_decoder_config(
        hf_config,
        layers,
        zero_centered_norms=True,
        embed_scale=text.hidden_size**0.5,
        logit_cap=text.final_logit_softcapping or 0.0,
        vision=vision,
    )


GEMMA2 = Family(read, NAMES)
GEMMA3 = Family(read, NAMES, unread=UNREAD)
GEMMA3_VISION = Family(read, in_language_model(NAMES), tower=TOWER, tower_roots=TOWER_ROOTS)
