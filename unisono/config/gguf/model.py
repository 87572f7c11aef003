"""config.json and tensor names of the model in a GGUF file, from its metadata.

Every key of the model's architecture is read or compared with the one value that is computed; an unknown key is an
error, since llama.cpp may compute something with it. Imports types and the header only.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.config.gguf.header import GGUFHeader, GGUFTensor
from unisono.types import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """The family of an architecture of llama.cpp. rotated_pairs: rows of q and k alternate between a head's halves."""

    name: str
    model_type: str
    rotated_pairs: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", rotated_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""By ``general.architecture``."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the factors by which a scaled rotary table divides its frequencies."""

LOW, HIGH, TRAINED = 1.0, 4.0, 8192
LLAMA3 = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": TRAINED}
LLAMA3_FACTORS = (8.0, 32.0)
"""Scalings of Llama 3.1 and 3.2, one of which has made the factors of a file."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}


def checkpoint_name(name: str) -> str:
    """transformers' name of a tensor, with ``*`` for the number of an expert; an unknown name stays."""
    if match := _LAYER.fullmatch(name):
        number, part, kind = match.groups()
        return f"model.layers.{number}.{_INSIDE[part]}.{kind}" if part in _INSIDE else name
    part, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[part]}.{kind}" if part in _OUTSIDE else name


def architecture(header: GGUFHeader) -> Architecture:
    """The family of the file's model. Raises CheckpointError for one that is not supported."""
    kind, parts = header.metadata.get("general.type", "model"), header.metadata.get("split.count", 1)
    if kind != "model":
        raise CheckpointError(f"{header.file} holds a GGUF {str(kind)[:40]}, not a model: give the model's file.")
    if parts not in (0, 1):
        raise CheckpointError(
            f"{header.file} is one of {parts} parts of a model, which are not read: join them with llama.cpp's "
            "llama-gguf-split --merge."
        )
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise CheckpointError(
            f"{header.file}: GGUF architecture {header.architecture[:80]!r} is not supported. Supported: "
            f"{', '.join(ARCHITECTURES)}. Give the checkpoint that it was made from, in safetensors."
        )
    return found


class _Keys:
    """The keys of the architecture, which note what was read."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        start = f"{header.architecture}."
        self._left = {key.removeprefix(start): v for key, v in header.metadata.items() if key.startswith(start)}

    def read(self, name: str, default: Any = None) -> Any:
        """Value of a key; without a default it must be there."""
        found = self._left.pop(name, default)
        if found is None:
            raise self.wrong(name, None, "it is missing")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """An integer; a list of one for each layer must repeat one number."""
        found = self.read(name, default)
        found = found[0] if isinstance(found, list) and found and set(found) == {found[0]} else found
        if not isinstance(found, int) or isinstance(found, bool):
            raise self.wrong(name, found, "it must be one number for all layers")
        return found

    def only(self, name: str, *values: Any) -> None:
        """Require one of these values, if the key is there."""
        found = self._left.pop(name, values[0])
        if found not in values:
            raise self.wrong(name, found, f"supported is {' or '.join(map(str, values))}")

    def finish(self) -> None:
        """Refuse keys that nothing has read."""
        for name, value in self._left.items():
            raise self.wrong(name, value, "this key is not known, and may change what is computed")

    def wrong(self, name: str, value: Any, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._header.file}: {self._header.architecture}.{name}={str(value)[:80]}: {rule}.")


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """Return the config.json of the file's model. Raises CheckpointError naming a key that is not supported."""
    kind, keys, metadata = architecture(header), _Keys(header), header.metadata
    heads = keys.number("attention.head_count")
    width = keys.number("embedding_length")
    size = keys.number("attention.key_length", width // max(heads, 1))
    keys.only("attention.value_length", size)
    keys.only("rope.dimension_count", size)
    context = keys.number("context_length")
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": width,
        "intermediate_size": keys.number("feed_forward_length", width if kind.model_type == "qwen3_moe" else None),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": context,
        "rms_norm_eps": round_trip(keys.read("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(header, keys, size),
        "vocab_size": _embedding(header).shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "dtype": _dtype(header.tensors),
    }
    keys.only("vocab_size", config["vocab_size"], len(metadata.get("tokenizer.ggml.tokens", ())))
    keys.only("attention.causal", True)
    keys.only("pooling_type", 0)
    window = keys.read("attention.sliding_window", 0)
    if window and window < context:
        raise keys.wrong("attention.sliding_window", window, "windows are not supported in GGUF files")
    config |= _experts(kind, keys)
    if kind.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in header.tensors
    for name, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        config[field] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    keys.finish()
    return config


def round_trip(value: float) -> float:
    """The decimal number that a 32-bit float of the metadata stands for, such as 1e-05."""
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value


def _embedding(header: GGUFHeader) -> GGUFTensor:
    found = header.tensors.get("token_embd.weight")
    if found is None or len(found.shape) != 2:
        raise CheckpointError(f"{header.file} has no token embedding (token_embd.weight): it is no whole model.")
    return found


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The dtype to compute in: that of the plain matrices, or bfloat16."""
    matrices = {each.type.name for each in tensors.values() if len(each.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get("".join(matrices), "bfloat16")


def _experts(kind: Architecture, keys: _Keys) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    if kind.model_type != "qwen3_moe":
        keys.only("expert_count", 0)
        keys.only("expert_used_count", 0)
        return {}
    return {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope(header: GGUFHeader, keys: _Keys, size: int) -> dict[str, Any]:
    """rope_parameters of the file."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": round_trip(keys.read("rope.freq_base", 10000.0))}
    kind, factor = keys.read("rope.scaling.type", "none"), keys.read("rope.scaling.factor", 1.0)
    trained = keys.read("rope.scaling.original_context_length", 0)
    keys.only("rope.scale_linear", 1.0)
    keys.only("rope.scaling.attn_factor", 1.0)
    keys.read("rope.scaling.finetuned", False)
    if kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": round_trip(factor)}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": round_trip(factor), "original_max_position_embeddings": trained}
    elif kind not in ("none", "linear"):
        raise keys.wrong("rope.scaling.type", kind, "supported are none, linear and yarn")
    if ROPE_FACTORS in header.tensors:
        if found["rope_type"] != "default":
            raise keys.wrong("rope.scaling.type", kind, f"the file has factors of its own, {ROPE_FACTORS}")
        found |= {"rope_type": "llama3", "factor": _llama3_factor(header, found["rope_theta"], size), **LLAMA3}
    return found


def _llama3_factor(header: GGUFHeader, theta: float, size: int) -> float:
    """The scaling of Llama 3 whose factors are the file's. Raises CheckpointError for others."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.type.name == "F32" and tensor.shape == (size // 2,):
        with header.file.open("rb") as opened:
            opened.seek(tensor.start)
            stored = struct.unpack(f"<{size // 2}f", opened.read(tensor.nbytes))
        for factor in LLAMA3_FACTORS:
            made = llama3_factors(theta, size, factor)
            if all(abs(a - b) <= 1e-4 * b for a, b in zip(stored, made, strict=True)):
                return factor
    raise CheckpointError(
        f"{header.file}: {ROPE_FACTORS} {list(tensor.shape)}: these factors are of none of the scalings of Llama 3.1 "
        "and 3.2, which are the supported ones."
    )


def llama3_factors(theta: float, size: int, factor: float) -> list[float]:
    """Factor of each of the ``size / 2`` frequencies under Llama 3's scaling."""
    turns = [TRAINED / (2 * math.pi * theta ** (2 * i / size)) for i in range(size // 2)]
    smooth = [min(max((each - LOW) / (HIGH - LOW), 0.0), 1.0) for each in turns]
    return [1 / ((1 - each) / factor + each) for each in smooth]
