"""Llama 4 (Scout, Maverick): layers without rotation, plain norms of rotated heads, experts of weighted inputs.

A token of an expert is multiplied by the sigmoid of its logit before the expert, which a shared expert is added to.
Layers of the type ``chunked_attention`` attend within chunks of ``attention_chunk_size`` positions. Source of formulas
and names: transformers, ``models/llama4``.
"""

from __future__ import annotations

from typing import Any

from unisono.config.decoder_names import LAYER, LLAMA_NAMES
from unisono.kernels.moe.scored_router import RouterScores
from unisono.layers.expert_stacks import ExpertKind
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.head_steps import HeadStepsSpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec, MLPSpec
from unisono.models.config import DecoderConfig, Family, in_language_model, read_decoder_config
from unisono.models.families.ernie4_5_moe import in_halves
from unisono.models.families.llama4_tower import TOWER, TOWER_ROOTS, TOWER_ROWS, read_tower
from unisono.models.load.build import require

FULL, CHUNKED = "full_attention", "chunked_attention"
MLP = f"{LAYER}feed_forward."
SHARED = f"{MLP}shared_expert."
NAMES = {
    **LLAMA_NAMES,
    "layers.*.feed_forward.gate_up.gate": f"{MLP}gate_proj",
    "layers.*.feed_forward.gate_up.up": f"{MLP}up_proj",
    "layers.*.feed_forward.down": f"{MLP}down_proj",
    "layers.*.feed_forward.router": f"{MLP}router",
    "layers.*.feed_forward.experts.gate_up": f"{MLP}experts.gate_up_proj",
    "layers.*.feed_forward.experts.down": f"{MLP}experts.down_proj",
    **{f"layers.*.feed_forward.experts.each.{name}": f"{MLP}experts.*.{name}_proj" for name in ("gate", "up", "down")},
    "layers.*.feed_forward.shared.gate_up.gate": f"{SHARED}gate_proj",
    "layers.*.feed_forward.shared.gate_up.up": f"{SHARED}up_proj",
    "layers.*.feed_forward.shared.down": f"{SHARED}down_proj",
}


def read_attention(text: Any, number: int) -> AttentionSpec:
    """A layer's attention.

    ``layer_types``: layers that attend within chunks. ``use_qk_norm``: rotated heads are normed without weights.
    ``attn_temperature_tuning``: queries of layers without rotation grow with the position.
    """
    turns, bias, dim = bool(text.no_rope_layers[number]), text.attention_bias, text.head_dim
    normed, grown = turns and text.use_qk_norm, not turns and text.attn_temperature_tuning
    growth = (float(text.attn_scale), int(text.floor_scale), 1) if grown else None
    return AttentionSpec(
        text.num_attention_heads,
        text.num_key_value_heads,
        dim,
        RotarySpec.of(text, dim) if turns else RotarySpec.none(dim),
        qk_norm=normed,
        qkv_bias=bias,
        o_bias=bias,
        steps=HeadStepsSpec(rotate_first=normed, query_growth=growth) if normed or growth else None,
        norm_weights=False,
        window=-text.attention_chunk_size if text.layer_types[number] == CHUNKED else 0,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``moe_layers``: layers with experts."""
    text = hf_config.get_text_config()
    kinds, chunk = list(text.layer_types), text.attention_chunk_size or 0
    count = text.num_hidden_layers
    require(len(kinds) == count and {*kinds} <= {FULL, CHUNKED}, "layer_types", kinds, f"{FULL} and {CHUNKED}")
    require(CHUNKED not in kinds or chunk >= 1, "attention_chunk_size", chunk, "it must be at least 1")
    experts = ExpertsSpec(
        text.num_local_experts,
        text.num_experts_per_tok,
        text.intermediate_size,
        text.intermediate_size,
        normalize=False,
        activation=text.hidden_act,
        kind=ExpertKind(transposed=True),
        scores=RouterScores(),
        weighs_inputs=True,
    )
    dense = MLPSpec(text.intermediate_size_mlp, activation=text.hidden_act)
    layers = [
        LayerSpec(read_attention(text, number), experts if number in text.moe_layers else dense)
        for number in range(count)
    ]
    return read_decoder_config(hf_config, layers, vision=read_tower(hf_config))


ROWS = {"layers.*.mixer.qkv.q": in_halves("num_heads"), "layers.*.mixer.qkv.k": in_halves("num_kv_heads")}

LLAMA4 = Family(read, NAMES, ROWS)
LLAMA4_MEDIA = Family(read, in_language_model(NAMES), ROWS, tower=TOWER, tower_roots=TOWER_ROOTS, tower_rows=TOWER_ROWS)
