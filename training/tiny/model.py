"""A Qwen3 in plain torch, written for training speed, with the parameter names of transformers' ``Qwen3ForCausalLM``.

Only ``train`` uses it. The engine serves the trained weights with its own decoder. Shapes: B rows, T tokens, H hidden,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 576
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def to_hf(self, pad: int, eos: int) -> dict[str, object]:
        """The config.json for transformers; ``pad`` and ``eos`` are token ids."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **self.__dict__,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "pad_token_id": pad,
            "eos_token_id": eos,
        }


class Norm(nn.Module):
    """RMS norm over the last dim, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped heads, per-head norms of q and k, and rotary positions."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(h, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.q_norm, self.k_norm = Norm(d, config.rms_norm_eps), Norm(d, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x_BTH.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_BTH).view(heads)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x_BTH).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x_BTH).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), cos, sin)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Trunk(nn.Module):
    """Embedding, layers and final norm; named ``model`` in a checkpoint."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class TinyQwen3(nn.Module):
    """The model to train; the embedding is also the LM head."""

    cos_sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config, self.model = config, Trunk(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(
                    parameter, std=0.02 / (4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
                )
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(config.max_position_embeddings)[:, None] / config.rope_theta**half
        self.register_buffer("cos_sin", torch.stack((angles.cos(), angles.sin())).float(), persistent=False)

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Hidden states [B, T, H] before the final norm, in the autocast dtype."""
        cos, sin = self.cos_sin[:, positions_BT].unsqueeze(-2)
        x_BTH = self.model.embed_tokens(ids_BT)
        if torch.is_autocast_enabled(x_BTH.device.type):
            x_BTH = x_BTH.to(torch.get_autocast_dtype(x_BTH.device.type))
        for layer in self.model.layers:
            x_BTH = layer(x_BTH, cos, sin)
        return x_BTH

    def head(self, x_BTH: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return F.linear(self.model.norm(x_BTH), self.model.embed_tokens.weight)

    def head_loss(self, x_BTH: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Weighted mean cross-entropy, in nats."""
        losses = F.cross_entropy(self.head(x_BTH).flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
        return (losses * weights_BT.flatten()).sum() / weights_BT.sum()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split ("neox") layout; x [B, T, heads, D], cos and sin [B, T, 1, D / 2] fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
