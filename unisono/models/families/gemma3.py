"""Gemma 2 and 3, text: norms before and after each block, GELU gates, layers with a window between those without.

Embeddings are multiplied by the root of the hidden size. Norms multiply by 1 + w. Gemma 3 norms queries and keys and
rotates them by another table in layers with a window; Gemma 2 caps scores and logits instead. Source of formulas and
names: transformers, ``models/gemma2`` and ``models/gemma3``.
"""

from __future__ import annotations

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

NAMES: dict[str, Name] = {
    **QWEN3.names,
    "layers.*.mixer_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.feed_forward_post_norm": "model.layers.*.post_feedforward_layernorm",
}

NO_TOWER = "pictures are refused: the towers of Gemma are not supported yet"
TOWER_PREFIXES = (
    "model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.",
)  # fmt: skip
UNREAD = dict.fromkeys(TOWER_PREFIXES, NO_TOWER)


def rotary_of(text: Any, layer_type: str, head_dim: int) -> RotarySpec:
    """The table of a layer type: ``rope_parameters`` has parameters for each, or one set for all."""
    parameters = text.rope_parameters
    return RotarySpec.of(text, head_dim, dict(parameters.get(layer_type, parameters)))


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``layer_types`` lists the layers with a window; a Gemma 2 has no norms of queries and keys."""
    text = hf_config.get_text_config()
    both_ways = getattr(text, "use_bidirectional_attention", None)
    require(not both_ways, "use_bidirectional_attention", both_ways, "a token that sees later ones is not computed")
    bias, head_norms = text.attention_bias, text.model_type != "gemma2"
    mlp = MLPSpec(text.intermediate_size, activation=text.hidden_activation)

    def layer(layer_type: str, window: int) -> LayerSpec:
        attention = AttentionSpec(
            text.num_attention_heads,
            text.num_key_value_heads,
            text.head_dim,
            rotary_of(text, layer_type, text.head_dim),
            window=window,
            scale=text.query_pre_attn_scalar**-0.5,
            soft_cap=text.attn_logit_softcapping or 0.0 if not head_norms else 0.0,
            qk_norm=head_norms,
            qkv_bias=bias,
            o_bias=bias,
        )
        return LayerSpec(attention, mlp, SANDWICH, SANDWICH)

    layers = [layer(kind, window) for kind, window in zip(text.layer_types, windows_by_layer_type(text), strict=True)]
    return read_decoder_config(
        hf_config,
        layers,
        zero_centered_norms=True,
        embed_scale=text.hidden_size**0.5,
        logit_cap=text.final_logit_softcapping or 0.0,
    )


GEMMA2 = Family(read, NAMES)
GEMMA3 = Family(read, NAMES, unread=UNREAD)
GEMMA3_VISION = Family(read, in_language_model(NAMES), unread=UNREAD)
