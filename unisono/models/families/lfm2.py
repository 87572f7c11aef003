"""LFM2, dense and with experts: short convolutions in most layers, attention with head norms in the others.

Experts are chosen by a sigmoid with a correction, as DeepSeek-V3's. Source of formulas and names: transformers,
``models/lfm2`` and ``models/lfm2_moe``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.short_conv import ShortConvSpec
from unisono.models.config import DecoderConfig, Family, Name, read_attention, read_decoder_config
from unisono.models.families.mixtral import names
from unisono.models.load.build import require

CONV, FULL, LAYER = "conv", "full_attention", "model.layers.*."

NAMES: dict[str, Name] = {
    "embed": "model.embed_tokens",
    "layers.*.mixer_norm": f"{LAYER}operator_norm",
    **{f"layers.*.mixer.qkv.{part}": f"{LAYER}self_attn.{part}_proj" for part in "qkv"},
    "layers.*.mixer.q_norm": f"{LAYER}self_attn.q_layernorm",
    "layers.*.mixer.k_norm": f"{LAYER}self_attn.k_layernorm",
    "layers.*.mixer.o": {AttentionSpec: f"{LAYER}self_attn.out_proj", ShortConvSpec: f"{LAYER}conv.out_proj"},
    **{f"layers.*.mixer.in_proj.{part}": f"{LAYER}conv.in_proj" for part in "bcx"},
    "layers.*.mixer.conv": f"{LAYER}conv.conv",
    "layers.*.feed_forward_norm": f"{LAYER}ffn_norm",
    "layers.*.feed_forward.gate_up.gate": f"{LAYER}feed_forward.w1",
    "layers.*.feed_forward.gate_up.up": f"{LAYER}feed_forward.w3",
    "layers.*.feed_forward.down": f"{LAYER}feed_forward.w2",
    "norm": "model.embedding_norm",
    "lm_head": "lm_head",
}

MOE_NAMES: dict[str, Name] = {
    **NAMES,
    **names("feed_forward", "w1", "w3", "w2"),
    "layers.*.feed_forward.correction": f"{LAYER}feed_forward.expert_bias",
}


def third(number: int) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of a part of ``in_proj``, which stores b, c and x one after the other."""

    def rows(layer: LayerSpec) -> torch.Tensor:
        channels = cast(ShortConvSpec, layer.mixer).channels
        return torch.arange(number * channels, (number + 1) * channels)

    return rows


ROWS = {f"layers.*.mixer.in_proj.{part}": third(number) for number, part in enumerate("bcx")}


def _read(hf_config: Any, feed_forwards: Sequence[BlockSpec]) -> DecoderConfig:
    """A decoder with these feed-forwards and mixers by ``layer_types``. Raises CheckpointError for other mixers."""
    kinds = list(hf_config.layer_types)
    require({*kinds} <= {CONV, FULL}, "layer_types", kinds, f"{CONV} and {FULL} are supported")
    require(FULL in kinds, "layer_types", kinds, f"at least one layer must be {FULL}")
    require(not hf_config.conv_bias, "conv_bias", hf_config.conv_bias, "convolutions with biases are not supported")
    hf_config.rms_norm_eps = hf_config.norm_eps
    mixers: dict[str, BlockSpec] = {
        FULL: read_attention(hf_config, qk_norm=True),
        CONV: ShortConvSpec(hf_config.hidden_size, hf_config.conv_L_cache),
    }
    return read_decoder_config(
        hf_config, [LayerSpec(mixers[kind], each) for kind, each in zip(kinds, feed_forwards, strict=True)]
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``block_auto_adjust_ff_dim``: the MLP has two thirds of ``intermediate_size``, times
    ``block_ffn_dim_multiplier``, rounded up to a multiple of ``block_multiple_of``."""
    size = hf_config.intermediate_size
    if hf_config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if hf_config.block_ffn_dim_multiplier is not None:
            multiple = hf_config.block_multiple_of
            size = multiple * -(-int(hf_config.block_ffn_dim_multiplier * size) // multiple)
    return _read(hf_config, [MLPSpec(size)] * hf_config.num_hidden_layers)


def read_moe(hf_config: Any) -> DecoderConfig:
    """Read the config. The first ``num_dense_layers`` layers have an MLP; ``use_expert_bias``: a correction."""
    experts = ExpertsSpec(
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=hf_config.moe_intermediate_size,
        normalize=hf_config.norm_topk_prob,
        scores=RouterScores(correction=hf_config.use_expert_bias, epsilon=1e-6, scale=hf_config.routed_scaling_factor),
    )
    dense, count = hf_config.num_dense_layers, hf_config.num_hidden_layers
    require(0 <= dense <= count, "num_dense_layers", dense, f"it must be 0 to {count} layers")
    return _read(hf_config, [*[MLPSpec(hf_config.intermediate_size)] * dense, *[experts] * (count - dense)])


LFM2 = Family(read, NAMES, rows=ROWS)
LFM2_MOE = Family(read_moe, MOE_NAMES, rows=ROWS)
