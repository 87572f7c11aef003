"""MTP modules of DeepSeek's layout: a decoder layer more than the model has, with the norms and projection around it.

transformers writes the layer's tensors and computes the reference; only the parts around the layer are added here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.hybrids import reference
from tests.models.make import make_checkpoint
from tests.models.make_mtp import norm
from unisono.models.load.checkpoint import WEIGHTS


@dataclass(frozen=True)
class LayerMTP:
    """A checkpoint with one module. model: transformers' decoder of all its layers, the module's block last."""

    path: Path
    model: Any
    around: dict[str, torch.Tensor]

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens [T], hidden [T, H] that predicted them) -> the module's normed output [T, H]."""
        base, eps = self.model.model, self.model.config.rms_norm_eps
        embedded = norm(base.embed_tokens(tokens), self.around["enorm"], eps)
        x = torch.cat((embedded, norm(hidden, self.around["hnorm"], eps)), dim=1) @ self.around["eh_proj"].T
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        angles = base.rotary_emb(x[None], positions)
        out = base.layers[-1](x[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return norm((out[0] if isinstance(out, tuple) else out).view_as(x), self.around["shared_head.norm"], eps)


def make_layer_mtp(directory: Path, family: str, **overrides: Any) -> LayerMTP:
    """A random checkpoint of ``family`` whose layer behind the last one is an MTP module's block."""
    path = make_checkpoint(directory, family, **overrides)
    raw = json.loads((path / "config.json").read_text())
    layers, hidden = raw["num_hidden_layers"] - 1, raw["hidden_size"]
    model = reference(path)
    generator = torch.Generator().manual_seed(7)
    around = {name: 1 + 0.2 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm")}
    around["shared_head.norm"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    around["eh_proj"] = 1.5 * torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    tensors = load_file(path / WEIGHTS)
    tensors |= {f"model.layers.{layers}.{name}.weight": tensor for name, tensor in around.items()}
    save_file(tensors, path / WEIGHTS)
    raw["num_hidden_layers"], raw["num_nextn_predict_layers"] = layers, 1
    for by_layer in ("layer_types", "mlp_layer_types"):
        if raw.get(by_layer):
            raw[by_layer] = raw[by_layer][:layers]
    (path / "config.json").write_text(json.dumps(raw))
    return LayerMTP(path, model, around)
