"""A Gemma 4 with experts in plain torch, written for training speed, with the names of ``Gemma4ForCausalLM``.

``train`` and ``evaluate`` use it; the engine serves the trained weights with its own decoder. Formulas are those of
transformers (``models/gemma4``). Every expert computes every token, as in ``training.tiny_hybrid``. Layers with a
window attend in blocks of the window's length, each to itself and to the block before.

Shapes: B rows, T tokens, H hidden, D head dim, E experts, I their intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny.model import Norm, rotate

SLIDING, FULL = "sliding_attention", "full_attention"

gelu = partial(F.gelu, approximate="tanh")

KV = tuple[Tensor, Tensor]
"""Keys and values [B, KV heads, T, D], as a cache holds them."""

Angles = Mapping[str, tuple[Tensor, Tensor]]
"""By layer type: cos and sin [B, T, 1, D / 2] fp32."""


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of the model, in the fields of released config.json files.

    full_attention_interval: every so many-th layer sees the whole text. assistant_*: sizes of the assistant.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 128
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_global_key_value_heads: int = 2
    head_dim: int = 32
    global_head_dim: int = 64
    sliding_window: int = 128
    num_experts: int = 8
    top_k_experts: int = 2
    moe_intermediate_size: int = 64
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_rotary_share: float = 0.25
    assistant_hidden_size: int = 128
    assistant_intermediate_size: int = 256
    assistant_layers: tuple[str, ...] = (SLIDING, FULL)

    @property
    def layer_types(self) -> list[str]:
        return [FULL if (i + 1) % self.full_attention_interval == 0 else SLIDING for i in range(self.num_hidden_layers)]

    def heads_of(self, kind: str) -> tuple[int, int]:
        """(KV heads, head size) of a layer of this type."""
        if kind == FULL:
            return self.num_global_key_value_heads, self.global_head_dim
        return self.num_key_value_heads, self.head_dim

    def angles_of(self, kind: str) -> Tensor:
        """cos and sin of every position, [2, P, D / 2] fp32. In full layers most planes do not turn."""
        dim = self.heads_of(kind)[1]
        theta, share = (self.global_rope_theta, self.global_rotary_share) if kind == FULL else (self.rope_theta, 1.0)
        planes = torch.arange(dim // 2, dtype=torch.float64)
        speed = torch.where(planes < int(share * dim // 2), theta ** (-2 * planes / dim), 0.0)
        angles = torch.arange(self.max_position_embeddings)[:, None] * speed
        return torch.stack((angles.cos(), angles.sin())).float()


def visible(rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """The mask [rows, keys] of the last ``rows`` of ``keys`` tokens: each sees itself and ``window`` - 1 before it."""
    query = torch.arange(keys - rows, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= query) & (key > query - window)


def attend(q: Tensor, kv: KV, window: int = 0, block: int = 0) -> Tensor:
    """Causal attention without a scale, q [B, heads, T, D] -> [B, T, heads · D].

    window: keys that a query sees, at most ``block``; 0: all. block: divides T where there is a window.
    """
    repeats = q.shape[1] // kv[0].shape[1]
    if not window:
        out = F.scaled_dot_product_attention(q, *kv, is_causal=True, scale=1.0, enable_gqa=repeats > 1)
        return out.transpose(1, 2).flatten(2)
    k, v = (each.repeat_interleave(repeats, dim=1) for each in kv)
    first = visible(block, block, window, q.device)
    outs = [F.scaled_dot_product_attention(q[:, :, :block], k[:, :, :block], v[:, :, :block], first, scale=1.0)]
    if q.shape[2] > block:
        mask = visible(block, 2 * block, window, q.device)
        queries, keys, values = (each.unflatten(2, (-1, block)).transpose(1, 2) for each in (q, k, v))
        keys, values = (torch.cat((each[:, :-1], each[:, 1:]), dim=3).flatten(0, 1) for each in (keys, values))
        out = F.scaled_dot_product_attention(queries[:, 1:].flatten(0, 1), keys, values, mask, scale=1.0)
        outs.append(out.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3))
    return torch.cat(outs, dim=2).transpose(1, 2).flatten(2)


class HeadNorm(Norm):
    """An RMS norm of heads. Scores are not scaled: the norms of queries and keys begin with a fourth root each."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.constant_(self.weight, size**-0.25)


class PostNorm(Norm):
    """The norm of a block's output, before the sum: it begins small, as the last matrix of a branch elsewhere."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.constant_(self.weight, 0.25)


def unit(x: Tensor, eps: float) -> Tensor:
    """An RMS norm without a weight, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Attention(nn.Module):
    """Attention with norms of queries, keys and values; full layers take the values from the keys' projection."""

    def __init__(self, config: GemmaConfig, kind: str) -> None:
        super().__init__()
        h, (kv_heads, d) = config.hidden_size, config.heads_of(kind)
        self.head_dim, self.eps, self.block = d, config.rms_norm_eps, config.sliding_window
        self.window = config.sliding_window if kind == SLIDING else 0
        self.q_proj = nn.Linear(h, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, kv_heads * d, bias=False) if kind == SLIDING else None
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.q_norm, self.k_norm = HeadNorm(d, self.eps), HeadNorm(d, self.eps)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, KV]:
        """(output [B, T, H], keys and values)."""
        heads = (*x_BTH.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_BTH).view(heads)), cos, sin).transpose(1, 2)
        keys = self.k_proj(x_BTH).view(heads)
        values = keys if self.v_proj is None else self.v_proj(x_BTH).view(heads)
        k = rotate(self.k_norm(keys), cos, sin).transpose(1, 2)
        kv = k, unit(values, self.eps).transpose(1, 2)
        return self.o_proj(attend(q, kv, self.window, self.block)), kv


class MLP(nn.Module):
    """A gated feed-forward with the tanh form of GELU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Softmax over all experts in fp32, the best ``top_k`` with weights that sum to one, times a factor each."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.full((config.hidden_size,), config.hidden_size**0.5))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [B, T, E] fp32, balance): balance is 1 if all experts get equal shares, and larger otherwise.

        It is the loss of Switch Transformers (arXiv 2101.03961, equation 4), divided by ``top_k``.
        """
        with torch.autocast(x.device.type, enabled=False):
            normed = unit(x.float(), self.eps) * (self.scale.float() * self.scale.numel() ** -0.5)
            chances = F.linear(normed, self.proj.weight.float()).softmax(-1)
        best, ids = chances.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, ids, best / best.sum(-1, keepdim=True))
        used = (weights.detach() > 0).float().flatten(0, -2).mean(0) / self.top_k
        balance = (used * chances.flatten(0, -2).mean(0)).sum() * used.numel()
        return weights * self.per_expert_scale.float(), balance


class Experts(nn.Module):
    """The experts' weights: gate rows first in ``gate_up_proj`` [E, 2I, H]; ``down_proj`` [E, H, I]."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of all experts' outputs, scaled by ``weights`` [..., E] fp32."""
        up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (weights.shape[-1], 2, -1))
        inner = gelu(up[..., 0, :]) * up[..., 1, :] * weights.unsqueeze(-1).to(up.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class Layer(nn.Module):
    """One decoder layer: norms before and after attention, and around the sum of MLP and experts."""

    def __init__(self, config: GemmaConfig, kind: str) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.kind = kind
        self.self_attn = Attention(config, kind)
        self.mlp = MLP(h, config.intermediate_size)
        self.router, self.experts = Router(config), Experts(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(h, eps), PostNorm(h, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm_1 = Norm(h, eps), Norm(h, eps)
        self.pre_feedforward_layernorm_2, self.post_feedforward_layernorm_2 = Norm(h, eps), Norm(h, eps)
        self.post_feedforward_layernorm = PostNorm(h, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, KV]:
        """(hidden states, balance of the experts, keys and values)."""
        mixed, kv = self.self_attn(self.input_layernorm(x_BTH), cos, sin)
        x_BTH = x_BTH + self.post_attention_layernorm(mixed)
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x_BTH)))
        weights, balance = self.router(x_BTH)
        sparse = self.experts(self.pre_feedforward_layernorm_2(x_BTH), weights)
        out = self.post_feedforward_layernorm(dense + self.post_feedforward_layernorm_2(sparse))
        return (x_BTH + out) * self.layer_scalar.to(x_BTH.dtype), balance, kv


class Trunk(nn.Module):
    """Embedding, layers and final norm (``model``)."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class Outputs:
    """hidden [B, T, H]: after the final norm. balance: of the experts. shared: KV of the last layer of each type."""

    hidden: Tensor
    balance: Tensor
    shared: dict[str, KV]


class TinyGemma(nn.Module):
    """The model to train; the embedding is also the LM head."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config, self.model = config, Trunk(config)
        initialise(self)
        for kind in (SLIDING, FULL):
            self.register_buffer(f"{kind}_angles", config.angles_of(kind), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings times the root of their size, in the autocast dtype."""
        x, device = self.model.embed_tokens(ids), ids.device.type
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        return x * self.config.hidden_size**0.5

    def angles(self, positions_BT: Tensor) -> Angles:
        """The angles of these positions."""
        tables = {kind: getattr(self, f"{kind}_angles")[:, positions_BT].unsqueeze(-2) for kind in (SLIDING, FULL)}
        return {kind: (table[0], table[1]) for kind, table in tables.items()}

    def forward(self, ids_BT: Tensor, positions_BT: Tensor) -> Outputs:
        """The whole rows. T: a multiple of the window."""
        angles, shared, balances = self.angles(positions_BT), dict[str, KV](), []
        x_BTH = self.embed(ids_BT)
        for layer in self.model.layers:
            x_BTH, balance, shared[layer.kind] = layer(x_BTH, *angles[layer.kind])  # type: ignore[index]
            balances.append(balance)
        return Outputs(self.model.norm(x_BTH), torch.stack(balances).mean(), shared)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the norm, capped, fp32."""
        logits, cap = F.linear(hidden, self.model.embed_tokens.weight).float(), self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap

    def head_loss(self, hidden_BTH: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Weighted mean cross-entropy, in nats."""
        losses = F.cross_entropy(self.head(hidden_BTH).flatten(0, 1), targets_BT.flatten(), reduction="none")
        return (losses * weights_BT.flatten()).sum() / weights_BT.sum()


def initialise(module: nn.Module) -> None:
    """Random matrices. Those before a norm have any scale, so only the embedding's and the routers' matter."""
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.03 if "embed_tokens" in name else 0.02)
