"""Draft models that are right some of the time: copies of a checkpoint with noise added to its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noisy(source: Path, directory: Path, scale: float, seed: int = 0) -> Path:
    """Copy checkpoint ``source`` and add ``scale`` standard deviations of N(0, 1) to each of its matrices."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        return tensor + (scale * tensor.float().std() * noise).to(tensor.dtype) if tensor.dim() == 2 else tensor

    return _rewrite(source, directory, {name: change(t) for name, t in _weights(source).items()})


def resized(source: Path, directory: Path, vocab_size: int) -> Path:
    """Copy checkpoint ``source`` with ``vocab_size`` token ids; added ones speak four times as loud."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return tensor
        added = 4 * tensor[: max(vocab_size - len(tensor), 0)]
        return torch.cat((tensor, added))[:vocab_size].contiguous()

    weights = {name: change(name, t) for name, t in _weights(source).items()}
    return _rewrite(source, directory, weights, vocab_size=vocab_size)


def _weights(source: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()}


def _rewrite(source: Path, directory: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return directory
