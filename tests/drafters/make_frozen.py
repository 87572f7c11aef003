"""Random weights for the frozen-KV MTP drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.make_mtp import Weights
from unisono.models.load.checkpoint import Checkpoint

WIDTH, HEADS, DEPTH, MLP = 44, 6, 2, 30
"""Hidden size, query heads, layers and intermediate size."""


def random_weights(target: Path, seed: int = 0, heads: int = HEADS) -> Weights:
    """Random weights of a frozen-KV MTP drafter for ``target``, by the names of the checkpoint format."""
    config = Checkpoint.open(target).config
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns, generator=generator) / columns**0.5

    def scale(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    queries = heads * config.attention.head_dim
    w = {
        "model.embed_tokens.weight": matrix(config.vocab_size, WIDTH),
        "model.norm.weight": scale(WIDTH),
        "pre_projection.weight": matrix(WIDTH, 2 * config.hidden_size),
        "post_projection.weight": matrix(config.hidden_size, WIDTH),
    }
    for i in range(DEPTH):
        layer = {
            "input_layernorm": scale(WIDTH),
            "self_attn.q_proj": matrix(queries, WIDTH),
            "self_attn.q_norm": scale(config.attention.head_dim),
            "self_attn.o_proj": matrix(WIDTH, queries),
            "post_attention_layernorm": scale(WIDTH),
            "mlp.gate_proj": matrix(MLP, WIDTH),
            "mlp.up_proj": matrix(MLP, WIDTH),
            "mlp.down_proj": matrix(WIDTH, MLP),
        }
        w |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return w
