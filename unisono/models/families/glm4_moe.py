"""GLM-4.5, 4.6 and 4.7 (and Air): Llama's attention with partial rotary, and DeepSeek-V3's experts.

The first ``first_k_dense_replace`` layers have an MLP. The router scores by a sigmoid, chooses by score plus a learnt
correction, and every token uses the shared experts, stored as one. Dots1 and the families with latent attention read
their experts here. Source of formulas and names: transformers, ``models/glm4_moe``.
"""

from __future__ import annotations

from typing import Any

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import BlockSpec, LayerSpec
from unisono.models.config import DecoderConfig, Family, Name, read_attention, read_decoder_config, read_mlp
from unisono.models.families.mixtral import names
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load.build import require

MLP = "model.layers.*.mlp."

EXPERTS: dict[str, Name] = {
    **names("mlp", "gate_proj", "up_proj", "down_proj"),
    "layers.*.feed_forward.correction": f"{MLP}gate.e_score_correction_bias",
    "layers.*.feed_forward.shared.gate_up.gate": f"{MLP}shared_experts.gate_proj",
    "layers.*.feed_forward.shared.gate_up.up": f"{MLP}shared_experts.up_proj",
    "layers.*.feed_forward.shared.down": f"{MLP}shared_experts.down_proj",
}
"""Names of experts in checkpoints of DeepSeek's kind."""


def read_experts(hf_config: Any) -> ExpertsSpec:
    """A layer's experts. ``norm_topk_prob``: divide the chosen experts' weights by their sum.

    Raises CheckpointError for a router of another kind.
    """
    scoring, method = getattr(hf_config, "scoring_func", None), getattr(hf_config, "topk_method", None)
    sigmoid = scoring in (None, "sigmoid", "noaux_tc")  # dots.llm1's config.json has the method's name there
    require(sigmoid, "scoring_func", scoring, "only 'sigmoid' is supported in this architecture")
    require(method in (None, "noaux_tc"), "topk_method", method, "only 'noaux_tc' is supported in this architecture")
    return sigmoid_experts(hf_config, hf_config.n_routed_experts)


def sigmoid_experts(hf_config: Any, num_experts: int) -> ExpertsSpec:
    """Experts by a sigmoid with a correction, within groups, and shared experts beside them."""
    size = hf_config.moe_intermediate_size
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=size,
        shared_intermediate_size=size * (hf_config.n_shared_experts or 0),
        normalize=hf_config.norm_topk_prob,
        activation=hf_config.hidden_act,
        scores=RouterScores(
            sigmoid=True,
            correction=True,
            groups=hf_config.n_group or 1,
            top_groups=hf_config.topk_group or 1,
            scale=hf_config.routed_scaling_factor,
        ),
    )


def feed_forwards(hf_config: Any, experts: ExpertsSpec) -> list[BlockSpec]:
    """The feed-forward of each layer: an MLP in the first ``first_k_dense_replace`` layers, then the experts."""
    count, dense = hf_config.num_hidden_layers, hf_config.first_k_dense_replace or 0
    require(0 <= dense <= count, "first_k_dense_replace", dense, f"it must be 0 to {count} layers")
    return [*[read_mlp(hf_config)] * dense, *[experts] * (count - dense)]


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k and v; ``use_qk_norm``: a norm of each query and key head."""
    attention = read_attention(hf_config, qkv_bias=hf_config.attention_bias, qk_norm=hf_config.use_qk_norm)
    layers = [LayerSpec(attention, each) for each in feed_forwards(hf_config, read_experts(hf_config))]
    return read_decoder_config(hf_config, layers, mtp_modules=hf_config.num_nextn_predict_layers or 0)


GLM4_MOE = Family(read, {**QWEN3.names, **EXPERTS})
