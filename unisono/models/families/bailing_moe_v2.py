"""Ling 2.0 and Ring 2.0 (mini, flash, 1T): packed projections, head norms, partial rotary, and GLM-4.5's experts.

The first ``first_k_dense_replace`` layers have an MLP. The router scores by a sigmoid in fp32 and chooses by score plus
a learnt correction, within groups. Source of formulas and names: inclusionAI/Ling-V2, ``modeling_bailing_moe_v2.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, LayerSpec
from unisono.models.config import DecoderConfig, Family, Name, read_attention, read_decoder_config
from unisono.models.families.glm4_moe import EXPERTS, MLP, feed_forwards
from unisono.models.families.llama import NAMES as LLAMA_NAMES
from unisono.models.load.build import require

ATTENTION = "model.layers.*.attention."


def packed(part: int) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of queries, keys or values (part 0, 1, 2) in a tensor of all queries, all keys and all values."""

    def rows(layer: LayerSpec) -> torch.Tensor:
        spec = cast(AttentionSpec, layer.mixer)
        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        first = sum(counts[:part])
        return torch.arange(first * spec.head_dim, (first + counts[part]) * spec.head_dim)

    return rows


def read_experts(hf_config: Any) -> ExpertsSpec:
    """A layer's experts. ``n_group`` 0: they are not grouped. One expert a token has the weight of its score alone.

    Raises CheckpointError for a router of another kind.
    """
    for name, value in (("score_function", "sigmoid"), ("moe_router_enable_expert_bias", True)):
        found = getattr(hf_config, name, None)
        require(found in (None, value), name, found, f"only {value!r} is supported in this architecture")
    size, top_k = hf_config.moe_intermediate_size, hf_config.num_experts_per_tok
    of_shared = getattr(hf_config, "moe_shared_expert_intermediate_size", None) or size
    return ExpertsSpec(
        num_experts=hf_config.num_experts,
        top_k=top_k,
        intermediate_size=size,
        shared_intermediate_size=of_shared * (hf_config.num_shared_experts or 0),
        normalize=top_k > 1,
        activation=hf_config.hidden_act,
        scores=RouterScores(
            correction=True,
            groups=hf_config.n_group or 1,
            top_groups=hf_config.topk_group or 1,
            scale=hf_config.routed_scaling_factor,
        ),
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``use_qkv_bias``: biases of q, k and v; ``use_bias``: of o; ``use_qk_norm``: a norm of each
    query and key head.

    Raises CheckpointError for a ``rotary_dim`` that contradicts ``partial_rotary_factor``.
    """
    biases = {"qkv_bias": hf_config.use_qkv_bias, "o_bias": hf_config.use_bias}
    attention = read_attention(hf_config, qk_norm=hf_config.use_qk_norm, **biases)
    turning, stated = 2 * attention.rotary.planes, getattr(hf_config, "rotary_dim", None)
    require(stated in (None, turning), "rotary_dim", stated, f"partial_rotary_factor makes it {turning}")
    layers = [LayerSpec(attention, each) for each in feed_forwards(hf_config, read_experts(hf_config))]
    return read_decoder_config(hf_config, layers, mtp_modules=hf_config.num_nextn_predict_layers or 0)


NAMES: dict[str, Name] = {
    **LLAMA_NAMES,
    **EXPERTS,
    "embed": "model.word_embeddings",
    **{f"layers.*.mixer.qkv.{name}": f"{ATTENTION}query_key_value" for name in "qkv"},
    "layers.*.mixer.o": f"{ATTENTION}dense",
    "layers.*.mixer.q_norm": f"{ATTENTION}query_layernorm",
    "layers.*.mixer.k_norm": f"{ATTENTION}key_layernorm",
    "layers.*.feed_forward.correction": f"{MLP}gate.expert_bias",
    "mtp.norm": "model.layers.*.final_layernorm",
}

BAILING_MOE_V2 = Family(
    read, NAMES, rows={f"layers.*.mixer.qkv.{name}": packed(part) for part, name in enumerate("qkv")}
)
