"""The checkpoints of hybrid families that tests share, their transformers models, and other exports of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.make_plain import ARCHITECTURES
from tests.models.plain_decoder import PlainDecoder
from unisono.models.load.checkpoint import WEIGHTS

LINEAR, FULL = "linear_attention", "full_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5-tied-heads-1x": (
        "qwen3_5_text",
        {
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR, LINEAR],
            "attention_bias": True,
        },
    ),
    "qwen3_5-heads-3x": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_5-vision": ("qwen3_5", {}),
    "qwen3_5-vision-tied": ("qwen3_5", {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_5_moe-vision": ("qwen3_5_moe", {"shared_expert_intermediate_size": 32}),
    "qwen3_next": ("qwen3_next", {}),
    "lfm2": ("lfm2", {"tie_word_embeddings": False}),
    "lfm2_moe": ("lfm2_moe", {"conv_L_cache": 4}),
    "bamba": ("bamba", {"attention_bias": True, "mlp_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", {"mamba_conv_bias": False}),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "time_step_limit": (0.3, 1.2),
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 24, "layers_block_type": ["moe", LINEAR, FULL, "moe"]}),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", LINEAR, "moe", "moe", LINEAR, FULL],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "norm_topk_prob": False,
            "n_groups": 1,
            "n_group": 1,
            "topk_group": 1,
            "time_step_min": 0.5,
        },
    ),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear-query-rank": (
        "kimi_linear",
        {
            "q_lora_rank": 28,
            "attention_bias": True,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3_next-plain-layers": (
        "qwen3_next",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 6,
            "norm_topk_prob": False,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 16,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL, LINEAR],
        },
    ),
}
"""Name -> (family, fields of its config)."""


def reference(directory: Path, length: int = 0) -> Any:
    """transformers' model of a checkpoint, in fp32, or :class:`PlainDecoder` of one whose family it does not have.

    length: see :class:`PlainDecoder`.
    """
    config = json.loads((directory / "config.json").read_text())
    if config["architectures"][0] in ARCHITECTURES.values():
        return PlainDecoder(directory, length)
    kind = getattr(transformers, config["architectures"][0], transformers.AutoModelForCausalLM)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if "quantization_config" in config:
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = kind.from_pretrained(directory, **options).eval()
    # Without it transformers 5.24 cuts inputs of layers that a Gemma 4 without per-layer inputs does not have.
    model.config.get_text_config().output_hidden_states = True
    if config["model_type"] == "phimoe" and model.config.rope_parameters["rope_type"] == "longrope":
        _take_factors_by_length(model.model.rotary_emb)
    return model


def _take_factors_by_length(rotary: Any) -> None:
    """Let PhiMoE's rotary table take its long factors beyond the original length: transformers 5.24 takes the short
    ones there, with ``long_mscale``. The published code takes the long ones."""
    make = rotary.rope_init_fn

    def by_length(module: Any, args: Any, kwargs: Any) -> None:
        module.rope_init_fn = partial(make, seq_len=int(kwargs["position_ids"].max()) + 1)

    rotary.register_forward_pre_hook(by_length, with_kwargs=True)


@torch.inference_mode()
def greedy_tokens(directory: Path, prompt: list[int], count: int = 32) -> list[int]:
    """Greedy tokens of transformers without a cache, so that its tables fit the whole text."""
    model, ids = reference(directory), list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def renamed(
    source: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, directory)
    tensors = change(load_file(source / WEIGHTS))
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with each layer's experts in two: [E, 2 I, H], gate rows first, and [E, H, I]."""
    found, parts = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            found[name] = tensor
    for name, part in parts.items():
        count = 1 + max(number for number, _ in part)
        found[f"{name}.gate_up_proj"] = torch.stack([torch.cat((part[i, "gate"], part[i, "up"])) for i in range(count)])
        found[f"{name}.down_proj"] = torch.stack([part[i, "down"] for i in range(count)])
    return found


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with each expert's apart."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for i, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                base = f"{name.removesuffix('gate_up_proj')}{i}."
                found |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            for i, weight in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{i}.down_proj.weight"] = weight
        else:
            found[name] = tensor
    return found
