"""Fields of config.json that change what a model computes, and the check that its family computes them.

A checkpoint of another model that is renamed to a supported architecture loads without a missing tensor and writes
garbage, because the difference is in fields alone (Granite's multipliers, SmolLM3's layers without rotary embeddings).
So ``model_type`` is compared with the architecture, and every field of :data:`FORMULA` must have a value that changes
nothing, unless the family reads it (``families.Facts.takes``). Names are those of transformers' configuration classes
and of checkpoints with code of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unisono.config.preflight.families import ANY, ARCHITECTURES, Facts
from unisono.types import CheckpointError

Neutral = Callable[[Any, Mapping[str, Any]], bool]
"""A predicate: True if a value changes nothing. Arguments: the value and the text model's config."""

OPEN_MODEL = "a checkpoint of another model cannot be renamed to it"


def check_model_type(architecture: str, raw: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError unless ``model_type`` is one of the architecture's.

    raw: config.json. where: the file, for the message.
    """
    facts = ARCHITECTURES.get(architecture)
    if facts is None:
        return
    text = raw.get("text_config")
    for name, found, known in (
        ("model_type", raw.get("model_type"), facts.model_types),
        ("text_config.model_type", text.get("model_type") if isinstance(text, Mapping) else None, facts.text_types),
    ):
        if found in known or (found is None and name != "model_type"):
            continue
        those = " or ".join(map(repr, known))
        if not known:
            raise CheckpointError(f"{where}: a {architecture} has no text_config; {OPEN_MODEL}.")
        if found is None:
            raise CheckpointError(f"{where} has no {name}; that of {architecture} is {those}: download it again.")
        raise CheckpointError(
            f"{where}: {name}={found!r} does not belong to architectures=['{architecture}'], whose {name} is {those}: "
            f"{OPEN_MODEL}."
        )


def check_formula(architecture: str, raw: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError for the first field that changes the model's formula and that its family does not read.

    raw: config.json of a model or a draft head. where: the file, for the message.
    """
    facts = ARCHITECTURES.get(architecture)
    if facts is None:
        return
    text = raw.get("text_config")
    config = {**raw, **text} if isinstance(text, Mapping) else raw
    for name, neutral in FORMULA.items():
        value, taken = config.get(name), facts.takes.get(name)
        if value is None or taken is ANY or (taken is not None and value in taken):
            continue
        if not neutral(value, config):
            raise CheckpointError(_refusal(where, name, value, architecture))
    if not facts.experts:
        for name in EXPERTS:
            if isinstance(config.get(name), int) and config[name] > 1:
                raise CheckpointError(_refusal(where, name, config[name], architecture))
    _check_windows(facts, config, architecture, where)
    _check_rope(facts, config, architecture, where)
    _check_norms(facts, config, architecture, where)


def _refusal(where: object, name: str, value: Any, architecture: str) -> str:
    return (
        f"{where}: {name}={_shown(value)} changes what the model computes, and {architecture} is computed without it: "
        "this checkpoint belongs to another architecture, or its config.json was changed."
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


# ---- values that change nothing ---------------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one(value: Any, config: Mapping[str, Any]) -> bool:
    """True for a factor of 1, or a list of them."""
    return all(one(each, config) for each in value) if isinstance(value, list) else _number(value) and value == 1


def off(value: Any, config: Mapping[str, Any]) -> bool:
    """True for False, 0 or an empty list."""
    return not value


def on(value: Any, config: Mapping[str, Any]) -> bool:
    """True for True or 1."""
    return value is True or value == 1


def among(*values: Any) -> Neutral:
    """A predicate: the value is one of ``values``, ignoring case."""
    return lambda value, config: (value.lower() if isinstance(value, str) else value) in values


def every(*values: Any) -> Neutral:
    """A predicate: the value is a list with only ``values`` in it."""
    return lambda value, config: isinstance(value, list) and all(each in values for each in value)


def same_as(field: str) -> Neutral:
    """A predicate: the value equals another field of the config."""
    return lambda value, config: value == config.get(field)


def head_dim(config: Mapping[str, Any]) -> float:
    """Elements of a head; NaN if the config does not state it."""
    found = config.get("head_dim")
    if found is None:
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        found = width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else math.nan
    return float(found) if _number(found) else math.nan


def _of_head(expected: Callable[[float], float]) -> Neutral:
    """A predicate: the value follows from the size of a head."""

    def neutral(value: Any, config: Mapping[str, Any]) -> bool:
        size = head_dim(config)
        return _number(value) and size > 0 and math.isclose(value, expected(size), rel_tol=1e-6)

    return neutral


def _no_layer_without_rope(value: Any, config: Mapping[str, Any]) -> bool:
    """True if every layer rotates: a list of ones (transformers' lists have 0 for a layer that does not)."""
    return isinstance(value, list) and all(each == 1 for each in value)


def _interval_without_rope(value: Any, config: Mapping[str, Any]) -> bool:
    """True if the interval leaves no layer without rotation, or ``no_rope_layers`` is present and decides."""
    return not value or _no_layer_without_rope(config.get("no_rope_layers") or None, config)


def _depth(value: Any, config: Mapping[str, Any]) -> bool:
    """True if the value is sqrt(layers): MiniCPM scales a block's result by scale_depth / sqrt(layers)."""
    layers = config.get("num_hidden_layers")
    return _number(value) and isinstance(layers, int) and math.isclose(value, math.sqrt(max(layers, 0)), rel_tol=1e-6)


_FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "attention_output_multiplier", "attention_value_scale",
    "embedding_multiplier", "embedding_multiplier_scale", "embedding_scale", "key_multiplier", "lm_head_multiplier",
    "logit_scale", "logits_mup_width_multiplier", "logits_scaling", "mlp_multipliers", "moe_routed_scaling_factor",
    "mup_scale", "output_multiplier_scale", "residual_multiplier", "rope_ratio", "route_scale",
    "routed_scaling_factor", "router_scaling_factor", "scale_emb", "scale_width", "ssm_multipliers",
    "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor", "linear_attn_beta_factor",
    "mlp_alpha_factor", "mlp_beta_factor", "loop_num_passes", "n_recurrent_loops", "num_loops", "total_ut_steps",
    "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period", "n_group",
    "topk_group", "num_expert_group", "hc_mult", "decoder_sparse_step", "cla_share_factor",
)  # fmt: skip
"""Neutral at 1."""

_SWITCHES = (
    "alibi", "add_bias_linear", "attn_config", "ffn_config", "mamba_d_ssm", "mamba_d_state", "mamba_expand",
    "ssm_state_size", "conv_L_cache", "state_size", "add_qkv_bias", "altup_num_inputs",
    "apply_residual_connection_post_layernorm", "apply_router_weight_on_input", "attention_bias", "attention_k_eq_v",
    "attention_out_bias", "attn_logit_softcap", "attn_logit_softcapping", "attn_output_gate",
    "attn_temperature_tuning", "chain_hidden_post_norm", "clamp_kqv", "clip_kqv", "clip_qkv", "enable_moe_block",
    "final_logit_softcap", "final_logit_softcapping", "first_k_dense_replace", "gate_soft_cap", "gating",
    "hidden_size_per_layer_input", "interleaved_rope", "is_encoder_decoder", "is_hybrid", "kv_lora_rank",
    "lambda_std_dev", "laurel_rank", "layer_rope_theta", "linear_num_heads", "lm_head_bias", "logits_soft_cap",
    "mlp_bias", "mlp_gate_softcap", "mlp_only_layers", "mlp_up_softcap", "moe_apply_router_weight_on_input",
    "moe_num_shared_experts", "moe_router_enable_expert_bias", "moe_router_logit_softcapping", "moe_topk",
    "mup_enabled", "n_shared_experts", "new_decoder_architecture", "norm_head", "num_dense_layers",
    "num_kv_shared_layers", "num_shared_experts", "output_logit_soft_cap", "parallel_attn", "per_layer_config",
    "prefix_lm", "q_lora_rank", "qk_l2_clip_threshold", "qk_layernorm", "qk_norm", "qkv_bias", "rope_interleave",
    "rope_interleaved", "rope_local_base_freq", "router_logit_softcapping", "scale_attn_by_inverse_layer_idx",
    "scale_embedding", "shared_expert_intermediate_size", "shared_intermediate_size", "sparse_config", "swiglu_alpha",
    "swiglu_limit", "use_alibi", "use_attention_gate", "use_attention_sink", "use_bias", "use_bidirectional_attention",
    "use_cla", "use_conv_bias", "use_double_wide_mlp", "use_expert_bias", "use_gated_attention",
    "use_learned_position_embeddings", "use_mem_rope", "use_parallel_residual", "use_post_norm", "use_qk_norm",
    "use_qkv_bias", "use_sandwich_norm", "value_residual", "zero_expert_num", "block_configs",
    "num_attention_heads_per_layer", "num_key_value_heads_per_layer", "compress_rates", "index_topk",
    "attn_layer_indices", "hybrid_layer_ids", "activation_sparsity_pattern", "learned_pos_emb", "rescale_every",
)  # fmt: skip
"""Neutral if false, 0 or empty."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Numbers of experts: a family without experts has at most one."""

_SILU = among("silu", "swish", "swiglu")

FORMULA: Mapping[str, Neutral] = {
    **dict.fromkeys(_FACTORS, one),
    **dict.fromkeys(_SWITCHES, off),
    "activation": _SILU,
    "activation_function": _SILU,
    "attention_multiplier": _of_head(lambda size: size**-0.5),
    "attention_scale": _of_head(lambda size: size**-0.5),
    "dim_model_base": same_as("hidden_size"),
    "embedding_size": same_as("hidden_size"),
    "expert_selection_fn": among("softmax"),
    "hidden_act": among("silu"),
    "hidden_activation": _SILU,
    "is_causal": on,
    "layers_block_type": every("attention", "full_attention"),
    "mlp_hidden_act": _SILU,
    "mlp_layer_types": lambda value, config: isinstance(value, list) and len({*map(str, value)}) == 1,
    "moe_renormalize": on,
    "no_rope_layer_interval": _interval_without_rope,
    "no_rope_layers": _no_layer_without_rope,
    "nope_layer_interval": off,
    "norm_topk_prob": on,
    "norm_type": among("rmsnorm", "rms_norm", "rms"),
    "position_embedding_type": among("rope", "rotary"),
    "query_pre_attn_scalar": _of_head(lambda size: size),
    "rotary_dim": _of_head(lambda size: size),
    "scale_attn_weights": on,
    "scale_depth": _depth,
    "score_function": among("softmax"),
    "scoring_func": among("softmax"),
    "topk_method": among("greedy"),
    "use_rmsnorm": on,
    "use_rope": on,
    "v_head_dim": _of_head(lambda size: size),
    "word_embed_proj_dim": same_as("hidden_size"),
}
"""Field of config.json -> predicate of the values that change nothing. An absent or null field changes nothing."""

# ---- fields that are read together ------------------------------------------------------------------

_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "local_attention")
_PATTERNS = (
    "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers", "global_attn_every_n",
    "attention_layers", "attention_types",
)  # fmt: skip


def _check_windows(facts: Facts, config: Mapping[str, Any], architecture: str, where: object) -> None:
    """Check the layers with a sliding window: the family computes them, or there are none."""
    types, longest = config.get("layer_types"), config.get("max_position_embeddings")
    window = False
    for name in _WINDOWS:
        value = config.get(name)
        if not isinstance(value, (int, float)) or value <= 0 or config.get("use_sliding_window") is False:
            continue
        beyond = isinstance(longest, (int, float)) and value >= longest
        if name == "sliding_window" and facts.windows != "none":
            window = True
        elif not beyond and not _only_full(types) and name not in facts.takes:
            raise CheckpointError(_refusal(where, name, value, architecture))
    for name in _PATTERNS:
        known = name in facts.takes or (facts.windows == "by layer" and types)
        if (value := config.get(name)) and not known:
            raise CheckpointError(_refusal(where, name, value, architecture))
    if isinstance(types, list) and facts.takes.get("layer_types") is not ANY:
        kind = "sliding_attention" if window else "full_attention"
        if any(each != kind for each in types):
            raise CheckpointError(_refusal(where, "layer_types", types, architecture))


def _only_full(types: Any) -> bool:
    return isinstance(types, list) and bool(types) and all(each == "full_attention" for each in types)


def _check_rope(facts: Facts, config: Mapping[str, Any], architecture: str, where: object) -> None:
    """Check the rotated fraction of a head and the rotary parameters."""
    for name in ("partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct"):
        value = config.get(name)
        if value is not None and not facts.partial_rotary and not one(value, config):
            raise CheckpointError(_refusal(where, name, value, architecture))
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config.get(name)
        if not isinstance(parameters, Mapping):
            continue
        of_types = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
        if facts.rope_by_type and of_types:
            pairs = [(f"{key}.{inner}", value) for key, of_type in of_types.items() for inner, value in of_type.items()]
        else:
            pairs = list(parameters.items())
        for key, value in pairs:
            kind = key.rpartition(".")[2]
            ok = one(value, config) or facts.partial_rotary if kind == "partial_rotary_factor" else True
            ok = ok and not (kind == "llama_4_scaling_beta" and value and kind not in facts.takes)
            ok = ok and not (kind == "alpha" and value and kind not in facts.rope_types)
            ok = ok and not (kind in ("short_mscale", "long_mscale") and "mscale" not in facts.rope_types)
            ok = ok and not isinstance(value, Mapping)
            if kind in ("rope_type", "type") and value in ("dynamic", "longrope", "su"):  # su: longrope's older name
                value = "longrope" if value == "su" else value
                ok = value in facts.rope_types or (value == "dynamic" and "alpha" in facts.rope_types)
            if not ok:
                raise CheckpointError(_refusal(where, f"{name}.{key}", value, architecture))


def _check_norms(facts: Facts, config: Mapping[str, Any], architecture: str, where: object) -> None:
    """Refuse an epsilon under another name alone: it belongs to another kind of norm."""
    if config.get("rms_norm_eps") is None:
        for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "layernorm_epsilon"):
            if config.get(name) is not None and name not in facts.takes:
                raise CheckpointError(_refusal(where, name, config[name], architecture))
