"""gpt-oss (20b, 120b): attention with sinks, a window in every second layer, and experts with biases.

Experts have a clamped SwiGLU. Their tensors are fused: plain ones are [E, inputs, outputs], MXFP4's [E, outputs, inputs
/ 32, 16]; both alternate the outputs of gate and up. Source of formulas and names: transformers, ``models/gpt_oss`` and
``integrations/mxfp4.py``.
"""

from __future__ import annotations

from typing import Any

from unisono.kernels.norm.activation import ExpertGate
from unisono.layers.expert_stacks import ExpertKind
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import (
    DecoderConfig,
    Family,
    Name,
    read_attention,
    read_decoder_config,
    windows_by_layer_type,
)
from unisono.models.families.llama import NAMES as LLAMA_NAMES

NAMES: dict[str, Name] = {
    **{ours: theirs for ours, theirs in LLAMA_NAMES.items() if ".feed_forward." not in ours},
    "layers.*.mixer": "model.layers.*.self_attn",
    "layers.*.feed_forward.router": "model.layers.*.mlp.router",
    "layers.*.feed_forward.experts.gate_up": "model.layers.*.mlp.experts.gate_up_proj",
    "layers.*.feed_forward.experts.down": "model.layers.*.mlp.experts.down_proj",
}


SWIGLU_ALPHA = 1.702
"""Default slope of the sigmoid in the experts' gate, if config.json does not set it."""


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``attention_bias``: biases of q, k, v and o; ``layer_types``: sliding layers."""
    alpha = getattr(hf_config, "swiglu_alpha", SWIGLU_ALPHA)  # not a field of transformers 5.17's config
    gate = ExpertGate(alpha, hf_config.swiglu_limit)
    experts = ExpertsSpec(
        num_experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate_size=hf_config.intermediate_size,
        activation=hf_config.hidden_act,
        kind=ExpertKind(gate, bias=True, interleaved=True, transposed=True),
        router_bias=True,
    )
    biases = {"qkv_bias": hf_config.attention_bias, "o_bias": hf_config.attention_bias}
    layers = [
        LayerSpec(read_attention(hf_config, window=window, sink=True, **biases), experts)
        for window in windows_by_layer_type(hf_config)
    ]
    return read_decoder_config(hf_config, layers)


GPT_OSS = Family(read, NAMES)
