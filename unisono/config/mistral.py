"""Checkpoints in Mistral's own form, params.json and consolidated tensors, as directories of Hugging Face files.

Reads models with latent attention and experts: Mistral Large 3, whose checkpoints have no other form, and Mistral Small
4. :func:`described` writes the config.json of a Mistral 4, and :func:`tensor_name` gives a tensor's name in such a
checkpoint. Source of the fields and names: vLLM, ``transformers_utils/configs/mistral.py`` and
``model_executor/models/mistral_large_3.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.config.checkpoint_files import CONFIG, NATIVE, small_files, tensor_names
from unisono.config.described import describe, source_of
from unisono.config.untrusted_files import check_directory, check_numbers, read_json
from unisono.types import CheckpointError

FORMAT = 1
"""Version of the written files. Change it with their contents."""

FORM = "mistral"
ARCHITECTURE = "MistralLarge3ForCausalLM"

SIZES = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "v_head_dim": "v_head_dim",
    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
}  # fmt: skip
"""Fields that have to be there -> config.json's."""

OF_EXPERTS = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
MORE_OF_EXPERTS = {
    "first_k_dense_replace": ("first_k_dense_replace", 0), "routed_scale": ("routed_scaling_factor", 1.0),
    "num_expert_groups": ("n_group", 1), "num_expert_groups_per_tok": ("topk_group", 1),
}  # fmt: skip
"""Fields of ``moe``; (config.json's, default) of those that may be absent."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "activation": ("silu", None), "use_biases": (False, None), "causal": (True, None), "sliding_window": (None,),
    "model_type": ("transformer", None), "moe.route_every_n": (1, None), "moe.renorm_strategy": ("WEIGHTS", None),
    "moe.use_load_balancing_bias": (False, None),
}  # fmt: skip
"""Fields with the only values that are read."""

UNUSED = ("head_dim", "n_kv_heads", "max_seq_len", "vision_encoder", "multimodal")
"""Fields that say nothing more about the text model."""

MODULES = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate",
}
"""Modules of a layer -> their names in a Mistral 4."""

PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP = re.compile(r"(feed_forward|shared_experts|experts\.\d+)\.(w[123])")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.([^.]+)")
_WHOLE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_SCALES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}


def is_native(directory: Path) -> bool:
    """True if a directory holds a checkpoint of this form and none of the Hugging Face form."""
    return (directory / NATIVE).is_file() and not (directory / CONFIG).is_file()


def source(directory: Path) -> Path | None:
    """Return the directory of consolidated tensors that ``directory`` describes; None for another checkpoint's."""
    return source_of(FORM, directory)


def described(directory: Path) -> Path:
    """Return the directory that describes a native checkpoint, written unless it is there. Raises CheckpointError."""
    directory = directory.absolute()
    check_directory(directory)
    files = sorted(file for file in directory.iterdir() if file.is_file())
    state = "\n".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    names = small_files([file.name for file in files])

    def made() -> dict[str, Any]:
        texts = {name: _text(directory / name) for name in names if not name.endswith(".model")}
        config = config_of(read_json(directory / NATIVE), directory / NATIVE)
        if config.get("quantization_config", {}).get("quant_method") == "fp8":
            config["quantization_config"]["modules_to_not_convert"] = _plain_modules(files)
        return {**texts, CONFIG: config}

    return describe(FORM, directory, f"{FORMAT}\n{state}", made)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def _plain_modules(files: list[Path]) -> list[str]:
    """Modules whose weights have no scale, by their names in a Mistral 4."""
    stored = {name for file in files if file.suffix == ".safetensors" for name in tensor_names(file)}
    weights = (name.removesuffix(".weight") for name in stored if name.endswith(".weight"))
    plain = sorted(name for name in weights if f"{name}.qscale_weight" not in stored)
    return [tensor_name(f"{name}.weight").removesuffix(".weight") for name in plain]


def config_of(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the config.json of a params.json. Raises CheckpointError for a model or a value that is not read."""
    check_numbers(params, file)
    moe = params.get("moe")
    if not isinstance(moe, dict) or "kv_lora_rank" not in params:
        raise CheckpointError(
            f"{file.parent} has no config.json, and its {file.name} describes no model with latent attention and "
            "experts: of Mistral's own form only Mistral Large 3 and Mistral Small 4 are read; give the version for "
            "transformers."
        )
    left = {**params, **{f"moe.{name}": value for name, value in moe.items()}}
    del left["moe"]
    config: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "mistral4", "norm_topk_prob": True}
    for ours, theirs in {**SIZES, **{f"moe.{name}": to for name, to in OF_EXPERTS.items()}}.items():
        if left.get(ours) is None:
            raise CheckpointError(f"{file} has no {ours}: download it again.")
        config[theirs] = left.pop(ours)
    for name, (theirs, default) in MORE_OF_EXPERTS.items():
        value = left.pop(f"moe.{name}", None)
        config[theirs] = default if value is None else value
    for name, values in FIXED.items():
        if (value := left.pop(name, None)) not in values:
            raise CheckpointError(f"{file}: {name}={value!r} is not supported, only {values[0]!r}.")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["tie_word_embeddings"] = bool(left.pop("tied_embeddings", False))
    config["dtype"] = left.pop("dtype", None) or "bfloat16"
    config["rope_parameters"] = _rope(left, file)
    config["max_position_embeddings"] = left.pop("max_position_embeddings", None) or 128_000
    if (quantization := left.pop("quantization", None)) is not None:
        config["quantization_config"] = _quantization(quantization, file)
    if unknown := sorted(left.keys() - {*UNUSED}):
        raise CheckpointError(f"{file} has fields that are not known: {', '.join(unknown)}.")
    return config


def _rope(left: dict[str, Any], file: Path) -> dict[str, Any]:
    """Take the fields of positions: scaled by YaRN, and the growth of queries."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": left.pop("rope_theta", None) or 10_000.0}
    yarn, growth = left.pop("yarn", None) or {}, left.pop("llama_4_scaling", None) or {}
    if not isinstance(yarn, dict) or not isinstance(growth, dict):
        raise CheckpointError(f"{file}: yarn and llama_4_scaling must be objects.")
    yarn, growth = dict(yarn), dict(growth)
    try:
        if yarn:
            found |= {"rope_type": "yarn", "factor": float(yarn.pop("factor"))}
            found["original_max_position_embeddings"] = int(yarn.pop("original_max_position_embeddings"))
            found |= {"beta_fast": float(yarn.pop("beta", 32)), "beta_slow": float(yarn.pop("alpha", 1))}
            scaled = bool(yarn.pop("apply_scale", True))  # of scores; angles have none in either case
            found |= {"mscale": 1.0, "mscale_all_dim": 1.0} if scaled else {"attention_factor": 1.0}
        if growth:
            found["llama_4_scaling_beta"] = float(growth.pop("beta"))
            every = int(growth.pop("original_max_position_embeddings"))
            if found.setdefault("original_max_position_embeddings", every) != every:
                raise CheckpointError(f"{file}: llama_4_scaling and yarn have different numbers of positions.")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{file}: yarn or llama_4_scaling is not valid: {error!r}.") from None
    if unknown := sorted({*yarn, *growth}):
        raise CheckpointError(f"{file}: yarn or llama_4_scaling has fields that are not known: {', '.join(unknown)}.")
    return found


def _quantization(quantization: Any, file: Path) -> Any:
    """``quantization_config`` of config.json: fp8 with a scale per projection, or what compressed-tensors wrote."""
    method = str(quantization.get("quant_method", "")).replace("_", "-") if isinstance(quantization, dict) else ""
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    if not isinstance(quantization, dict) or quantization.get("qformat_weight") != "fp8_e4m3":
        raise CheckpointError(f"{file}: quantization={quantization!r} is not supported.")
    scheme = quantization.get("qscheme_act")
    if scheme not in ("NO_SCALES", "TENSOR", None):
        raise CheckpointError(f"{file}: quantization: qscheme_act={scheme!r} is not supported.")
    return {"quant_method": "fp8", "activation_scheme": "dynamic" if scheme == "NO_SCALES" else "static"}


def tensor_name(name: str) -> str:
    """Return the name of a consolidated tensor in a checkpoint of Mistral 4; others, such as a tower's, keep theirs."""
    module, _, kind = name.rpartition(".")
    kind = _SCALES.get(kind, kind)
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    if (found := _LAYER.fullmatch(name)) is None:
        return name
    layer, inner = found[1], found[2]
    if (mlp := _MLP.fullmatch(inner)) is not None:
        block = "mlp" if mlp[1] == "feed_forward" else f"mlp.{mlp[1]}"
        return f"model.layers.{layer}.{block}.{PROJECTIONS[mlp[2]]}.{kind}"
    return f"model.layers.{layer}.{MODULES[inner]}.{kind}" if inner in MODULES else name
