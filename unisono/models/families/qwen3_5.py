"""Qwen3.5, 3.6 and 3.8, dense: Gated DeltaNet layers and, every few layers, gated attention.

Reads both architectures: the causal LM, and the model with a vision tower (``Qwen3_5ForConditionalGeneration``). The
tower is Qwen3-VL's without deepstack. A text token has the same position on all axes of the interleaved rope, so plain
rope over the same frequencies is exact. All norms but that of Gated DeltaNet are zero-centred. The families with
experts, and Qwen3-Next, build on this one. Source of formulas and names: transformers, ``models/qwen3_5``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.models.blocks.gated_delta import GatedDeltaSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec
from unisono.models.config import (
    TOWER_PREFIXES,
    DecoderConfig,
    Family,
    Name,
    in_language_model,
    read_attention,
    read_decoder_config,
    read_mlp,
)
from unisono.models.families.qwen3 import QWEN3
from unisono.models.families.qwen3_vl import TOWER, read_tower
from unisono.models.load.build import require
from unisono.models.vision.config import read_vision

LINEAR, FULL = "linear_attention", "full_attention"

NAMES: dict[str, Name] = {
    **QWEN3.names,
    "layers.*.mixer.o": {
        AttentionSpec: "model.layers.*.self_attn.o_proj",
        GatedDeltaSpec: "model.layers.*.linear_attn.out_proj",
    },
    "layers.*.mixer": "model.layers.*.linear_attn",
    "layers.*.mixer.in_proj.qkv": "model.layers.*.linear_attn.in_proj_qkv",
    "layers.*.mixer.in_proj.z": "model.layers.*.linear_attn.in_proj_z",
    **{
        f"layers.*.mixer.{linear}.{gate}": f"model.layers.*.linear_attn.in_proj_{gate}"
        for linear in ("in_proj", "gates")
        for gate in ("b", "a")
    },
    "layers.*.mixer.conv": "model.layers.*.linear_attn.conv1d",
    "layers.*.mixer.norm": "model.layers.*.linear_attn.norm",
}

TEXT_ONLY = "config.json names the causal LM, which has no vision tower: pictures are refused"
UNREAD = dict.fromkeys(TOWER_PREFIXES, TEXT_ONLY)
SECTION = (11, 11, 10)
"""Default rotary planes of each axis."""


def read_hybrid(hf_config: Any, feed_forwards: Sequence[BlockSpec]) -> DecoderConfig:
    """A decoder with these feed-forwards, one per layer, and mixers by ``layer_types``.

    Raises CheckpointError naming a value of config.json that is not supported.
    """
    text = hf_config.get_text_config()
    kinds, count = list(text.layer_types), text.num_hidden_layers
    require(len(kinds) == count, "layer_types", kinds, f"it must name each of {count} layers")
    for kind in kinds:
        require(kind in (LINEAR, FULL), "layer_types", kind, f"{LINEAR} and {FULL} are supported")
    require(FULL in kinds, "layer_types", kinds, f"at least one layer must be {FULL}")
    state, gate = getattr(text, "mamba_ssm_dtype", "float32"), getattr(text, "output_gate_type", "swish")
    require(state == "float32", "mamba_ssm_dtype", state, "the recurrent state is kept in float32")
    require(gate == "swish", "output_gate_type", gate, "Gated DeltaNet's output is gated by 'swish'")
    require(text.hidden_act == "silu", "hidden_act", text.hidden_act, "only 'silu' is supported")
    bias = text.attention_bias
    mixers: dict[str, BlockSpec] = {
        FULL: read_attention(
            text, qk_norm=True, output_gate=getattr(text, "attn_output_gate", True), qkv_bias=bias, o_bias=bias
        ),
        LINEAR: GatedDeltaSpec(
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
        ),
    }
    layers = [LayerSpec(mixers[kind], feed_forward) for kind, feed_forward in zip(kinds, feed_forwards, strict=True)]
    modules = getattr(text, "mtp_num_hidden_layers", 0) or 0
    vision = read_vision(hf_config, read_tower, SECTION, interleaved=True)
    return read_decoder_config(hf_config, layers, zero_centered_norms=True, mtp_modules=modules, vision=vision)


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o of the attention layers."""
    text = hf_config.get_text_config()
    return read_hybrid(hf_config, [read_mlp(text)] * text.num_hidden_layers)


QWEN3_5 = Family(read, NAMES, unread=UNREAD)
QWEN3_5_VISION = Family(read, in_language_model(NAMES), tower=TOWER)
