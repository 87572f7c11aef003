"""Writes trained draft models to disk, in the formats of their original repositories.

EAGLE-3: ``midlayer.*`` with ``d2t`` and ``t2d``, which SGLang and vLLM read too. EAGLE: the original format. MTP: the
keys of DeepSeek-V3 or Qwen3-Next, alone or in a copy of the target's directory. Assistants: as those of Gemma 4.
Standalone models: a Hugging Face directory. Tensor names are defined in ``drafters/eagle/checkpoint.py`` and
``drafters/mtp``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unisono.models.blocks.layers import MLPSpec
from unisono.models.load.checkpoint import INDEX, WEIGHTS, read_json

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "generation_config.json", "added_tokens.json",
)  # fmt: skip

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")

SLIDING = "sliding_attention"

_NOT_OF_ASSISTANTS = (
    "architectures",
    "per_layer_config",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
    "transformers_version",
)
_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip

Tensors = Mapping[str, torch.Tensor]


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, tensors: Tensors, dtype: torch.dtype) -> None:
    """Write tensors to ``file`` atomically. Floating-point tensors are converted to ``dtype``."""
    stored = {
        name: (t.detach().to(dtype) if t.is_floating_point() else t.detach()).cpu().contiguous().clone()
        for name, t in tensors.items()
    }
    _replace(file, stored)


def _replace(file: Path, stored: Tensors) -> None:
    """Write a temporary file, then rename it to ``file``."""
    partial = file.with_suffix(".part")
    save_file(dict(stored), partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    partial.replace(file)


def layer_fields(target: Mapping[str, Any], config: Any, **changes: Any) -> dict[str, Any]:
    """config.json of a head with one Llama layer of the target's sizes.

    target: the target's config.json. config: the target's DecoderConfig. changes: override fields.
    """
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": dense_width(config),
        "num_hidden_layers": 1,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **_rotary(target),
        **changes,
    }


def dense_width(config: Any) -> int:
    """Intermediate size of the last layer's MLP; three times the hidden size if it has experts."""
    feed_forward = dense_of(config.layers[-1])
    return feed_forward.intermediate_size if isinstance(feed_forward, MLPSpec) else 3 * config.hidden_size


def with_plain_rotation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with whole heads rotated by absolute positions, as block drafters have it.

    Axes of pictures and a partial rotation of the target are left out. Scaled rotations (YaRN and others) are kept.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    others = {name: value for name, value in fields.items() if name not in ROPE}
    if kind not in ("default", "mrope"):
        own = "mrope_section", "mrope_interleaved", "partial_rotary_factor"
        return {**others, "rope_parameters": {n: v for n, v in {"rope_theta": theta, **rope}.items() if n not in own}}
    return others if theta is None else {**others, "rope_theta": theta}


def dense_of(layer: Any) -> Any:
    """The feed-forward of a layer, or what stands beside its experts."""
    return getattr(layer.feed_forward, "dense", layer.feed_forward)


def _rotary(target: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the rotary table. Of a target with a table per layer type, that of its layers with a window."""
    text = {**target, **target.get("text_config", {})}
    found = {name: text[name] for name in ROPE if text.get(name) is not None}
    tables = found.get("rope_parameters", {})
    return {"rope_parameters": tables[SLIDING]} if SLIDING in tables else found


def assistant_fields(target: Mapping[str, Any], config: Any, types: Sequence[str], **changes: Any) -> dict[str, Any]:
    """config.json of an assistant for a Gemma 4.

    types: of its layers. target, config: see :func:`layer_fields`. changes: override fields of its text model.
    """
    raw = target.get("text_config", target)
    full = next((layer.mixer for layer in config.layers if not layer.mixer.window), None)
    heads = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads} if full else {}
    text = {
        **{name: value for name, value in raw.items() if name not in _NOT_OF_ASSISTANTS},
        "num_hidden_layers": len(types),
        "num_kv_shared_layers": len(types),
        "layer_types": list(types),
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        **heads,
        **changes,
    }
    unified = "unified" in raw["model_type"]
    return {
        "architectures": [f"Gemma4{'Unified' * unified}AssistantForCausalLM"],
        "model_type": f"gemma4{'_unified' * unified}_assistant",
        "backbone_hidden_size": config.hidden_size,
        "text_config": text,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
    }


def empty_assistant(config: Any, reads: Sequence[int], hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    """Tensors of an assistant of these sizes, all ones. reads: the target's layer that each of its layers reads."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * config.hidden_size),
        "post_projection.weight": (config.hidden_size, hidden),
    }
    for number, read in enumerate(reads):
        mixer = config.layers[read].mixer
        width = mixer.num_heads * mixer.head_dim
        shapes |= {
            f"model.layers.{number}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (width, hidden),
                "self_attn.o_proj.weight": (hidden, width),
                "self_attn.q_norm.weight": (mixer.head_dim,),
                "mlp.gate_proj.weight": (intermediate, hidden),
                "mlp.up_proj.weight": (intermediate, hidden),
                "mlp.down_proj.weight": (hidden, intermediate),
                **{f"{norm}.weight": (hidden,) for norm in _SANDWICH},
                "layer_scalar": (1,),
            }.items()
        }
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def original_names(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Rename EAGLE-3 tensors from the names of speculators (``layers.0.*``) to the original (``midlayer.*``)."""
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
    }


def vocabulary_maps(ids: torch.Tensor | None, draft_vocab: int, vocab: int) -> dict[str, torch.Tensor]:
    """``d2t [V'] int64``: draft id i is target id i + d2t[i]. ``t2d [V] bool``: which target ids have a draft id."""
    each = torch.arange(draft_vocab)
    known = each if ids is None else ids.long().cpu()
    return {"d2t": known - each, "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)}


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files and generation_config.json, as far as they exist."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def write_beside_target(target: Path, out: Path, tensors: Tensors, dtype: torch.dtype) -> None:
    """Copy the target's directory to ``out`` and add ``tensors``: to its single file, or as one more shard."""
    copy_tokenizer(target, out)
    if (target / WEIGHTS).is_file():
        # The target's tensors keep their dtype, which may differ.
        extra = {name: t.detach().to(dtype).cpu() for name, t in tensors.items()}
        _replace(out / WEIGHTS, {**load_file(target / WEIGHTS), **extra})
        return
    index = read_json(target / INDEX)
    for name in set(index["weight_map"].values()):
        shutil.copyfile(target / name, out / name)
    write_tensors(out / "mtp.safetensors", tensors, dtype)
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    write_json(out / INDEX, index)
