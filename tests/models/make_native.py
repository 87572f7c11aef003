"""A checkpoint of Mistral 4 rewritten in Mistral's own form: params.json and consolidated tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NAMES = {
    r"model\.embed_tokens": "tok_embeddings",
    r"model\.norm": "norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.input_layernorm": r"layers.\1.attention_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"layers.\1.ffn_norm",
    r"model\.layers\.(\d+)\.self_attn\.([qk]v?)_a_layernorm": r"layers.\1.attention.\2_a_norm",
    r"model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa": r"layers.\1.attention.wkv_a_with_mqa",
    r"model\.layers\.(\d+)\.self_attn\.(q_a|q_b|kv_b|o)_proj": r"layers.\1.attention.w\2",
    r"model\.layers\.(\d+)\.mlp\.gate": r"layers.\1.gate",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"layers.\1.feed_forward.\2",
    r"model\.layers\.(\d+)\.mlp\.(shared_experts|experts\.\d+)\.(gate|up|down)_proj": r"layers.\1.\2.\3",
}
LAST = {"gate": "w1", "down": "w2", "up": "w3"}


def native_name(name: str) -> str:
    """The native name of a tensor of a Mistral 4."""
    module, _, kind = name.rpartition(".")
    for theirs, ours in NAMES.items():
        if re.fullmatch(theirs, module):
            first, _, last = re.sub(theirs, ours, module).rpartition(".")
            renamed = LAST.get(last, last) if re.search(r"feed_forward|experts", first) else last
            kind = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}.get(kind, kind)
            return f"{first}.{renamed}.{kind}" if first else f"{renamed}.{kind}"
    raise AssertionError(name)


def make_native(source: Path, target: Path, **changes: Any) -> Path:
    """Write ``source`` in the native form. changes: of params.json."""
    config = json.loads((source / "config.json").read_text())
    rope = config["rope_parameters"]
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "head_dim": 28,
        "hidden_dim": config["intermediate_size"], "n_heads": config["num_attention_heads"], "n_kv_heads": 6,
        "norm_eps": config["rms_norm_eps"], "vocab_size": config["vocab_size"], "rope_theta": rope["rope_theta"],
        "q_lora_rank": config["q_lora_rank"], "kv_lora_rank": config["kv_lora_rank"],
        "qk_rope_head_dim": config["qk_rope_head_dim"], "qk_nope_head_dim": config["qk_nope_head_dim"],
        "v_head_dim": config["v_head_dim"], "max_position_embeddings": config["max_position_embeddings"],
        "dtype": "float32", "tied_embeddings": False, "activation": "silu", "vision_encoder": {"hidden_size": 16},
        "moe": {
            "num_experts": config["n_routed_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
            "expert_hidden_dim": config["moe_intermediate_size"], "num_shared_experts": config["n_shared_experts"],
            "first_k_dense_replace": config["first_k_dense_replace"], "route_every_n": 1,
            "routed_scale": config["routed_scaling_factor"], "num_expert_groups": config["n_group"],
            "num_expert_groups_per_tok": config["topk_group"],
        },
        "yarn": {
            "factor": rope["factor"], "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope.get("beta_fast", 32), "alpha": rope.get("beta_slow", 1), "apply_scale": True,
        },
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        },
    }  # fmt: skip
    target.mkdir(exist_ok=True)
    (target / "params.json").write_text(json.dumps(params | changes))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                for kind, part in (("gate", gate), ("up", up)):
                    one = name.replace("gate_up_proj", f"{expert}.{kind}_proj.weight")
                    tensors[native_name(one)] = part.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                tensors[native_name(name.replace("down_proj", f"{expert}.down_proj.weight"))] = part.contiguous()
        else:
            tensors[native_name(name)] = tensor
    tensors["vision_encoder.patch_conv.weight"] = torch.zeros(2, 2)
    save_file(tensors, target / "consolidated.safetensors")
    return target
