"""Llama 2, 3 and 3.x: the family whose tensor names the others share.

The rotary table reads rope scaling (``linear``, ``llama3`` …). Loaded through the catalog; families that share the
names import them.
"""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp

NAMES = {
    "embed": "model.embed_tokens",
    "layers.*.mixer_norm": "model.layers.*.input_layernorm",
    "layers.*.mixer.qkv.q": "model.layers.*.self_attn.q_proj",
    "layers.*.mixer.qkv.k": "model.layers.*.self_attn.k_proj",
    "layers.*.mixer.qkv.v": "model.layers.*.self_attn.v_proj",
    "layers.*.mixer.o": "model.layers.*.self_attn.o_proj",
    "layers.*.feed_forward_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.gate_up.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.gate_up.up": "model.layers.*.mlp.up_proj",
    "layers.*.feed_forward.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o; ``mlp_bias``: of gate, up and down."""
    bias = hf_config.attention_bias
    layer = LayerSpec(read_attention(hf_config, qkv_bias=bias, o_bias=bias), read_mlp(hf_config, hf_config.mlp_bias))
    return read_decoder_config(hf_config, [layer] * hf_config.num_hidden_layers)


LLAMA = Family(read, NAMES)
