"""Granite 4.0 H: Mamba2 in most layers, attention in the others, a shared MLP and experts in each, Granite's factors.

Reads Granite 4.0 without Mamba2 too, whose layers all attend and may rotate. Source of formulas and names:
transformers, ``models/granitemoehybrid``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.config.decoder_names import LLAMA_NAMES, experts
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.mamba2 import Mamba2Spec, mamba2_rows
from unisono.models.config import DecoderConfig, Family, Name, read_decoder_config
from unisono.models.load.build import require

LINEAR, FULL, LAYER = "linear_attention", "full_attention", "model.layers.*."


def mamba2_names(block: str) -> dict[str, Name]:
    """Names of the modules of a Mamba2 mixer, but for ``o``. block: the mixer's name in the checkpoint."""
    return {
        "layers.*.mixer": block,
        **{f"layers.*.mixer.in_proj.{part}": f"{block}.in_proj" for part in ("z", "cbx", "dt")},
        "layers.*.mixer.conv": f"{block}.conv1d",
        "layers.*.mixer.norm": f"{block}.norm",
    }


_GATE_UP = ("feed_forward.gate_up", "feed_forward.shared.gate_up")
NAMES: dict[str, Name] = {
    **LLAMA_NAMES,
    **mamba2_names(f"{LAYER}mamba"),
    "layers.*.mixer.o": {AttentionSpec: f"{LAYER}self_attn.o_proj", Mamba2Spec: f"{LAYER}mamba.out_proj"},
    **experts("block_sparse_moe", "router.layer", "input_linear.weight", "output_linear.weight"),
    **{f"layers.*.{path}.{name}": f"{LAYER}shared_mlp.input_linear" for path in _GATE_UP for name in ("gate", "up")},
    "layers.*.feed_forward.down": f"{LAYER}shared_mlp.output_linear",
    "layers.*.feed_forward.shared.down": f"{LAYER}shared_mlp.output_linear",
}


def half(number: int) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of the shared MLP's gate or of its up (0, 1), which are one tensor."""

    def rows(layer: LayerSpec) -> torch.Tensor:
        block: Any = layer.feed_forward
        size = block.intermediate_size if isinstance(block, MLPSpec) else block.shared_intermediate_size
        return torch.arange(number * size, (number + 1) * size)

    return rows


ROWS = {
    **mamba2_rows("layers.*.mixer"),
    **{f"layers.*.{path}.{name}": half(number) for path in _GATE_UP for number, name in enumerate(("gate", "up"))},
}


def read_mamba2(hf_config: Any) -> Mamba2Spec:
    """Spec of a Mamba2 layer, by the fields of Granite and Bamba. Raises CheckpointError for sizes that disagree."""
    heads, size, inner = hf_config.mamba_n_heads, hf_config.mamba_d_head, hf_config.mamba_expand * hf_config.hidden_size
    require(heads * size == inner, "mamba_d_head", size, f"{heads} heads must have {inner} elements together")
    low, high = getattr(hf_config, "time_step_limit", None) or (0.0, float("inf"))
    return Mamba2Spec(
        hf_config.mamba_n_groups,
        heads,
        hf_config.mamba_d_state,
        size,
        hf_config.mamba_d_conv,
        bool(hf_config.mamba_conv_bias),
        bool(hf_config.mamba_proj_bias),
        (float(low), float(high)),
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``position_embedding_type``: "rope" rotates. Without experts a layer has the shared MLP."""
    kinds, heads = list(hf_config.layers_block_type), hf_config.num_attention_heads
    require({*kinds} <= {LINEAR, FULL}, "layer_types", kinds, "mamba and attention are supported")
    require(FULL in kinds, "layer_types", kinds, "at least one layer must attend")
    size, kind, bias = hf_config.hidden_size // heads, hf_config.position_embedding_type, hf_config.attention_bias
    require(kind in (None, "nope", "rope"), "position_embedding_type", kind, "'nope' and 'rope' are supported")
    rotary = RotarySpec.of(hf_config, size) if kind == "rope" else RotarySpec.none(size)
    attention = AttentionSpec(
        heads, hf_config.num_key_value_heads, size, rotary, scale=float(hf_config.attention_multiplier),
        qkv_bias=bias, o_bias=bias,
    )  # fmt: skip
    count, shared = hf_config.num_local_experts, hf_config.shared_intermediate_size
    mlp: BlockSpec = MLPSpec(shared)
    if count:
        mlp = ExpertsSpec(count, hf_config.num_experts_per_tok, hf_config.intermediate_size, shared)
    logits = hf_config.logits_scaling
    require(bool(logits), "logits_scaling", logits, "it must not be 0")
    mixers: dict[str, BlockSpec] = {FULL: attention}
    if LINEAR in kinds:
        mixers[LINEAR] = read_mamba2(hf_config)
    times = float(hf_config.residual_multiplier)
    return read_decoder_config(
        hf_config,
        [LayerSpec(mixers[each], mlp, times=times) for each in kinds],
        embed_scale=float(hf_config.embedding_multiplier),
        logit_scale=1.0 / logits,
    )


GRANITE_HYBRID = Family(read, NAMES, rows=ROWS)
