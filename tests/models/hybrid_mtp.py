"""Random MTP modules of Qwen3-Next and Qwen3.5, and their forward in plain PyTorch, from formulas and not from blocks.

Names are a checkpoint's. The block is a gated full-attention layer, with an MLP or with experts one by one; all norms
are zero-centred. There is no such module in transformers. T tokens, H hidden, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import silu, softmax

from tests.models.hybrids import reference
from tests.models.make_mtp import rotate, write_beside
from unisono.models.blocks.layers import MLPSpec
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import Checkpoint

Weights = dict[str, torch.Tensor]


def random_module(config: DecoderConfig, seed: int = 0) -> Weights:
    """One module whose block has the shapes of the target's attention and of its last layer's feed-forward."""
    generator = torch.Generator().manual_seed(seed)
    a, hidden, fed = config.attention, config.hidden_size, config.layers[-1].feed_forward

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 0.2 * torch.randn(size, generator=generator)

    def mlp(name: str, width: int) -> Weights:
        return {
            f"{name}gate_proj": matrix(width, hidden),
            f"{name}up_proj": matrix(width, hidden),
            f"{name}down_proj": matrix(hidden, width),
        }

    block = {
        "input_layernorm": norm(hidden),
        "post_attention_layernorm": norm(hidden),
        "self_attn.q_proj": matrix(2 * a.num_heads * a.head_dim, hidden),
        "self_attn.k_proj": matrix(a.num_kv_heads * a.head_dim, hidden),
        "self_attn.v_proj": matrix(a.num_kv_heads * a.head_dim, hidden),
        "self_attn.o_proj": matrix(hidden, a.num_heads * a.head_dim),
        "self_attn.q_norm": norm(a.head_dim),
        "self_attn.k_norm": norm(a.head_dim),
    }
    if isinstance(fed, MLPSpec):
        block |= mlp("mlp.", fed.intermediate_size)
    else:
        block |= {"mlp.gate": matrix(fed.num_experts, hidden), "mlp.shared_expert_gate": matrix(1, hidden)}
        block |= mlp("mlp.shared_expert.", fed.shared_intermediate_size)
        for number in range(fed.num_experts):
            block |= mlp(f"mlp.experts.{number}.", fed.intermediate_size)
    common = {
        "fc": matrix(hidden, 2 * hidden),
        "norm": norm(hidden),
        "pre_fc_norm_embedding": norm(hidden),
        "pre_fc_norm_hidden": norm(hidden),
    }
    tensors = {f"layers.0.{name}": tensor for name, tensor in block.items()} | common
    return {f"mtp.{name}.weight": tensor for name, tensor in tensors.items()}


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def forward(
    weights: Weights, config: DecoderConfig, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """embedding [T, H] of tokens and hidden [T, H] of those before them -> [T, H].

    positions: by which the tokens turn, [T], or [T, planes] where each plane has its own.
    """
    w = {name.removeprefix("mtp.").removesuffix(".weight"): tensor for name, tensor in weights.items()}
    block = {name.removeprefix("layers.0."): tensor for name, tensor in w.items() if name.startswith("layers.0.")}
    eps = config.rms_eps
    pair = normed(embedding, w["pre_fc_norm_embedding"], eps), normed(hidden, w["pre_fc_norm_hidden"], eps)
    x = torch.cat(pair, -1) @ w["fc"].T
    x = x + _attend(block, config, normed(x, block["input_layernorm"], eps), positions)
    y = normed(x, block["post_attention_layernorm"], eps)
    x = x + (_mlp(block, "mlp.", y) if "mlp.gate_proj" in block else _experts(block, config, y))
    return normed(x, w["norm"], eps)


def _attend(w: Weights, config: DecoderConfig, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    a, count = config.attention, len(x)
    rope = config.hf_config.rope_parameters
    turned, theta = int(a.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"]
    q, gate = (x @ w["self_attn.q_proj"].T).view(count, a.num_heads, 2 * a.head_dim).chunk(2, dim=-1)
    k, v = ((x @ w[f"self_attn.{name}_proj"].T).view(count, a.num_kv_heads, a.head_dim) for name in "kv")
    q = normed(q, w["self_attn.q_norm"], config.rms_eps)
    k = normed(k, w["self_attn.k_norm"], config.rms_eps)
    q, k = (torch.cat((rotate(t[..., :turned], theta, positions), t[..., turned:]), -1) for t in (q, k))
    k, v = (t.repeat_interleave(a.num_heads // a.num_kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / a.head_dim**0.5 + torch.ones(count, count).tril().log()
    out = torch.einsum("hqk,khd->qhd", softmax(scores, -1), v)
    return (out * gate.sigmoid()).flatten(1) @ w["self_attn.o_proj"].T


def _mlp(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return (silu(x @ w[f"{name}gate_proj"].T) * (x @ w[f"{name}up_proj"].T)) @ w[f"{name}down_proj"].T


def _experts(w: Weights, config: DecoderConfig, x: torch.Tensor) -> torch.Tensor:
    chances, chosen = softmax(x @ w["mlp.gate"].T, -1).topk(config.layers[-1].feed_forward.top_k)
    if config.layers[-1].feed_forward.normalize:
        chances = chances / chances.sum(-1, keepdim=True)
    every = torch.stack([_mlp(w, f"mlp.experts.{i}.", x) for i in range(len(w["mlp.gate"]))], dim=1)
    routed = (every.gather(1, chosen[..., None].expand(-1, -1, x.shape[1])) * chances[..., None]).sum(1)
    return routed + (x @ w["mlp.shared_expert_gate"].T).sigmoid() * _mlp(w, "mlp.shared_expert.", x)


@dataclass
class Case:
    """A hybrid with a random module beside it, and the reference of both."""

    path: Path
    weights: Weights = field(repr=False)

    def __post_init__(self) -> None:
        self.config, self.model = Checkpoint.open(self.path).config, reference(self.path)
        self.embed, self.head = (m.weight for m in (self.model.get_input_embeddings(), self.model.lm_head))

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]:
        """Logits [V] of k greedy drafts after ``ids``; the module goes on from its own states."""
        tokens, logits = list(ids), []
        hidden = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for _ in range(k):
            embedding = self.embed[torch.tensor(tokens[1:])]
            states = forward(self.weights, self.config, embedding, hidden, torch.arange(1, len(tokens)))
            logits.append(states[-1] @ self.head.T)
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, states[-1:]))
        return logits


def with_module(path: Path, seed: int = 0) -> Case:
    """Write a random module into a checkpoint's own file."""
    weights = random_module(Checkpoint.open(path).config, seed)
    return Case(write_beside(path, weights), weights)
