"""Qwen3.5 and 3.6 with experts: Qwen3.5's layers, each with a mixture of experts and a gated shared expert.

The chosen experts' weights are always divided by their sum. Checkpoints store the experts fused or one by one. Source
of formulas and names: transformers, ``models/qwen3_5_moe``.
"""

from __future__ import annotations

from typing import Any

from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.config import DecoderConfig, Family, Name, in_language_model
from unisono.models.families.mixtral import names
from unisono.models.families.qwen3_5 import NAMES, UNREAD, read_hybrid
from unisono.models.families.qwen3_vl import TOWER

EXPERTS: dict[str, Name] = {
    **names("mlp", "gate_proj", "up_proj", "down_proj"),
    "layers.*.feed_forward.shared.gate_up.gate": "model.layers.*.mlp.shared_expert.gate_proj",
    "layers.*.feed_forward.shared.gate_up.up": "model.layers.*.mlp.shared_expert.up_proj",
    "layers.*.feed_forward.shared.down": "model.layers.*.mlp.shared_expert.down_proj",
    "layers.*.feed_forward.shared_gate": "model.layers.*.mlp.shared_expert_gate",
}

MOE_NAMES = NAMES | EXPERTS


def read_experts(text: Any, normalize: bool = True) -> ExpertsSpec:
    """A layer's experts and its shared expert, from the text model's config."""
    return ExpertsSpec(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        shared_intermediate_size=text.shared_expert_intermediate_size,
        shared_gate=text.shared_expert_intermediate_size > 0,
        normalize=normalize,
        activation=text.hidden_act,
    )


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. Every layer has experts."""
    text = hf_config.get_text_config()
    return read_hybrid(hf_config, [read_experts(text)] * text.num_hidden_layers)


QWEN3_5_MOE = Family(read, MOE_NAMES, unread=UNREAD)
QWEN3_5_MOE_VISION = Family(read, in_language_model(MOE_NAMES), tower=TOWER)
