"""The EAGLE-3 head of ``tiny-vl`` in training, in plain torch with the tensor names of EAGLE-3 checkpoints.

The head at position p reads the token of p and the target's states of p - 1, and predicts p + 1. Of a picture's tokens
it reads the merged embeddings, as the target does (without deepstack), and every token has the target's rotary position
on three axes. It is unrolled as in drafting (arXiv 2503.01840, section 3.2): step s reads its own states of step s - 1.
``unisono.drafters.eagle.model.Eagle3Head`` serves it; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny.model import MLP, Norm, TinyConfig
from training.tiny_vl.model import Sizes, TinyVL, rotate

AUX = (2, 4, 5)
"""Layers of the target whose inputs the head reads."""
STEPS = 3
"""Steps that it is unrolled for: k of the measurement."""
DISCOUNT = 0.8


class HeadAttention(nn.Module):
    """Attention of grouped heads over the normed embedding beside the normed state."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h, d = sizes.hidden_size, sizes.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(2 * h, sizes.heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, sizes.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * h, sizes.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(sizes.heads * d, h, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, L, D]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class HeadLayer(nn.Module):
    """EAGLE-3's decoder layer, ``midlayer`` in checkpoints."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = lambda: Norm(sizes.hidden_size, 1e-6)  # noqa: E731
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn = HeadAttention(sizes)
        self.mlp = MLP(TinyConfig(hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size))


@dataclass(frozen=True)
class Taught:
    """What the target computed for a batch. x [B, L, H]: merged embeddings. aux [B, L, 3 H]. best [B, L]: its own next
    token. chances [B, L, V]. mask [B, 1, L, L]. angles: cosines and sines [B, L, D]. counted [B, L]: positions whose
    next token belongs to an answer."""

    x: Tensor
    aux: Tensor
    logits: Tensor
    mask: Tensor
    angles: tuple[Tensor, Tensor]
    counted: Tensor


class Head(nn.Module):
    """The head with a full vocabulary and an LM head of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.hidden_size
        self.sizes = sizes
        self.fc = nn.Linear(len(AUX) * h, h, bias=False)
        self.midlayer = HeadLayer(sizes)
        self.norm = Norm(h, 1e-6)
        self.lm_head = nn.Linear(h, sizes.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(
                    parameter, std=0.02 / (4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
                )

    def begin(self, model: TinyVL) -> None:
        """Start from the target's final norm and LM head."""
        with torch.no_grad():
            self.norm.weight.copy_(model.text.norm.weight)
            self.lm_head.weight.copy_(model.hf.lm_head.weight)

    def unroll(self, taught: Taught, steps: int = STEPS) -> Iterator[tuple[int, Tensor]]:
        """Yields (first position, logits [B, L - first, V]) of each step."""
        layer, hidden = self.midlayer, self.fc(taught.aux)
        cos, sin = taught.angles
        length = hidden.shape[1]
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(steps):
            first = 1 + step
            count = length - first
            hidden = hidden[:, :count]
            both = torch.cat((layer.input_layernorm(taught.x[:, first:]), layer.hidden_norm(hidden)), -1)
            q, k, v = layer.self_attn.project(both, cos[:, None, first:], sin[:, None, first:])
            keys, values = [t[:, :, :count] for t in (*keys, k)], [t[:, :, :count] for t in (*values, v)]
            itself = torch.eye(count, dtype=torch.bool, device=q.device).expand(q.shape[0], 1, -1, -1)
            mask = torch.cat((taught.mask[:, :, 1 : 1 + count, 1 : 1 + count], *[itself] * step), -1)
            hidden = hidden + layer.self_attn(q, torch.cat(keys, 2), torch.cat(values, 2), mask)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield first, self.lm_head(self.norm(hidden))


def teach(model: TinyVL, pictures: Tensor, ids: Tensor, weights: Tensor, positions: Tensor, mask: Tensor,
          places: Tensor, blind: bool = False) -> Taught:  # fmt: skip
    """Run the target over a batch. blind: withhold the picture's embeddings from what the head reads."""
    with torch.no_grad():
        seen, levels = model.see(pictures)
        x = model.merge(ids, places, seen)
        hidden, aux = model.read(x, levels, places, positions, mask, AUX)
        logits = model.head(hidden)
        angles = model.text.rotary_emb(x.float(), positions.transpose(0, 1))
        if blind:
            x = model.text.embed_tokens(ids).to(x.dtype)
    assert aux is not None
    counted = F.pad(weights[:, 1:] > 0, (0, 1))
    return Taught(x, aux, logits, mask, (angles[0], angles[1]), counted)


def head_loss(head: Head, taught: Taught) -> Tensor:
    """Cross entropy of each step with the target's own distribution, over answers, discounted by step."""
    losses, weights = list[Tensor](), 0.0
    for step, (first, logits) in enumerate(head.unroll(taught)):
        wanted = taught.logits[:, first:].float().softmax(-1)
        counted = taught.counted[:, first:]
        each = -(wanted * logits.float().log_softmax(-1)).sum(-1)
        losses.append(DISCOUNT**step * (each * counted).sum() / counted.sum().clamp_min(1))
        weights += DISCOUNT**step
    return torch.stack(losses).sum() / weights


@torch.no_grad()
def acceptance(head: Head, taught: Taught) -> tuple[int, int, list[int]]:
    """Greedy chains of STEPS drafts over the target's answers: (tokens, rounds, rounds that accepted draft 1, 2 …).

    Later drafts of a round count only if the ones before are the target's tokens, which the unrolled steps read. So one
    pass says how many drafts would be accepted at each position, and a walk over each answer counts its rounds.
    """
    best = taught.logits.argmax(-1)
    length = best.shape[1]
    right = torch.zeros(*best.shape, STEPS, dtype=torch.bool, device=best.device)
    for step, (first, logits) in enumerate(head.unroll(taught)):
        right[:, 1 : 1 + length - first, step] = logits.argmax(-1) == best[:, first:]  # of a round begun at p
    tokens = rounds = 0
    positions = [0] * STEPS
    for row, counted in zip(right.cumprod(-1).tolist(), taught.counted.tolist(), strict=True):
        places = [p for p, one in enumerate(counted) if one]
        if not places:
            continue
        at, last = places[0] + 1, places[-1]  # the prompt's pass gives the first token
        while at <= last:
            accepted = min(sum(row[at]), last - at)
            for draft in range(accepted):
                positions[draft] += 1
            rounds, tokens, at = rounds + 1, tokens + accepted + 1, at + accepted + 1
    return tokens, rounds, positions


def head_config(sizes: Sizes, rope: dict[str, Any]) -> dict[str, Any]:
    """The head's config.json. rope: the target's text model's rope parameters, its sections included."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": sizes.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "draft_vocab_size": sizes.vocab_size,
        "target_hidden_size": sizes.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX), "use_aux_hidden_state": True},
        "torch_dtype": "bfloat16",
    }
