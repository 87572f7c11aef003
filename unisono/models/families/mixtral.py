"""Mixtral (8x7B, 8x22B): Mistral's attention, and experts in place of the MLP.

The hub's checkpoints store experts one by one (w1 gate, w3 up, w2 down); fused tensors are accepted too.
"""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config
from unisono.models.families.llama import NAMES


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. A null ``sliding_window`` is full attention."""
    experts = ExpertsSpec(
        num_experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=hf_config.intermediate_size,
        activation=hf_config.hidden_act,
    )
    layer = LayerSpec(read_attention(hf_config, window=hf_config.sliding_window or 0), experts)
    return read_decoder_config(hf_config, [layer] * hf_config.num_hidden_layers)


def names(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Checkpoint names of a layer's router and experts, from the name of their block and of the projections."""
    block = f"model.layers.*.{block}"
    return {
        "layers.*.feed_forward.router": f"{block}.gate",
        "layers.*.feed_forward.experts.gate_up": f"{block}.experts.gate_up_proj",
        "layers.*.feed_forward.experts.down": f"{block}.experts.down_proj",
        "layers.*.feed_forward.experts.each.gate": f"{block}.experts.*.{gate}",
        "layers.*.feed_forward.experts.each.up": f"{block}.experts.*.{up}",
        "layers.*.feed_forward.experts.each.down": f"{block}.experts.*.{down}",
    }


MIXTRAL = Family(read, {**NAMES, **names("block_sparse_moe", "w1", "w3", "w2")})
