"""Fields of the configs of small checkpoints, by model type.

Sizes are odd on purpose: heads that are no power of two, a vocabulary that is prime.
"""

from __future__ import annotations

from typing import Any

PAD, BOS, END = 256, 257, 258

COMMON: dict[str, Any] = {
    "vocab_size": 263,
    "num_hidden_layers": 3,
    "intermediate_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": END,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 90,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 19,
    },
    "mixtral": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 19,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 19,
        "query_pre_attn_scalar": 31,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 19,
        "query_pre_attn_scalar": 31,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4_text": {
        "hidden_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "global_head_dim": 40,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 19,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 4.0,
    },
    "gemma4_unified_text": {
        "hidden_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "global_head_dim": 40,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "final_logit_softcapping": 4.0,
    },
    "gpt_oss": {
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 19,
        "mxfp4": True,
        "swiglu_limit": 1.5,  # so that it clamps what random weights give
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 15000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1},
    "qwen3": {
        "hidden_size": 84,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "head_dim": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe": {
        "hidden_size": 84,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "head_dim": 40,
        "num_experts": 11,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 52,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_experts": 11,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 52,
        "shared_expert_intermediate_size": 60,
    },
    "glm4_moe": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 44,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "dots1": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 44,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "max_window_layers": 2,
        "sliding_window": 19,
    },
    "ernie4_5_moe": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "moe_num_experts": 11,
        "moe_k": 3,
        "moe_intermediate_size": 44,
        "moe_num_shared_experts": 2,
    },
    "minimax_m2": {
        "hidden_size": 72,
        "intermediate_size": 44,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}

FAMILIES["bailing_moe"] = {
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 44,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
FAMILIES["minicpm"] = {
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "scale_emb": 3,
    "scale_depth": 1.1,
    "dim_model_base": 48,
    "tie_word_embeddings": False,
}
"""Families whose oracle is ``plain_decoder.py``."""

_LATENT: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 36,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
}
FAMILIES["glm4_moe_lite"] = {**_LATENT, "num_nextn_predict_layers": 0}
FAMILIES["deepseek_v3"] = {
    **_LATENT,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
}
FAMILIES["deepseek_v2"] = {
    **_LATENT,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 4.0,
}
FAMILIES["mistral4"] = {
    **_LATENT,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        **FAMILIES["deepseek_v3"]["rope_parameters"],
        "llama_4_scaling_beta": 0.4,
        "partial_rotary_factor": 8 / 28,  # of a whole head
    },
}
FAMILIES["minicpm3"] = {
    **{name: size for name, size in _LATENT.items() if name in ("hidden_size", "kv_lora_rank", "q_lora_rank")},
    **{name: size for name, size in _LATENT.items() if "heads" in name or "head_dim" in name},
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "scale_emb": 3,
    "scale_depth": 1.1,
    "dim_model_base": 48,
    "tie_word_embeddings": False,
}
"""Families with latent attention."""
FAMILIES["llama4_text"] = {
    "hidden_size": 72,
    "intermediate_size": 44,
    "intermediate_size_mlp": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 300,
    "floor_scale": 16,
    "attn_scale": 0.4,
}
"""Layers with rotation in chunks, layers without; experts in every second one; queries that grow early."""

GEMMA4_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "use_double_wide_mlp": True,
}
"""Fields of a Gemma 4 whose last layers read the keys of earlier ones."""
GEMMA4_INPUTS: dict[str, Any] = {
    **GEMMA4_SHARED,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 28,
    "vocab_size_per_layer_input": 263,
}
"""Fields of a Gemma 4 with inputs of every layer, as E2B and E4B have them."""
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 11,
    "top_k_experts": 3,
    "moe_intermediate_size": 44,
}
"""Fields of a Gemma 4 with experts, as 26B-A4B has them."""

_HYBRID: dict[str, Any] = {
    "hidden_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_HYBRID, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
    "qwen3_5_moe_text": {**_HYBRID, **_EXPERTS, "full_attention_interval": 2},
    "qwen3_next": {**_HYBRID, **_EXPERTS, "full_attention_interval": 2},
}
HYBRIDS["qwen3_5_text"]["num_hidden_layers"] = 6
_SHORT: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
HYBRIDS["lfm2"] = {**_SHORT, "block_multiple_of": 8}
HYBRIDS["lfm2_moe"] = {
    **_SHORT,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.5,
}
_MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
HYBRIDS["bamba"] = {
    **{name: value for name, value in _MAMBA2.items() if name != "layer_types"},
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
}
HYBRIDS["granitemoehybrid"] = {
    **_MAMBA2,
    "intermediate_size": 44,
    "shared_intermediate_size": 60,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
HYBRIDS["nemotron_h"] = {
    "hidden_size": 72,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "time_step_min": 0.01,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "moe_shared_expert_intermediate_size": 60,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
HYBRIDS["kimi_linear"] = {
    **{name: size for name, size in _LATENT.items() if name not in ("n_routed_experts", "q_lora_rank")},
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_experts": 12,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
HYBRIDS["qwen3_5"], HYBRIDS["qwen3_5_moe"] = HYBRIDS["qwen3_5_text"], HYBRIDS["qwen3_5_moe_text"]
"""Families with Gated DeltaNet layers. Those without ``_text`` have a vision tower beside the text model."""

SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    },
    "qwen3_vl": {
        "hidden_size": 84,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 4, 3]},
    },
}
SEEING["qwen2_vl"] = SEEING["qwen2_5_vl"]
SEEING["qwen3_vl_moe"] = {
    **SEEING["qwen3_vl"],
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 52,
}
"""Text models of families with a vision tower, beside those of HYBRIDS."""

_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 25,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **{name: size for name, size in _TOWER.items() if name != "num_position_embeddings"},
        "window_size": 24,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {
        **{name: size for name, size in _TOWER.items() if name in ("depth", "num_heads", "patch_size")},
        "embed_dim": 72,
        "hidden_size": SEEING["qwen2_vl"]["hidden_size"],
        "mlp_ratio": 2,
    },
    "qwen3_vl": {**_TOWER, "deepstack_visual_indexes": [0, 2]},
    "qwen3_vl_moe": {**_TOWER, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5": _TOWER,
    "qwen3_5_moe": _TOWER,
}
"""Towers: heads of 24, patches of 4 x 4 pixels, windows of 3 x 3 tokens."""
OTHER_CLASSES = {"internlm3": "InternLM3ForCausalLM", "phimoe": "PhiMoEForCausalLM"}
"""Model types that transformers computes by a class of another name -> the architecture of their checkpoints."""
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
"""A tower that no test reads."""
