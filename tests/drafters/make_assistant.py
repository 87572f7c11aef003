"""Random assistants of Gemma 4, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.models.make import randomise

EPS, WIDTH = 1e-3, 48
TYPES = ["sliding_attention", "full_attention"]


def make_assistant(directory: Path, target: Path, heads: tuple[int, int] = (6, 3), **fields: Any) -> Path:
    """A random assistant for a target, with the target's rotary tables. heads: the target's, and its heads of keys."""
    of = AutoConfig.from_pretrained(target).get_text_config()
    text = Gemma4TextConfig(
        vocab_size=of.vocab_size, hidden_size=WIDTH, intermediate_size=52, num_hidden_layers=2,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=20, global_head_dim=40,
        num_global_key_value_heads=2, attention_k_eq_v=True, num_kv_shared_layers=2, layer_types=TYPES,
        sliding_window=of.sliding_window, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        rms_norm_eps=EPS, max_position_embeddings=512,
    )  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=of.hidden_size, tie_word_embeddings=True, **fields
    )
    model = Gemma4AssistantForCausalLM(config)
    randomise(model, seed=5)
    if fields:
        order = torch.randperm(of.vocab_size, generator=torch.Generator().manual_seed(6))
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(directory)
    return directory
