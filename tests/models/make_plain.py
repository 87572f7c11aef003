"""Random checkpoints of the families of ``plain_decoder``, with the names and shapes of the published ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models.plain_decoder import NAMES, is_tied

ARCHITECTURES = {
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
}


def shapes_of(kind: str, fields: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor."""
    names, hidden = NAMES[kind], fields["hidden_size"]
    heads, kv = fields["num_attention_heads"], fields["num_key_value_heads"]
    dim = fields.get("head_dim") or hidden // heads
    bias = fields.get("bias") or fields.get("attention_bias")
    yield f"{names['embed']}.weight", (fields["vocab_size"], hidden)
    yield f"{names['norm']}.weight", (hidden,)
    if not is_tied(kind, fields):
        yield f"{names['head']}.weight", (fields["vocab_size"], hidden)
    rows = {"q": heads, "k": kv, "v": kv} if "qkv" not in names else {"qkv": heads + 2 * kv}
    for number in range(fields["num_hidden_layers"]):
        at = f"model.layers.{number}."
        for part in ("attention_norm", "ffn_norm"):
            yield f"{at}{names[part]}.weight", (hidden,)
        for part, count in rows.items():
            yield f"{at}{names[part]}.weight", (count * dim, hidden)
            if bias or fields.get("use_qkv_bias"):
                yield f"{at}{names[part]}.bias", (count * dim,)
        yield f"{at}{names['o']}.weight", (hidden, heads * dim)
        if bias or fields.get("use_bias"):
            yield f"{at}{names['o']}.bias", (hidden,)
        if fields.get("use_qk_norm"):
            yield from ((f"{at}{names[part]}.weight", (dim,)) for part in ("q_norm", "k_norm"))
        if "num_experts" not in fields or number < fields["first_k_dense_replace"]:
            yield from mlp(at, names, hidden, fields["intermediate_size"])
            continue
        size = fields["moe_intermediate_size"]
        yield f"{at}mlp.gate.weight", (fields["num_experts"], hidden)
        yield f"{at}mlp.gate.expert_bias", (fields["num_experts"],)
        for expert in range(fields["num_experts"]):
            yield from mlp(at, names, hidden, size, f"mlp.experts.{expert}.")
        if fields["num_shared_experts"]:
            yield from mlp(at, names, hidden, size * fields["num_shared_experts"], "mlp.shared_experts.")


def mlp(
    at: str, names: dict[str, str], hidden: int, size: int, block: str = "mlp."
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor of an MLP."""
    for part, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
        yield f"{at}{names[part].replace('mlp.', block)}.weight", shape


def write_plain(directory: Path, kind: str, fields: dict[str, Any], seed: int, dtype: torch.dtype) -> None:
    """Write config.json and tensors, drawn so that logits spread over a few units."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes_of(kind, fields):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("expert_bias"):
            tensors[name] = 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = ((0.3 * noise) if name.endswith("bias") else (1 + 0.2 * noise)).to(dtype)
        else:
            tensors[name] = (1.5 * noise / shape[-1] ** 0.5).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_act": "silu", **fields,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
