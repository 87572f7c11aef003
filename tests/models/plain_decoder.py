"""Ling 2.0, InternLM2 and MiniCPM in plain PyTorch, in float64: the oracle of families without a class in transformers.

Formulas and tensor names are those of the published modelling files: inclusionAI/Ling-V2
(``modeling_bailing_moe_v2.py``), ``modeling_internlm2.py`` and ``modeling_minicpm.py`` of the checkpoints. Nothing of
Unisono is used. T: tokens, H: hidden size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    "minicpm": LLAMA,
    "bailing_moe": {
        **{part: name for part, name in LLAMA.items() if part not in ("q", "k", "v")},
        "embed": "model.word_embeddings", "qkv": "attention.query_key_value", "o": "attention.dense",
        "q_norm": "attention.query_layernorm", "k_norm": "attention.key_layernorm",
    },
    "internlm2": {
        "embed": "model.tok_embeddings", "norm": "model.norm", "head": "output", "attention_norm": "attention_norm",
        "ffn_norm": "ffn_norm", "qkv": "attention.wqkv", "o": "attention.wo", "gate": "feed_forward.w1",
        "up": "feed_forward.w3", "down": "feed_forward.w2",
    },
}  # fmt: skip
"""Model type -> part -> checkpoint module, in a layer or outside."""
FACTORS = ("scale_emb", "scale_depth", "dim_model_base")


class PlainDecoder:
    """A checkpoint's model: token ids [1, T] -> ``logits`` [1, T, vocabulary] in fp32.

    length: longest text in tokens, for rope types that depend on it; by default the declared context.
    """

    def __init__(self, directory: Path, length: int = 0) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        kind = self.config.get("model_type", "minicpm")
        self.names, self.grouped, self.tied = NAMES[kind], kind == "internlm2", is_tied(kind, self.config)
        stored = [load_file(file) for file in sorted(directory.glob("*.safetensors"))]
        self.tensors = {name: tensor.double() for part in stored for name, tensor in part.items()}
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.length = length or self.config["max_position_embeddings"]
        self.activations: Callable[[torch.Tensor, float], torch.Tensor] = lambda x, scale: x
        self.dequantised: set[str] = set()

    def __call__(self, ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        count, scaled = self.config["num_hidden_layers"], self.config.get("scale_emb", 1)
        x = self.embedded(ids[0]) * scaled
        for number in range(count):
            x = self.layer(x, number)
        x = self.normed(x, self.names["norm"])
        x = x * self.config.get("dim_model_base", x.shape[1]) / x.shape[1]
        head = self.names["embed" if self.tied else "head"]
        return SimpleNamespace(logits=(x @ self.tensors[f"{head}.weight"].T)[None].float())

    def take(self, values: dict[str, torch.Tensor], activations: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        """Take these weights in place of its own, by their modules, and ``activations`` of their inputs."""
        self.tensors |= {f"{module}.weight": weight.double() for module, weight in values.items()}
        self.activations, self.dequantised = activations, {*values}

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, before MiniCPM's factor."""
        return self.tensors[f"{self.names['embed']}.weight"][ids.long()]

    def layer(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """One layer over a whole text, [T, H] -> [T, H]."""
        at = f"model.layers.{number}."
        depth = self.config.get("scale_depth")
        times = 1.0 if depth is None else depth / math.sqrt(self.config["num_hidden_layers"])
        x = x + times * self.attention(self.normed(x, at + self.names["attention_norm"]), at)
        y = self.normed(x, at + self.names["ffn_norm"])
        dense = number < self.config.get("first_k_dense_replace", 0) or "num_experts" not in self.config
        return x + times * (self.mlp(y, at) if dense else self.experts(y, at))

    def normed(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * root * self.tensors[f"{module}.weight"]

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """A product, with a bias if the checkpoint has one. Inputs are as a quantised layout has them."""
        if module in self.dequantised:
            x = self.activations(x, 0.011)
        return x @ self.tensors[f"{module}.weight"].T + self.tensors.get(f"{module}.bias", torch.zeros(()))

    def attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """Causal attention over the normed text."""
        count, each = len(x), self.heads // self.kv_heads
        q, k, v = self.projected(x, at)
        if self.config.get("use_qk_norm"):
            q, k = self.normed(q, at + self.names["q_norm"]), self.normed(k, at + self.names["k_norm"])
        q, k = self.rotated(q), self.rotated(k)
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.dim)
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), at + self.names["o"])

    def projected(self, x: torch.Tensor, at: str) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [T, heads, D] each."""
        if "qkv" not in self.names:
            return tuple(self.linear(x, at + self.names[name]).view(len(x), -1, self.dim) for name in "qkv")
        qkv = self.linear(x, at + self.names["qkv"])
        if self.grouped:  # each KV head's queries, its key, its value
            by_group = qkv.view(len(x), self.kv_heads, -1, self.dim)
            return by_group[:, :, :-2].flatten(1, 2), by_group[:, :, -2], by_group[:, :, -1]
        return qkv.view(len(x), -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], 1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first part of each head, its first half against its second."""
        turning = int(self.dim * self.config.get("partial_rotary_factor", 1.0))
        frequencies, factor = self.frequencies(turning)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        a, b, rest = x.split([turning // 2, turning // 2, self.dim - turning], -1)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def frequencies(self, turning: int) -> tuple[torch.Tensor, float]:
        """Radians a position of each plane, and the factor of cosines and sines."""
        scaling = self.config.get("rope_scaling") or {}
        kind, theta = scaling.get("type", scaling.get("rope_type")), self.config.get("rope_theta", 10_000.0)
        longest, exponents = self.config["max_position_embeddings"], torch.arange(0, turning, 2).double() / turning
        if kind == "dynamic" and self.length > longest:
            stretch = scaling["factor"] * self.length / longest - (scaling["factor"] - 1)
            theta = theta * stretch ** (turning / (turning - 2))
        if kind == "yarn":
            return yarn(theta, turning, scaling)
        if kind != "longrope":
            assert kind in (None, "default", "dynamic"), kind
            return theta**-exponents, 1.0
        original = scaling["original_max_position_embeddings"]
        factors = torch.tensor(scaling["long_factor" if self.length > original else "short_factor"]).double()
        return theta**-exponents / factors, math.sqrt(1 + math.log(longest / original) / math.log(original))

    def mlp(self, x: torch.Tensor, at: str, block: str = "") -> torch.Tensor:
        """A gated MLP: a layer's own, or ``block`` in place of its ``mlp``."""
        gate, up, down = (at + self.names[name].replace("mlp.", block or "mlp.") for name in ("gate", "up", "down"))
        return self.linear(silu(self.linear(x, gate)) * self.linear(x, up), down)

    def experts(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """Ling's experts: chosen by a corrected sigmoid in the best groups, weighed by the sigmoid alone."""
        c = self.config
        count, groups = c["num_experts"], c["n_group"] or 1
        scores = (x @ self.tensors[f"{at}mlp.gate.weight"].T).sigmoid()
        choice = (scores + self.tensors[f"{at}mlp.gate.expert_bias"]).view(len(x), groups, -1)
        if groups > 1:
            best = choice.topk(2, -1).values.sum(-1).topk(c["topk_group"], -1).indices
            kept = torch.zeros(len(x), groups, dtype=torch.bool).scatter_(1, best, True)
            choice = choice.masked_fill(~kept[..., None], -torch.inf)
        chosen = choice.flatten(1).topk(c["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        if chosen.shape[1] > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        shares = torch.zeros(len(x), count).double().scatter_(1, chosen, weights * c["routed_scaling_factor"])
        found = [shares[:, i, None] * self.mlp(x, at, f"mlp.experts.{i}.") for i in range(count)]
        shared = self.mlp(x, at, "mlp.shared_experts.") if c["num_shared_experts"] else torch.zeros_like(x)
        return torch.stack(found).sum(0) + shared


def yarn(theta: float, turning: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN's frequencies with 32 and 1 turns as bounds (arXiv 2309.00071), and its factor."""
    original, factor, planes = scaling["original_max_position_embeddings"], scaling["factor"], turning // 2
    bounds = [turning * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)]
    first, last = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), turning - 1)
    shares = ((torch.arange(planes).double() - first) / max(last - first, 1e-3)).clamp(0, 1)
    frequencies = theta ** -(torch.arange(0, turning, 2).double() / turning)
    return frequencies * (1 - shares + shares / factor), 0.1 * math.log(factor) + 1


def is_tied(kind: str, config: dict[str, Any]) -> bool:
    """True if the head is the embedding: by default in MiniCPM alone."""
    tied = config.get("tie_word_embeddings")
    return kind == "minicpm" if tied is None else bool(tied)
