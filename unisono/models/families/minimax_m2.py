"""MiniMax-M2, M2.1 and M2.5: Mixtral's tensors, norms over all query and all key heads, a sigmoid router.

Source of formulas and names: transformers, ``models/minimax_m2``.
"""

from __future__ import annotations

from typing import Any

from unisono.kernels.moe.scored_router import RouterScores
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config
from unisono.models.families.mixtral import names
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load.build import require


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``rotary_dim`` of older files is the rotated part of a head.

    Raises CheckpointError for layers of another kind of attention and for another router.
    """
    kinds = getattr(hf_config, "attn_type_list", None) or [1]
    require(set(kinds) == {1}, "attn_type_list", kinds, "only 1, softmax attention, is supported")
    for name, value in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer"),
                        ("use_routing_bias", True)):  # fmt: skip
        found = getattr(hf_config, name, None)
        require(found in (None, value), name, found, f"only {value!r} is supported in this architecture")
    experts = ExpertsSpec(
        num_experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=hf_config.intermediate_size,
        activation=hf_config.hidden_act,
        scores=RouterScores(correction=True),
    )
    layer = LayerSpec(read_attention(hf_config, joint_qk_norm=True), experts)
    return read_decoder_config(hf_config, [layer] * hf_config.num_hidden_layers)


MINIMAX_M2 = Family(
    read,
    {
        **QWEN3.names,
        **names("block_sparse_moe", "w1", "w3", "w2"),
        "layers.*.feed_forward.correction": "model.layers.*.block_sparse_moe.e_score_correction_bias",
    },
)
