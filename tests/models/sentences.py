"""sentence-transformers' files beside a small random model, and its arithmetic in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModel

TYPES = "sentence_transformers.models."
TEXTS = ["Tom has 3 boxes", "a", "the quick brown fox jumps over the lazy dog, twice", "…?"]


def close(ours: Any, theirs: Any) -> bool:
    """Cosine of at least 0.99999, and the same length."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.99999 and np.allclose(a, b, atol=1e-4)


@torch.no_grad()
def states(path: Path, ids: list[int]) -> torch.Tensor:
    """transformers' final states of a prompt."""
    return AutoModel.from_pretrained(path, dtype=torch.float32)(torch.tensor([ids])).last_hidden_state[0]


def write_modules(
    directory: Path, mode: str, hidden: int, dense: Sequence[tuple[int, str]] = (), bias: bool = False,
    prompts: dict[str, str] | None = None, default: str | None = None,
) -> list[torch.nn.Module]:  # fmt: skip
    """Write ``modules.json`` and the modules after a model: pooling, dense layers (outputs, activation), length 1.

    Returns the dense layers and activations.
    """
    generator, size, layers = torch.Generator().manual_seed(5), hidden, []
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": hidden, f"pooling_mode_{mode}": True, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for number, (outputs, activation) in enumerate(dense, 2):
        path, linear = f"{number}_Dense", torch.nn.Linear(size, outputs, bias)
        for parameter in linear.parameters():
            parameter.data.normal_(0, size**-0.5, generator=generator)
        (directory / path).mkdir()
        fields = {"in_features": size, "out_features": outputs, "bias": bias}
        fields |= {"activation_function": f"{getattr(torch.nn, activation).__module__}.{activation}"}
        (directory / path / "config.json").write_text(json.dumps(fields))
        save_file({f"linear.{k}": v for k, v in linear.state_dict().items()}, directory / path / "model.safetensors")
        kinds.append((path, "Dense"))
        layers += [linear, getattr(torch.nn, activation)()]
        size = outputs
    kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": TYPES + kind} for i, (path, kind) in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    named = {"prompts": prompts or {}, "default_prompt_name": default}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(named))
    return layers


@torch.no_grad()
def embedded(
    states: torch.Tensor, mode: str, layers: Sequence[torch.nn.Module], size: int | None = None
) -> torch.Tensor:
    """The embedding of a text's final states [tokens, hidden]: pooled, through the layers, cut, with length 1."""
    vector = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}[mode]
    for layer in layers:
        vector = layer(vector)
    return torch.nn.functional.normalize(vector[:size], dim=0)
