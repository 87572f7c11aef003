"""Llama 2, 3 and 3.x: the family whose tensor names the others share.

Rope scaling (``linear``, ``llama3`` …) is the rotary table's to read. Loaded through the catalog; families
that share the names import them.
"""

from __future__ import annotations

from typing import Any

from unisono.models.config import DecoderConfig, Family, read_decoder_config

NAMES = {
    "embed": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.qkv.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.qkv.k": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.qkv.v": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.gate_up.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


def read(hf_config: Any) -> DecoderConfig:
    """``attention_bias`` gives biases to q, k, v and o; ``mlp_bias`` to gate, up and down."""
    attention_bias = hf_config.attention_bias
    return read_decoder_config(hf_config, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf_config.mlp_bias)


LLAMA = Family(read, NAMES)
