"""The assistant of ``tiny-gemma`` in plain torch, with the names of ``Gemma4AssistantForCausalLM``.

It has queries only, over the target's keys and values before the last committed token. All steps of a round stand at
that token's position, so that a pass over a row computes a round from each of its tokens.

Shapes: B rows, n rounds of a row, H hidden of the target, A of the assistant, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny.model import Norm, rotate
from training.tiny_gemma.model import (
    KV,
    MLP,
    SLIDING,
    Angles,
    GemmaConfig,
    HeadNorm,
    Outputs,
    PostNorm,
    TinyGemma,
    attend,
    initialise,
)


class QueryAttention(nn.Module):
    """Attention over keys and values of the target."""

    def __init__(self, config: GemmaConfig, kind: str) -> None:
        super().__init__()
        hidden, self.head_dim = config.assistant_hidden_size, config.heads_of(kind)[1]
        self.block = config.sliding_window
        self.window = config.sliding_window - 1 if kind == SLIDING else 0  # the query's own position uses up one
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)
        self.q_norm = HeadNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_BnA: Tensor, cos: Tensor, sin: Tensor, kv: KV) -> Tensor:
        """Query t sees the keys 0 … t."""
        q = self.q_norm(self.q_proj(x_BnA).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(attend(rotate(q, cos, sin).transpose(1, 2), kv, self.window, self.block))


class AssistantLayer(nn.Module):
    """One layer with norms before and after each block."""

    def __init__(self, config: GemmaConfig, kind: str) -> None:
        super().__init__()
        hidden, eps = config.assistant_hidden_size, config.rms_norm_eps
        self.kind = kind
        self.self_attn = QueryAttention(config, kind)
        self.mlp = MLP(hidden, config.assistant_intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), PostNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(hidden, eps), PostNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KV) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, kv)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class AssistantTrunk(nn.Module):
    """Embedding (the LM head's), layers and final norm (``model``)."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.assistant_hidden_size)
        self.layers = nn.ModuleList(AssistantLayer(config, kind) for kind in config.assistant_layers)
        self.norm = Norm(config.assistant_hidden_size, config.rms_norm_eps)


class TinyAssistant(nn.Module):
    """The assistant to train."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config, self.model = config, AssistantTrunk(config)
        self.pre_projection = nn.Linear(2 * config.hidden_size, config.assistant_hidden_size, bias=False)
        self.post_projection = nn.Linear(config.assistant_hidden_size, config.hidden_size, bias=False)
        initialise(self)
        nn.init.normal_(self.pre_projection.weight, std=(2 * config.hidden_size) ** -0.5)
        nn.init.normal_(self.post_projection.weight, std=config.assistant_hidden_size**-0.5)

    def forward(self, embedded_BnH: Tensor, hidden_BnH: Tensor, angles: Angles, shared: dict[str, KV]) -> Tensor:
        """One step of every round: states [B, n, A] after the norm."""
        x = self.pre_projection(torch.cat((embedded_BnH, hidden_BnH), dim=-1))
        for layer in self.model.layers:
            x = layer(x, *angles[layer.kind], shared[layer.kind])  # type: ignore[index]
        return self.model.norm(x)

    def head(self, states: Tensor) -> Tensor:
        """Logits, fp32; they have no cap."""
        return F.linear(states, self.model.embed_tokens.weight).float()

    def unroll(
        self, target: TinyGemma, ids_BT: Tensor, positions_BT: Tensor, outputs: Outputs, steps: int
    ) -> list[Tensor]:
        """States [B, n, A] of each step; n: the multiple of the window below T - ``steps``.

        The last committed token of round t is token t + 1. Step s reads token t + 1 + s, and drafts the next one; step
        0 reads the target's hidden state at t.
        """
        block = self.config.sliding_window
        count = (ids_BT.shape[1] - steps - 1) // block * block
        angles = target.angles(positions_BT[:, 1 : 1 + count])
        shared = {kind: (k[:, :, :count], v[:, :, :count]) for kind, (k, v) in outputs.shared.items()}
        hidden, states = outputs.hidden[:, :count], []
        for s in range(steps):
            state = self(target.embed(ids_BT[:, 1 + s : 1 + s + count]), hidden, angles, shared)
            hidden = self.post_projection(state)
            states.append(state)
        return states
