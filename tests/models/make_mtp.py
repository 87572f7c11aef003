"""Random MTP modules in every key layout, and their forward in plain PyTorch: the papers' and formats' words.

Names are spelled out here and not taken from the loader, so that a wrong one is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import WEIGHTS

OWN_FILE = "modules"

LAYOUTS: dict[str, dict[str, str]] = {
    "deepseek": {
        "enorm": "model.layers.{n}.enorm",
        "hnorm": "model.layers.{n}.hnorm",
        "proj": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
        "block": "model.layers.{n}.",
        "embed": "model.layers.{n}.embed_tokens",
        "head": "model.layers.{n}.shared_head.head",
    },
    "qwen": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "proj": "mtp.fc",
        "norm": "mtp.norm",
        "block": "mtp.layers.{i}.",
    },
    "mimo": {
        "enorm": "model.mtp_layers.{i}.token_layernorm",
        "hnorm": "model.mtp_layers.{i}.hidden_layernorm",
        "proj": "model.mtp_layers.{i}.input_proj",
        "norm": "model.mtp_layers.{i}.final_layernorm",
        "block": "model.mtp_layers.{i}.",
    },
    "mimo-v2": {
        "enorm": "model.mtp.layers.{i}.enorm",
        "hnorm": "model.mtp.layers.{i}.hnorm",
        "proj": "model.mtp.layers.{i}.eh_proj",
        "norm": "model.mtp.layers.{i}.final_layernorm",
        "block": "model.mtp.layers.{i}.",
        "mlp_norm": "model.mtp.layers.{i}.pre_mlp_layernorm",
    },
}

Weights = dict[str, torch.Tensor]


def random_modules(config: DecoderConfig, depth: int, *, seed: int = 0, shared: bool = False) -> list[Weights]:
    """``depth`` modules with blocks of the target's shapes. Keys are the paper's parts and Llama's block names.

    shared: projection and norms are one for all modules, as Qwen's layout has them.
    """
    generator = torch.Generator().manual_seed(seed)
    layer, hidden, head = config.layers[-1], config.hidden_size, config.attention.head_dim
    width, mixer = layer.feed_forward.intermediate_size, layer.mixer
    queries, keys = mixer.num_heads * head, mixer.num_kv_heads * head

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns, generator=generator) / columns**0.5

    def scale(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    def joined() -> Weights:
        return {n: scale(hidden) for n in ("enorm", "hnorm", "norm")} | {"proj": matrix(hidden, 2 * hidden)}

    one, modules = joined(), []
    for _ in range(depth):
        w = dict(one if shared else joined())
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            w[f"self_attn.{name}.weight"] = matrix(rows, hidden)
            if mixer.qkv_bias:
                w[f"self_attn.{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)
        w["self_attn.o_proj.weight"] = matrix(hidden, queries)
        if mixer.qk_norm:
            w |= {f"self_attn.{name}.weight": scale(head) for name in ("q_norm", "k_norm")}
        for name, rows, columns in (
            ("gate_proj", width, hidden),
            ("up_proj", width, hidden),
            ("down_proj", hidden, width),
        ):
            w[f"mlp.{name}.weight"] = matrix(rows, columns)
        w |= {f"{name}.weight": scale(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        modules.append(w)
    return modules


def named(
    modules: Sequence[Weights], layout: str, layers: int, extra: dict[str, torch.Tensor] | None = None
) -> Weights:
    """The modules' tensors by the checkpoint's names; ``layers``: the target's. ``extra``: parts each also stores."""
    names, tensors = LAYOUTS[layout], {}
    for i, w in enumerate(modules):
        for part, tensor in {**w, **(extra or {})}.items():
            if part in names:
                name = names[part] + ".weight"
            elif part == "post_attention_layernorm.weight" and "mlp_norm" in names:
                name = names["mlp_norm"] + ".weight"
            else:
                name = names["block"] + part
            tensors[name.format(i=i, n=layers + i)] = tensor.contiguous()
    return tensors


def write_beside(target: Path, tensors: Weights) -> Path:
    """Into the target's own file."""
    file = target / WEIGHTS
    save_file({**load_file(file), **tensors}, file)
    return target


def write_alone(directory: Path, tensors: Weights) -> Path:
    """Into a directory of their own, without a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    return directory


# ---- the forward, in plain PyTorch -----------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float, positions: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], NeoX order. positions [T], or [T, D / 2] where each plane has its own."""
    half = x.shape[-1] // 2
    angles = positions.view(len(x), -1).float() / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def block(w: Weights, x: torch.Tensor, config: DecoderConfig, positions: torch.Tensor) -> torch.Tensor:
    """A Llama block over T tokens that see each other causally."""
    tokens, eps, theta = len(x), config.rms_eps, config.hf_config.rope_parameters["rope_theta"]

    def heads(name: str) -> torch.Tensor:
        bias = w.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
        y = (norm(x, w["input_layernorm.weight"], eps) @ w[f"self_attn.{name}_proj.weight"].T + bias).view(
            tokens, -1, config.attention.head_dim
        )
        if name != "v":
            if config.attention.qk_norm:
                y = norm(y, w[f"self_attn.{name}_norm.weight"], eps)
            y = rotate(y, theta, positions)
        return y.transpose(0, 1).repeat_interleave(config.attention.num_heads // y.shape[1], 0)

    causal = torch.ones(tokens, tokens).tril().log()
    scores = heads("q") @ heads("k").mT / config.attention.head_dim**0.5 + causal
    attended = (scores.softmax(-1) @ heads("v")).transpose(0, 1).reshape(tokens, -1)
    x = x + attended @ w["self_attn.o_proj.weight"].T
    y = norm(x, w["post_attention_layernorm.weight"], eps)
    gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
    return x + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def reference(
    w: Weights, layout: str, config: DecoderConfig, embedding: torch.Tensor, hidden: torch.Tensor, first: int
) -> torch.Tensor:
    """One module: embedding [T, H] of the tokens at first, first + 1, … and hidden [T, H] of those before them."""
    e, h = norm(embedding, w["enorm"], config.rms_eps), norm(hidden, w["hnorm"], config.rms_eps)
    pair = (h, e) if layout == "mimo" else (e, h)
    x = block(w, torch.cat(pair, -1) @ w["proj"].T, config, torch.arange(first, first + len(embedding)))
    return norm(x, w["norm"], config.rms_eps)


def greedy_drafts(
    modules: Sequence[Weights], layout: str, config: DecoderConfig, embed: torch.Tensor, head: torch.Tensor,
    tokens: Sequence[int], hidden: torch.Tensor, drafts: int,
) -> list[torch.Tensor]:  # fmt: skip
    """Logits [V] of each of ``drafts`` greedy drafts after ``tokens``; hidden [len(tokens) - 1, H] is the target's.

    Everything is computed anew for every draft: module i over all entries it has a hidden state for.
    """
    ids, states, logits = list(tokens), [hidden], []
    for step in range(drafts):
        i = min(step, len(modules) - 1)
        if step < len(modules):
            before, first = states[-1], step + 1  # of positions first - 1, …
        else:  # the last module goes on from its own state
            before = torch.cat((before, states[-1][-1:]))
        states.append(reference(modules[i], layout, config, embed[torch.tensor(ids[first:])], before, first))
        logits.append(states[-1][-1] @ head.T)
        ids.append(int(logits[-1].argmax()))
    return logits


def options(**flags: Any) -> dict[str, Any]:
    return {"tokenizer": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **flags}
