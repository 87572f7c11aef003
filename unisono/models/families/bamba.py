"""Bamba: Mamba2 in most layers, attention that rotates half of a head in the others, a gated MLP in each.

Source of formulas and names: transformers, ``models/bamba``.
"""

from __future__ import annotations

from typing import Any

from unisono.config.decoder_names import LLAMA_NAMES
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec
from unisono.models.blocks.mamba2 import Mamba2Spec, mamba2_rows
from unisono.models.config import DecoderConfig, Family, Name, read_attention, read_decoder_config, read_mlp
from unisono.models.families.granite_hybrid import FULL, LAYER, LINEAR, mamba2_names, read_mamba2
from unisono.models.load.build import require

NAMES: dict[str, Name] = {
    **LLAMA_NAMES,
    **mamba2_names(f"{LAYER}mamba"),
    "layers.*.mixer.o": {AttentionSpec: f"{LAYER}self_attn.o_proj", Mamba2Spec: f"{LAYER}mamba.out_proj"},
    "layers.*.feed_forward_norm": f"{LAYER}pre_ff_layernorm",
    "layers.*.feed_forward.gate_up.gate": f"{LAYER}feed_forward.gate_proj",
    "layers.*.feed_forward.gate_up.up": f"{LAYER}feed_forward.up_proj",
    "layers.*.feed_forward.down": f"{LAYER}feed_forward.down_proj",
    "norm": "model.final_layernorm",
}


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attn_layer_indices``: the layers that attend."""
    attending, bias = hf_config.attn_layer_indices or [], hf_config.attention_bias
    kinds = [FULL if number in attending else LINEAR for number in range(hf_config.num_hidden_layers)]
    require(FULL in kinds, "attn_layer_indices", attending, "at least one layer must attend")
    mixers: dict[str, BlockSpec] = {FULL: read_attention(hf_config, qkv_bias=bias, o_bias=bias)}
    if LINEAR in kinds:
        mixers[LINEAR] = read_mamba2(hf_config)
    mlp = read_mlp(hf_config, hf_config.mlp_bias)
    return read_decoder_config(hf_config, [LayerSpec(mixers[each], mlp) for each in kinds])


BAMBA = Family(read, NAMES, rows=mamba2_rows("layers.*.mixer"))
