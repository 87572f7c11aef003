"""Random small checkpoints of every family, written by transformers as a hub's are.

Sizes are odd on purpose: heads that are no power of two, a vocabulary that is prime. Weights are scaled so
that logits spread over a few units, and biases and norms matter (transformers starts them at 0 and 1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from tests.models.quantised_writers import experts_in_mxfp4

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, BOS, END = 256, 257, 258
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = 261, 262, 263, 264
"""Special tokens of families with a tower, after the others."""
SEEING_VOCABULARY = 269

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

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


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    tower: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` into ``directory`` and return it.

    family: one of FAMILIES, HYBRIDS or SEEING, or another model type.
    overrides: fields of the family's transformers config, of its text model where it has several. tower: fields of its
    vision_config. max_shard_size: e.g. ``"100KB"`` makes an index and several shards. ``mxfp4`` among the fields: the
    experts are stored so. tokenizer: also save a byte-level
    one with a chat template (ids 0-255 are bytes).
    """
    fields = {**COMMON, **(FAMILIES | HYBRIDS | SEEING).get(family, {}), **overrides}
    mxfp4 = fields.pop("mxfp4", False)
    if family in TOWERS:
        fields = {**fields, "vocab_size": overrides.get("vocab_size", SEEING_VOCABULARY)}
        config = AutoConfig.for_model(
            family,
            text_config=fields,
            vision_config={**TOWERS[family], "out_hidden_size": fields["hidden_size"], **(tower or {})},
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    elif family == "mistral3":
        tied = fields["tie_word_embeddings"]
        config = AutoConfig.for_model(family, text_config=fields, vision_config=PIXTRAL, tie_word_embeddings=tied)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    else:
        config = AutoConfig.for_model(family, **fields)
        kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM  # as transformers lists it
        model = kind.from_config(config, dtype=dtype)
    randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if family in OTHER_CLASSES:
        written = json.loads((Path(directory) / "config.json").read_text())
        (Path(directory) / "config.json").write_text(json.dumps({**written, "architectures": [OTHER_CLASSES[family]]}))
    if family == "kimi_linear":
        _mlps_by_their_name(Path(directory))
    if mxfp4:
        experts_in_mxfp4(Path(directory))
    if tokenizer:
        make_tokenizer(SPECIAL + VISION if family in TOWERS else SPECIAL).save_pretrained(directory)
    return Path(directory)


def _mlps_by_their_name(directory: Path) -> None:
    """Name the MLPs of a Kimi Linear as the hub does: transformers 5.24 writes them under the name of the experts."""
    for file in directory.glob("*.safetensors"):
        tensors = {
            re.sub(r"block_sparse_moe\.(gate|up|down)_proj\.", r"mlp.\1_proj.", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})


def make_tokenizer(special: tuple[str, ...] = SPECIAL) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte and the special tokens, SPECIAL first: encodes any text, needs no training."""
    bytes_to_ids = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_to_ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))  # before the wrapper does, so that they get 256, 257, … in order
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(special[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


BUFFERS = ("layer_scalar", "e_score_correction_bias", "expert_bias")
"""Buffers that are weights, by the ends of their names."""


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight, so that logits spread over a few units."""
    generator = torch.Generator().manual_seed(seed)
    buffers = ((name, each) for name, each in model.named_buffers() if name.endswith(BUFFERS))
    for name, parameter in (*model.named_parameters(), *buffers):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and parameter.dim() == 1:
            value = parameter.mean() + 0.2 * noise  # transformers starts norms at 1, zero-centred ones at 0
        elif name.endswith(("_proj_bias", "sinks", "router.bias")):
            value = 0.5 * noise
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            value = 1 + 0.2 * noise
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            value = 0.1 * noise
        elif name.endswith("A_log"):
            value = noise - 2.5  # states that remember tens of tokens
        elif parameter.dim() == 1:
            value = 0.3 * noise
        else:
            value = 1.5 * noise / parameter.shape[-1] ** 0.5
        parameter.copy_(value)
