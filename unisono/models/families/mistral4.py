"""Mistral 4 (Mistral Small 4), text: DeepSeek's latent attention with queries that grow, and experts by softmax.

Source of formulas and names: transformers, ``models/mistral4``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_decoder_config
from unisono.models.families.deepseek_v3 import NAMES, read_latent
from unisono.models.families.glm4_moe import feed_forwards, read_experts


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``llama_4_scaling_beta``: growth of queries with each ``original_max_position_embeddings``.

    All of ``qk_rope_head_dim`` rotates; ``partial_rotary_factor`` is its share of a whole head.
    """
    parameters = {**hf_config.rope_parameters, "partial_rotary_factor": 1.0}
    beta, growth = parameters.pop("llama_4_scaling_beta", None), None
    if beta:
        growth = float(beta), int(parameters["original_max_position_embeddings"]), 0
    attention = replace(read_latent(hf_config, parameters), query_growth=growth)
    experts: ExpertsSpec = read_experts(hf_config)
    assert experts.scores is not None
    scores: RouterScores = replace(experts.scores, sigmoid=False, correction=False)
    layers = [LayerSpec(attention, each) for each in feed_forwards(hf_config, replace(experts, scores=scores))]
    return read_decoder_config(hf_config, layers)


PICTURES = "the tower of a Mistral 4 is not supported yet: pictures are refused"
TOWER = "vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."

MISTRAL4 = Family(read, NAMES)
MISTRAL_LARGE3 = replace(MISTRAL4, unread=dict.fromkeys(TOWER, PICTURES))
"""Mistral Large 3 and Mistral Small 4 in Mistral's own form (``config/mistral.py``)."""
