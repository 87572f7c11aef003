"""Gemma 4: Gemma 3's layers with larger heads where there is no window, normed values and a factor a layer.

Full layers may take their values from the keys' projection. The last layers may read the keys and values of the last
earlier layer of their type, with a feed-forward of twice the width. Each layer may have inputs of its own beside the
stream, and experts beside its feed-forward. Scores are not scaled; norms multiply by w in fp32. Tokens of a picture see
each other in both directions in layers with a window, if the config says so. Source: transformers, ``models/gemma4``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.models.blocks.beside import BesideSpec
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layer_inputs import LayerInputSpec, LayerInputsSpec
from unisono.models.blocks.layers import POST, SANDWICH, AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.query_attention import QuerySpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    Name,
    in_language_model,
    read_decoder_config,
    windows_by_layer_type,
)
from unisono.models.families.gemma3 import NAMES as GEMMA3_NAMES
from unisono.models.families.gemma3 import rotary_of
from unisono.models.families.gemma4_tower import TOWER, TOWER_ROOTS, read_tower
from unisono.models.load.build import require
from unisono.models.vision.config import VisionConfig

DENSE, LAYER = "layers.*.feed_forward.", "model.layers.*."

NAMES: dict[str, Name] = {
    **GEMMA3_NAMES,
    "layers.*.scale": f"{LAYER}layer_scalar",
    "layer_inputs.embed": "model.embed_tokens_per_layer",
    "layer_inputs.project": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
    "layers.*.per_layer.gate": f"{LAYER}per_layer_input_gate",
    "layers.*.per_layer.down": f"{LAYER}per_layer_projection",
    "layers.*.per_layer_post_norm": f"{LAYER}post_per_layer_input_norm",
    f"{DENSE}dense.gate_up.gate": f"{LAYER}mlp.gate_proj",
    f"{DENSE}dense.gate_up.up": f"{LAYER}mlp.up_proj",
    f"{DENSE}dense.down": f"{LAYER}mlp.down_proj",
    f"{DENSE}dense_norm": f"{LAYER}pre_feedforward_layernorm",
    f"{DENSE}dense_post_norm": f"{LAYER}post_feedforward_layernorm_1",
    f"{DENSE}sparse_norm": f"{LAYER}pre_feedforward_layernorm_2",
    f"{DENSE}sparse_post_norm": f"{LAYER}post_feedforward_layernorm_2",
    f"{DENSE}router_norm": f"{LAYER}router.scale",
    f"{DENSE}sparse.router": f"{LAYER}router.proj",
    f"{DENSE}sparse.factors": f"{LAYER}router.per_expert_scale",
    f"{DENSE}sparse.experts.gate_up": f"{LAYER}experts.gate_up_proj",
    f"{DENSE}sparse.experts.down": f"{LAYER}experts.down_proj",
    f"{DENSE}sparse.experts.each.gate": f"{LAYER}experts.*.gate_proj",
    f"{DENSE}sparse.experts.each.up": f"{LAYER}experts.*.up_proj",
    f"{DENSE}sparse.experts.each.down": f"{LAYER}experts.*.down_proj",
}

UNREAD = {
    **dict.fromkeys(("model.audio_tower.", "model.embed_audio."), "audio is refused: it is not supported"),
}


def key_heads(text: Any, number: int, window: int) -> tuple[int, int]:
    """(KV heads, head size) of a layer: ``per_layer_config`` has them, or fields of older versions of transformers."""
    overrides = getattr(text, "per_layer_config", None)
    if overrides is not None:
        return overrides[number].num_key_value_heads, overrides[number].head_dim
    if window:
        return text.num_key_value_heads, text.head_dim
    fewer = text.num_global_key_value_heads if text.attention_k_eq_v else None
    return fewer or text.num_key_value_heads, text.global_head_dim or text.head_dim


def read_attention(text: Any, number: int, window: int) -> AttentionSpec:
    """Read a layer's attention. The last ``num_kv_shared_layers`` layers read keys of the last earlier layer of their
    type."""
    kind, own = text.layer_types[number], text.num_hidden_layers - text.num_kv_shared_layers
    kv_heads, head_dim = key_heads(text, number, window)
    common: dict[str, Any] = {
        "rotary": rotary_of(text, kind, head_dim),
        "window": window,
        "scale": 1.0,
        "qk_norm": True,
        "qkv_bias": text.attention_bias,
        "o_bias": text.attention_bias,
        "both_ways": text.use_bidirectional_attention == "vision" and window > 0,
    }
    heads = text.num_attention_heads, kv_heads, head_dim
    if number < own:
        return AttentionSpec(*heads, **common, v_norm=True, k_is_v=text.attention_k_eq_v and window == 0)
    same = [earlier for earlier in range(own) if text.layer_types[earlier] == kind]
    require(bool(same), "num_kv_shared_layers", text.num_kv_shared_layers, f"no layer before them is of type {kind!r}")
    return QuerySpec(*heads, **common, pages=window, reads=same[-1])


def read_feed_forward(text: Any, number: int) -> BlockSpec:
    """Read a layer's feed-forward, twice as wide in layers without keys if ``use_double_wide_mlp`` is true."""
    wide = text.use_double_wide_mlp and number >= text.num_hidden_layers - text.num_kv_shared_layers
    dense = MLPSpec(text.intermediate_size * (2 if wide else 1), activation=text.hidden_activation)
    if not getattr(text, "enable_moe_block", False):  # a Gemma4Unified has none of these fields
        return dense
    sizes = text.num_experts, text.top_k_experts, text.moe_intermediate_size
    return BesideSpec(dense, ExpertsSpec(*sizes, activation=text.hidden_activation, router_factors=True))


def read(hf_config: Any, vision: Callable[[Any], VisionConfig | None] = read_tower) -> DecoderConfig:
    """Read the config. ``layer_types`` lists the layers with a window; ``per_layer_config`` has the other heads.

    vision: reads the tower.
    """
    text = hf_config.get_text_config()
    both_ways, size = text.use_bidirectional_attention, getattr(text, "hidden_size_per_layer_input", 0) or 0
    experts = getattr(text, "enable_moe_block", False)
    require(both_ways in (None, "vision"), "use_bidirectional_attention", both_ways, "texts are attended causally only")
    windows, inputs = windows_by_layer_type(text), None
    if size:
        rows = text.vocab_size_per_layer_input
        require(rows >= text.vocab_size, "vocab_size_per_layer_input", rows, "every token needs a row of its own")
        inputs = LayerInputsSpec(size, rows, text.num_hidden_layers)

    def layer(number: int) -> LayerSpec:
        return LayerSpec(
            read_attention(text, number, windows[number]),
            read_feed_forward(text, number),
            SANDWICH,
            POST if experts else SANDWICH,
            LayerInputSpec(number, size, text.hidden_activation) if size else None,
            scaled=True,
        )

    return read_decoder_config(
        hf_config,
        [layer(number) for number in range(text.num_hidden_layers)],
        wide_norms=True,
        embed_scale=text.hidden_size**0.5,
        logit_cap=text.final_logit_softcapping or 0.0,
        layer_inputs=inputs,
        vision=vision(hf_config),
    )


GEMMA4 = Family(read, NAMES)
GEMMA4_VISION = Family(read, in_language_model(NAMES), unread=UNREAD, tower=TOWER, tower_roots=TOWER_ROOTS)
