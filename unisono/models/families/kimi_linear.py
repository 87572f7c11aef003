"""Kimi Linear (Kimi-Linear-48B-A3B): Kimi Delta Attention in most layers, latent attention without rotation in others.

Experts are chosen by a sigmoid with a correction, as DeepSeek-V3's; the first layers have an MLP. Source of formulas
and names: transformers, ``models/kimi_linear``.
"""

from __future__ import annotations

from typing import Any

from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.kimi_delta import PARTS, KimiDeltaSpec
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.layers import BlockSpec, LayerSpec
from unisono.models.config import DecoderConfig, Family, Name, read_decoder_config, read_mlp
from unisono.models.families.deepseek_v3 import NAMES as LATENT_NAMES
from unisono.models.families.glm4_moe import sigmoid_experts
from unisono.models.families.mixtral import names
from unisono.models.load.build import require

LINEAR, FULL = "linear_attention", "full_attention"
MIXER, EXPERTS = "model.layers.*.self_attn.", "model.layers.*.block_sparse_moe."

NAMES: dict[str, Name] = {
    **LATENT_NAMES,
    **{f"layers.*.mixer.in_proj.{part}": f"{MIXER}{part}_proj" for part in (*PARTS, "f_a", "g_a", "b")},
    **{f"layers.*.mixer.gates.{part}": f"{MIXER}{part}_proj" for part in ("f_a", "g_a", "b")},
    **{f"layers.*.mixer.{part}": f"{MIXER}{part}_proj" for part in ("f_b", "g_b")},
    **{f"layers.*.mixer.conv.{part}": f"{MIXER}{part}_conv1d" for part in PARTS},
    "layers.*.mixer.decay": MIXER.removesuffix("."),
    "layers.*.mixer.norm": f"{MIXER}o_norm",
    **names("block_sparse_moe", "w1", "w3", "w2"),
    "layers.*.feed_forward.correction": f"{EXPERTS}gate.e_score_correction_bias",
    "layers.*.feed_forward.shared.gate_up.gate": f"{EXPERTS}shared_experts.gate_proj",
    "layers.*.feed_forward.shared.gate_up.up": f"{EXPERTS}shared_experts.up_proj",
    "layers.*.feed_forward.shared.down": f"{EXPERTS}shared_experts.down_proj",
}

NEUTRAL = {
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "routed_expert_hidden_size": None,
}
"""Fields of config.json -> the value that is computed."""

NEUTRAL_LINEAR = {"gate_lower_bound": None, "use_full_rank_gate": False}
"""The same in ``linear_attn_config``."""


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``linear_attn_config``: the recurrent layers; ``moe_renormalize``: divide the chosen experts'
    weights by their sum.

    Raises CheckpointError for Kimi K3's fields, which change the computation.
    """
    for name, value in NEUTRAL.items():
        found = getattr(hf_config, name, None)
        require(found in (None, value), name, found, f"only {value!r} is supported in this architecture")
    for name, value in NEUTRAL_LINEAR.items():
        found = (getattr(hf_config, "linear_attn_config", None) or {}).get(name)
        require(found in (None, value), f"linear_attn_config.{name}", found, f"only {value!r} is supported")
    kinds, feeds = list(hf_config.layer_types), list(hf_config.mlp_layer_types)
    require({*kinds} <= {LINEAR, FULL}, "layer_types", kinds, f"{LINEAR} and {FULL} are supported")
    require(FULL in kinds, "layer_types", kinds, f"at least one layer must be {FULL}")
    require({*feeds} <= {"dense", "sparse"}, "mlp_layer_types", feeds, "dense and sparse are supported")
    experts = sigmoid_experts(hf_config, hf_config.num_local_experts)
    feed_forwards: dict[str, BlockSpec] = {"dense": read_mlp(hf_config), "sparse": experts}
    mixers: dict[str, BlockSpec] = {FULL: read_latent(hf_config)}
    if LINEAR in kinds:
        mixers[LINEAR] = KimiDeltaSpec(
            hf_config.linear_num_heads, hf_config.linear_head_dim, hf_config.linear_conv_kernel_dim
        )
    layers = [LayerSpec(mixers[kind], feed_forwards[feed]) for kind, feed in zip(kinds, feeds, strict=True)]
    return read_decoder_config(hf_config, layers)


def read_latent(hf_config: Any) -> LatentSpec:
    """A layer's latent attention. No part of a head rotates; ``qk_rope_head_dim`` elements of a key are shared."""
    nope, shared = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim
    return LatentSpec(
        num_heads=hf_config.num_attention_heads,
        latent_dim=hf_config.kv_lora_rank,
        nope_dim=nope,
        rope_dim=shared,
        value_dim=hf_config.v_head_dim,
        rotary=RotarySpec.none(shared),
        scale=(nope + shared) ** -0.5,
        query_rank=hf_config.q_lora_rank or 0,
        interleaved=False,
        bias=hf_config.attention_bias,
    )


KIMI_LINEAR = Family(read, NAMES)
