"""A Qwen3.5-MoE in plain torch, written for training speed: Gated DeltaNet, gated attention, experts, one MTP module.

``train`` and ``evaluate`` use it; the engine serves the trained weights with its own decoder. Parameters have the
names of transformers' ``Qwen3_5MoeForCausalLM``. The formulas are its own and those of vLLM's MTP module, with gates in
fp32.

Every expert computes every token, and the weights of those that were not chosen are zero: at this size this is faster
than sorting tokens by expert. Shapes: B rows, T tokens, H hidden, D head dim, E experts, I their intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny_hybrid import delta

KV = tuple[Tensor, Tensor]
"""Keys and values [B, heads, T, D] of a pass."""


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of the model. Every ``full_attention_interval``-th layer has attention, the others Gated DeltaNet."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dims: int = 16
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 128
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (i + 1) % self.full_attention_interval else "full_attention"
            for i in range(self.num_hidden_layers)
        ]


class Norm(nn.Module):
    """Zero-centred RMS norm over the last dim, in fp32: the scale is 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """rms(x) * weight * silu(gate) in fp32, with one rounding to the gate's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (normed * F.silu(gate.float())).to(gate.dtype)


class Attention(nn.Module):
    """Causal attention with a gate on its output, head norms of q and k, and rotary on the first dims of a head."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(h, config.num_attention_heads * d * 2, bias=False)  # per head: query, then gate
        self.k_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.q_norm, self.k_norm = Norm(d, config.rms_norm_eps), Norm(d, config.rms_norm_eps)

    def forward(
        self, x_BTH: Tensor, cos: Tensor, sin: Tensor, earlier: Sequence[KV] | None = None
    ) -> tuple[Tensor, KV]:
        """(output [B, T, H], keys and values of this pass).

        earlier: for an unrolled MTP module, the keys and values of its earlier steps (``visible``). None: plain.
        """
        q, gate, kv = self._project(x_BTH, cos, sin)
        if earlier is None:
            out = F.scaled_dot_product_attention(q, *kv, is_causal=True, enable_gqa=True)
        else:
            keys, values = (torch.cat([*(pair[i] for pair in earlier), kv[i]], dim=2) for i in (0, 1))
            mask = visible(q.shape[2], len(earlier), q.device)
            repeats = q.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
            out = F.scaled_dot_product_attention(q, keys, values, mask)
        return self._output(out, gate), kv

    def step(self, x_BH: Tensor, cos: Tensor, sin: Tensor, cache: KV, position: int) -> Tensor:
        """One token at ``position`` of every row; ``cache`` [B, heads, longest, D] is updated in place."""
        q, gate, kv = self._project(x_BH.unsqueeze(1), cos, sin)
        for stored, new in zip(cache, kv, strict=True):
            stored[:, :, position] = new[:, :, 0]
        keys, values = (stored[:, :, : position + 1] for stored in cache)
        return self._output(F.scaled_dot_product_attention(q, keys, values, enable_gqa=True), gate)[:, 0]

    def _project(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, KV]:
        heads = (*x_BTH.shape[:2], -1, self.head_dim)
        q, gate = self.q_proj(x_BTH).view(*heads[:3], 2 * self.head_dim).chunk(2, dim=-1)
        q = rotate(self.q_norm(q), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x_BTH).view(heads)), cos, sin).transpose(1, 2)
        return q, gate, (k, self.v_proj(x_BTH).view(heads).transpose(1, 2))

    def _output(self, out: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))


class GatedDeltaNet(nn.Module):
    """Projections, a causal convolution of four taps, the gated delta rule, a gated norm (``linear_attn``)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        h, self.key_dim, self.value_dim = config.hidden_size, config.linear_key_head_dim, config.linear_value_head_dim
        keys, self.value_heads = config.linear_num_key_heads * self.key_dim, config.linear_num_value_heads
        values = self.value_heads * self.value_dim
        self.sizes = (keys, keys, values)
        self.in_proj_qkv = nn.Linear(h, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(h, values, bias=False)
        self.in_proj_b = nn.Linear(h, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(h, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            sum(self.sizes), sum(self.sizes), config.linear_conv_kernel_dim, groups=sum(self.sizes), bias=False
        )
        step = torch.exp(torch.empty(self.value_heads).uniform_(-6.9, -2.3))  # 0.001 to 0.1, as in Mamba2
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, h, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        taps, length = self.conv1d.weight.float(), x_BTH.shape[1]
        padded = F.pad(self.in_proj_qkv(x_BTH).float(), (0, 0, taps.shape[-1] - 1, 0))
        mixed = padded[:, :length] * taps[:, 0, 0]
        for i in range(1, taps.shape[-1]):
            mixed = mixed + padded[:, i : i + length] * taps[:, 0, i]
        q, k, v = self._heads(mixed)
        with torch.autocast(x_BTH.device.type, enabled=False):
            out = delta.chunked(q, k, v, *self._gates(x_BTH))
        return self._output(out, x_BTH)

    def step(self, x_BH: Tensor, recent: Tensor, state: Tensor) -> Tensor:
        """One token of every row. Updated in place: recent [B, 3, C], the last projections, and state [B, h, K, V]."""
        window = torch.cat((recent, self.in_proj_qkv(x_BH).float().unsqueeze(1)), dim=1)
        recent.copy_(window[:, 1:])
        q, k, v = self._heads((window * self.conv1d.weight.float()[:, 0].T).sum(1))
        with torch.autocast(x_BH.device.type, enabled=False):
            new, out = delta.step(state, q, k, v, *self._gates(x_BH))
        state.copy_(new)
        return self._output(out, x_BH)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.silu(mixed).split(self.sizes, dim=-1)
        return (
            q.unflatten(-1, (-1, self.key_dim)),
            k.unflatten(-1, (-1, self.key_dim)),
            v.unflatten(-1, (-1, self.value_dim)),
        )

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (F.linear(x.float(), p.weight.float()) for p in (self.in_proj_a, self.in_proj_b))
        return delta.gates(a, b, self.A_log, self.dt_bias)

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(self.norm(out, gate).flatten(-2))


class Experts(nn.Module):
    """The experts' weights: gate rows first in ``gate_up_proj`` [E, 2I, H]; ``down_proj`` [E, H, I]."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of all experts' outputs, scaled by ``weights`` [..., E] fp32."""
        up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (weights.shape[-1], 2, -1))
        inner = F.silu(up[..., 0, :]) * up[..., 1, :] * weights.unsqueeze(-1).to(up.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU: the shared expert."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Softmax over all experts in fp32, the best ``top_k`` with weights that sum to one, and a gated shared expert."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output, balance): balance is 1 if all experts get equal shares of the tokens, and larger otherwise.

        It is the loss of Switch Transformers (arXiv 2101.03961, equation 4), divided by ``top_k``.
        """
        with torch.autocast(x.device.type, enabled=False):
            chances = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        best, ids = chances.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, ids, best / best.sum(-1, keepdim=True))
        used = (weights.detach() > 0).float().flatten(0, -2).mean(0) / self.top_k
        balance = (used * chances.flatten(0, -2).mean(0)).sum() * used.numel()
        shared = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: HybridConfig, kind: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.recurrent = kind == "linear_attention"
        if self.recurrent:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MoE(config)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states, balance of the experts)."""
        normed = self.input_layernorm(x_BTH)
        mixed = self.linear_attn(normed) if self.recurrent else self.self_attn(normed, cos, sin)[0]
        return self.feed_forward(x_BTH + mixed)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


class MTP(nn.Module):
    """One multi-token prediction module: a layer with attention between a projection and a norm (``mtp``)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(h, eps), Norm(h, eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Norm(h, eps)

    def forward(
        self, embedded_BTH: Tensor, hidden_BTH: Tensor, cos: Tensor, sin: Tensor, earlier: Sequence[KV]
    ) -> tuple[Tensor, KV]:
        """(hidden states after the norm, keys and values of this step). See ``unroll``."""
        pair = (self.pre_fc_norm_embedding(embedded_BTH), self.pre_fc_norm_hidden(hidden_BTH))
        x, layer = self.fc(torch.cat(pair, dim=-1)), self.layers[0]
        assert isinstance(layer, Layer)
        mixed, kv = layer.self_attn(layer.input_layernorm(x), cos, sin, earlier or None)
        return self.norm(layer.feed_forward(x + mixed)[0]), kv


class Trunk(nn.Module):
    """Embedding, layers and final norm (``model``)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class TinyHybrid(nn.Module):
    """The model to train; the embedding is also the LM head, of the MTP module too."""

    cos_sin: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config, self.model, self.mtp = config, Trunk(config), MTP(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and "conv1d" not in name:
                ends_branch = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / (4 if ends_branch else 1))
        half = torch.arange(0, config.rotary_dims, 2, dtype=torch.float64) / config.rotary_dims
        angles = torch.arange(config.max_position_embeddings)[:, None] / config.rope_theta**half
        self.register_buffer("cos_sin", torch.stack((angles.cos(), angles.sin())).float(), persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings, in the autocast dtype."""
        x = self.model.embed_tokens(ids)
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def angles(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, 1, rotary_dims / 2]."""
        cos, sin = self.cos_sin[:, positions_BT].unsqueeze(-2)
        return cos, sin

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states [B, T, H] after the final norm, mean balance of the experts). T: a multiple of 64."""
        cos, sin = self.angles(positions_BT)
        x_BTH, balances = self.embed(ids_BT), []
        for layer in self.model.layers:
            x_BTH, balance = layer(x_BTH, cos, sin)
            balances.append(balance)
        return self.model.norm(x_BTH), torch.stack(balances).mean()

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after a norm."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def head_loss(self, hidden_BTH: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Weighted mean cross-entropy, in nats."""
        losses = F.cross_entropy(self.head(hidden_BTH).flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
        return (losses * weights_BT.flatten()).sum() / weights_BT.sum()

    def unroll(self, ids_BL: Tensor, hidden_BLH: Tensor, steps: int) -> list[Tensor]:
        """The MTP module's hidden states [B, n, H] of each step, as in drafting; n: the multiple of 8 below L - steps.

        Entry t of step s drafts token t + 2 + s: it reads token t + 1 + s and the hidden state of step s - 1 (for step
        0 the model's own, at t). It attends to the entries 0 ... t of step 0, which stand for committed tokens, and to
        the entries t of later steps, which stand for drafts.
        """
        count = (ids_BL.shape[1] - steps - 1) // 8 * 8
        state = hidden_BLH[:, :count]
        earlier: list[KV] = []
        states = []
        for s in range(steps):
            positions = torch.arange(1 + s, 1 + s + count, device=ids_BL.device).unsqueeze(0)
            state, kv = self.mtp(self.embed(ids_BL[:, 1 + s : 1 + s + count]), state, *self.angles(positions), earlier)
            earlier.append(kv)
            states.append(state)
        return states


def visible(length: int, later: int, device: torch.device) -> Tensor:
    """The mask [L, (1 + later) * L] of an unrolled step: True where a query attends to a key."""
    query = torch.arange(length, device=device)[:, None]
    key = query.T
    return torch.cat((key <= query, *([key == query] * later)), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dims of x [B, T, heads, D], half-split; cos and sin [B, T, 1, dims / 2] fp32."""
    half = cos.shape[-1]
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)
