"""Qwen3-VL with experts: Qwen3-VL's attention, tower and deepstack, and Qwen3's experts in some or all layers.

Source of formulas and names: transformers, ``models/qwen3_vl_moe``.
"""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.config import DecoderConfig, Family, in_language_model, read_decoder_config, read_mlp
from unisono.models.families.qwen3_moe import QWEN3_MOE, is_sparse
from unisono.models.families.qwen3_vl import SECTION, TOWER, read_layers, read_tower
from unisono.models.vision.config import read_vision


def read_experts(text: Any) -> ExpertsSpec:
    """A layer's experts. The chosen experts' weights are always divided by their sum."""
    return ExpertsSpec(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        activation=text.hidden_act,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``decoder_sparse_step`` and ``mlp_only_layers`` select the layers with experts."""
    text = hf_config.get_text_config()
    layers = range(text.num_hidden_layers)
    blocks = [read_experts(text) if is_sparse(text, layer) else read_mlp(text) for layer in layers]
    vision = read_vision(hf_config, read_tower, SECTION, interleaved=True)
    return read_decoder_config(hf_config, read_layers(text, blocks), vision=vision)


QWEN3_VL_MOE = Family(read, in_language_model(QWEN3_MOE.names), tower=TOWER)
