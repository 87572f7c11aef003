"""Tiny configs of the rows of ``config/decoder_table.py``: one or several for each, with every slot of it in use.

Sizes are odd on purpose. A row without a case fails ``test_table.py``.
"""

from __future__ import annotations

from typing import Any

from unisono.config.decoder_table import ROWS

SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "max_position_embeddings": 512,
}
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 0.7}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
GROWTH = {"llama_4_scaling_beta": 0.3}
THIRD = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.34}
SLIDING = {"sliding_window": 19, "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.2, 2.0, 5.0, 9.0],
    "partial_rotary_factor": 0.7,
}

SPARSEMIXER = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 52, "router_jitter_noise": 0.2}
"""A margin that some of random logits lie within."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", {}),
    "apertus-biases": ("ApertusForCausalLM", {"attention_bias": True}),
    "arcee": ("ArceeForCausalLM", {"rope_parameters": YARN}),
    "arcee-biases": ("ArceeForCausalLM", {"mlp_bias": True, "attention_bias": True}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.6}),
    "cohere-head-norms": ("CohereForCausalLM", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 1.5}),
    "cohere2": ("Cohere2ForCausalLM", {**SLIDING, "logit_scale": 0.6}),
    "cwm": ("CwmForCausalLM", {**SLIDING, "head_dim": 20}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 20, "use_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", SLIDING),
    "exaone4-full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "glm": ("GlmForCausalLM", {"head_dim": 24}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 24, "attention_bias": False}),
    "granite": ("GraniteForCausalLM", {**FACTORS, "attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("GraniteMoeForCausalLM", {**FACTORS, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        {**FACTORS, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 60},
    ),
    "granitemoeshared-equal": (
        "GraniteMoeSharedForCausalLM",
        {**FACTORS, "num_local_experts": 4, "num_experts_per_tok": 3, "shared_intermediate_size": 52},
    ),
    "helium": ("HeliumForCausalLM", {"head_dim": 12}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 20, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {
            "head_dim": 20,
            "num_experts": 5,
            "moe_topk": [2, 3, 1, 2],
            "intermediate_size": 52,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "internlm2": ("InternLM2ForCausalLM", {"bias": False}),
    "internlm2-biases": ("InternLM2ForCausalLM", {"bias": True, "num_key_value_heads": 6}),
    "internlm3": ("InternLM3ForCausalLM", {"head_dim": 20, "rope_parameters": YARN}),
    "internlm3-biases": ("InternLM3ForCausalLM", {"head_dim": 20, "qkv_bias": True, "bias": True}),
    "jais2": ("Jais2ForCausalLM", {"head_dim": 12}),
    "ministral": ("MinistralForCausalLM", {**SLIDING, "head_dim": 20}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 20,
            "rope_parameters": {**YARN, **GROWTH, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"head_dim": 20, "model_type": "mistral", "tie_word_embeddings": False, "sliding_window": None},
    ),
    "mistral3-ministral3": (
        "Mistral3ForConditionalGeneration",
        {
            "head_dim": 20,
            "model_type": "ministral3",
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, **GROWTH},
        },
    ),
    "nanochat": ("NanoChatForCausalLM", {"final_logit_softcapping": 4.0}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 24, "mlp_bias": True, "attention_bias": True}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.9}),
    "olmo2": ("Olmo2ForCausalLM", {"attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **SLIDING,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": 2.0},
    ),
    "phi": ("PhiForCausalLM", {"layer_norm_eps": 1e-3, "rope_parameters": THIRD}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 23}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 64, "rope_parameters": LONG, "partial_rotary_factor": 0.7},
    ),
    "phimoe": (
        "PhiMoEForCausalLM",
        {**SPARSEMIXER, "attention_bias": True, "lm_head_bias": True, "sliding_window": 23},
    ),
    "phimoe-longrope": (
        "PhiMoEForCausalLM",
        {
            **SPARSEMIXER,
            "rope_parameters": {
                **{name: value for name, value in LONG.items() if name != "partial_rotary_factor"},
                "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.7],
                "long_factor": [1.2, 2.0, 5.0, 9.0, 9.0, 9.0],
                "original_max_position_embeddings": 64,
                "short_mscale": 0.8,
                "long_mscale": 1.3,
            },
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 20, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 0], "attention_bias": True}),
    "stablelm": (
        "StableLmForCausalLM",
        {
            "use_qkv_bias": True,
            "rope_parameters": THIRD,
        },
    ),
    "stablelm-head-norms": ("StableLmForCausalLM", {"qk_layernorm": True, "rope_parameters": THIRD}),
    "stablelm-parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, "rope_parameters": THIRD}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 19}),
}
"""Name -> (architecture, fields of its text model's config)."""


def fields_of(case: str) -> dict[str, Any]:
    """The config's fields for ``make_checkpoint``."""
    architecture, fields = CASES[case]
    known = {**SIZES, **fields}
    if architecture in ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"):
        known["intermediate_size"] = 52
    return known


def family_of(case: str) -> str:
    """The model type of a case's config."""
    return ROWS[CASES[case][0]].model_types[0]
