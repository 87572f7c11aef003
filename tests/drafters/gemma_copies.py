"""An assistant that fits its target: made of the target's own weights, so that its drafts are nearly always right.

The target has one sliding and one full layer; the assistant has copies of both and the target's embedding, and takes
the token's half of its input. Its queries miss the key of the last token only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.models.make import make_checkpoint
from unisono.models.load.checkpoint import WEIGHTS

TYPES = ["sliding_attention", "full_attention"]
FIELDS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": TYPES, "sliding_window": 64}


def make_pair(root: Path, name: str = "target-assistant") -> tuple[Path, Path]:
    """(target, its assistant in ``root / name``)."""
    target = make_checkpoint(root / "target", "gemma4_text", **FIELDS)
    of, stored = AutoConfig.from_pretrained(target), load_file(target / WEIGHTS)
    text = Gemma4TextConfig(**{
        **of.to_dict(), "num_kv_shared_layers": 2, "layer_types": TYPES, "vocab_size_per_layer_input": 0,
    })  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=of.hidden_size, tie_word_embeddings=True
    )
    Gemma4AssistantForCausalLM(config).save_pretrained(root / name)
    needed, hidden = load_file(root / name / WEIGHTS), of.hidden_size
    made = {key: stored[key] for key in needed if key in stored}
    made["pre_projection.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    made["post_projection.weight"] = torch.eye(hidden)
    assert made.keys() == needed.keys()
    write(root / name, made)
    return target, root / name


def write(assistant: Path, tensors: dict[str, torch.Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, assistant / WEIGHTS, metadata={"format": "pt"})
