"""DeepSeek-V2 (and Lite): DeepSeek-V3's latent attention, and experts by softmax whose weights are not normalised.

``topk_method`` "group_limited_greedy" chooses within the groups of the best single experts. Source of formulas and
names: transformers, ``models/deepseek_v2``.
"""

from __future__ import annotations

from typing import Any

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config
from unisono.models.families.deepseek_v3 import NAMES, read_latent
from unisono.models.families.glm4_moe import feed_forwards
from unisono.models.load.build import require

GREEDY, GROUPED = "greedy", "group_limited_greedy"


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. Raises CheckpointError for another choice of experts."""
    method = hf_config.topk_method
    require(method in (GREEDY, GROUPED), "topk_method", method, f"{GREEDY} and {GROUPED} are supported")
    groups = (hf_config.n_group or 1, hf_config.topk_group or 1) if method == GROUPED else (1, 1)
    size = hf_config.moe_intermediate_size
    experts = ExpertsSpec(
        num_experts=hf_config.n_routed_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=size,
        shared_intermediate_size=size * (hf_config.n_shared_experts or 0),
        normalize=False,
        activation=hf_config.hidden_act,
        scores=RouterScores(
            sigmoid=False,
            groups=groups[0],
            top_groups=groups[1],
            group_best=1,
            scale=hf_config.routed_scaling_factor,
        ),
    )
    attention = read_latent(hf_config)
    layers = [LayerSpec(attention, each) for each in feed_forwards(hf_config, experts)]
    return read_decoder_config(hf_config, layers)


DEEPSEEK_V2 = Family(read, NAMES)
