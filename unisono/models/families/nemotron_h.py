"""Nemotron-H (Nemotron-3 Nano): layers of one block each, Mamba2, attention without rotation, an MLP or experts.

MLP and experts are ReLU² of one product, without a gate; experts are chosen as DeepSeek-V3's. Source of formulas and
names: transformers, ``models/nemotron_h``.
"""

from __future__ import annotations

from typing import Any

from unisono.kernels.moe.scored_router import RouterScores
from unisono.layers.expert_stacks import RELU2_EXPERTS
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.latent_experts import LatentExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec
from unisono.models.blocks.mamba2 import Mamba2Spec, mamba2_rows
from unisono.models.blocks.one_block import OneBlockSpec
from unisono.models.blocks.plain_mlp import PlainMLPSpec
from unisono.models.config import DecoderConfig, Family, Name, read_decoder_config
from unisono.models.families.granite_hybrid import mamba2_names
from unisono.models.load.build import require

BLOCK = "backbone.layers.*.mixer"
KINDS = "linear_attention", "full_attention", "moe", "mlp"

NAMES: dict[str, Name] = {
    "embed": "backbone.embeddings",
    "layers.*.mixer_norm": "backbone.layers.*.norm",
    **mamba2_names(BLOCK),
    **{f"layers.*.mixer.qkv.{part}": f"{BLOCK}.{part}_proj" for part in "qkv"},
    "layers.*.mixer.o": {AttentionSpec: f"{BLOCK}.o_proj", Mamba2Spec: f"{BLOCK}.out_proj"},
    "layers.*.feed_forward.up": f"{BLOCK}.up_proj",
    "layers.*.feed_forward.down": f"{BLOCK}.down_proj",
    "layers.*.feed_forward.into": f"{BLOCK}.fc1_latent_proj",
    "layers.*.feed_forward.out": f"{BLOCK}.fc2_latent_proj",
    "layers.*.feed_forward.shared.up": f"{BLOCK}.shared_experts.up_proj",
    "layers.*.feed_forward.shared.down": f"{BLOCK}.shared_experts.down_proj",
    "norm": "backbone.norm_f",
    "lm_head": "lm_head",
}
for block in ("feed_forward", "feed_forward.experts"):  # the second one of experts in a latent space
    NAMES |= {
        f"layers.*.{block}.router": f"{BLOCK}.gate",
        f"layers.*.{block}.correction": f"{BLOCK}.gate.e_score_correction_bias",
        f"layers.*.{block}.experts.gate_up": f"{BLOCK}.experts.up_proj",
        f"layers.*.{block}.experts.down": f"{BLOCK}.experts.down_proj",
        f"layers.*.{block}.experts.each.up": f"{BLOCK}.experts.*.up_proj",
        f"layers.*.{block}.experts.each.down": f"{BLOCK}.experts.*.down_proj",
    }


def read_experts(hf_config: Any) -> BlockSpec:
    """Spec of a layer with experts. ``moe_latent_size``: they lie in a latent space, but the shared one does not.

    Raises CheckpointError for values that are not computed.
    """
    latent, shared, bias = hf_config.moe_latent_size, hf_config.n_shared_experts, hf_config.mlp_bias
    require(shared == 1, "n_shared_experts", shared, "one shared expert is supported")
    size, activation = hf_config.moe_shared_expert_intermediate_size, hf_config.mlp_hidden_act
    experts = ExpertsSpec(
        hf_config.n_routed_experts,
        hf_config.num_experts_per_tok,
        hf_config.moe_intermediate_size,
        size if latent is None else 0,
        normalize=hf_config.norm_topk_prob,
        activation=activation,
        kind=RELU2_EXPERTS,
        scores=RouterScores(
            correction=True,
            groups=hf_config.n_group,
            top_groups=hf_config.topk_group,
            scale=float(hf_config.routed_scaling_factor),
        ),
        shared_bias=bias and latent is None,
    )
    if latent is None:
        return experts
    return LatentExpertsSpec(experts, PlainMLPSpec(size, bias, activation), latent, bias)


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. The layers are ``layers_block_type``, or ``hybrid_override_pattern``.

    A step of Mamba2 is at least ``time_step_min``, as in transformers' prompts. Raises CheckpointError naming a value
    of config.json that is not supported.
    """
    kinds = list(hf_config.layers_block_type)
    require({*kinds} <= {*KINDS}, "layers_block_type", kinds, f"{', '.join(KINDS)} are supported")
    require(KINDS[1] in kinds, "layers_block_type", kinds, "at least one layer must attend")
    state, act = hf_config.mamba_ssm_cache_dtype, hf_config.mamba_hidden_act
    require(state == "float32", "mamba_ssm_cache_dtype", state, "the recurrent state is kept in float32")
    require(act == "silu", "mamba_hidden_act", act, "'silu' is supported")
    wide, bias = hf_config.residual_in_fp32, hf_config.mamba_proj_bias
    require(not wide, "residual_in_fp32", wide, "residuals have the dtype of the weights")
    require(bias in (False, hf_config.use_bias), "mamba_proj_bias", bias, "use_bias decides")
    size = hf_config.head_dim

    def layer(kind: str) -> OneBlockSpec:
        if kind == "moe":
            return OneBlockSpec.of(feed_forward=read_experts(hf_config))
        if kind == "mlp":
            mlp = PlainMLPSpec(hf_config.intermediate_size, hf_config.mlp_bias, hf_config.mlp_hidden_act)
            return OneBlockSpec.of(feed_forward=mlp)
        if kind == "full_attention":
            heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
            return OneBlockSpec.of(AttentionSpec(*heads, size, RotarySpec.none(size)))
        return OneBlockSpec.of(_read_mamba2(hf_config))

    layers, modules = [layer(kind) for kind in kinds], hf_config.num_nextn_predict_layers or 0
    eps = hf_config.layer_norm_epsilon
    return read_decoder_config(hf_config, layers, rms_eps=eps, wide_norms=True, mtp_modules=modules)


def _read_mamba2(hf_config: Any) -> Mamba2Spec:
    return Mamba2Spec(
        hf_config.n_groups,
        hf_config.mamba_num_heads,
        hf_config.ssm_state_size,
        hf_config.mamba_head_dim,
        hf_config.conv_kernel,
        hf_config.use_conv_bias,
        hf_config.use_bias,
        (float(hf_config.time_step_min), float("inf")),
    )


NEMOTRON_H = Family(read, NAMES, rows=mamba2_rows("layers.*.mixer"))
